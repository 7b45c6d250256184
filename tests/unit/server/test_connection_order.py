"""Connection: the order of requests and the limits of pending ones, over an in-memory stream."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, ClassVar, cast

import pytest
from tests.support.connection_bench import (
    ConnectionBench,
    named,
    request,
    run_scenario,
    settle,
    start,
)

from exec_server.protocol import jsonrpc
from exec_server.protocol.decoding import Call, Params, Result
from exec_server.server import connection, lanes
from exec_server.server.methods import Method

# ---- order ---------------------------------------------------------------------------


def test_one_after_another() -> None:
    async def scenario(bench: ConnectionBench) -> None:
        bench.ready()
        bench.stream.say(named(1, "slow", "a"), named(2, "quick", "b"), named(3, "slow", "c"))
        bench.stream.say(named(4, "quick", "d"))
        await settle()
        assert (bench.ran, bench.stream.answered) == (["a"], [])
        bench.open("a")
        await settle()
        assert (bench.ran, bench.stream.answered) == (["a", "b", "c"], [1, 2])
        bench.open("c")
        await settle()
        assert bench.stream.answered == [1, 2, 3, 4]

    run_scenario(scenario)


def test_control_methods_overtake() -> None:
    async def scenario(bench: ConnectionBench) -> None:
        bench.ready()
        bench.stream.say(named(1, "slow", "a"), named(2, "quick", "b"), named(3, "control", "p"))
        assert bench.stream.answered == [3]
        # A control method that waits delays only control methods.
        bench.stream.say(named(4, "slowControl", "c"), named(5, "control", "q"))
        await settle()
        assert bench.stream.answered == [3]
        bench.open("c")
        await settle()
        assert bench.stream.answered == [3, 4, 5]
        bench.open("a")
        await settle()
        assert bench.stream.answered == [3, 4, 5, 1, 2]

    run_scenario(scenario)


def test_control_methods_wait_for_each_other_only() -> None:
    async def scenario(bench: ConnectionBench) -> None:
        bench.ready()
        bench.stream.say(named(1, "slowControl", "c"), named(2, "control", "q"))
        bench.stream.say(named(3, "quick", "a"))
        assert (bench.ran, bench.stream.answered) == (["c", "a"], [3])
        await settle()
        bench.open("c")
        await settle()
        assert bench.stream.answered == [3, 1, 2]

    run_scenario(scenario)


def test_control_methods_do_not_overtake_the_start_they_mean() -> None:
    async def scenario(bench: ConnectionBench) -> None:
        bench.ready()
        bench.stream.say(named(1, "slow", "a"), start(2, "p"), start(3, "p"))
        bench.stream.say(named(4, "control", "p"), named(5, "control", "other"))
        bench.stream.say({"id": 6, "method": "control", "params": ["p", None]})
        assert bench.stream.answered == [5]
        bench.open("a")
        await settle()
        assert bench.stream.answered == [5, 1, 2, 3, 4, 6]
        bench.stream.say(named(7, "slow", "b"), named(8, "control", "p"))
        assert bench.stream.answered[-1] == 8

    run_scenario(scenario)


def test_closing_a_handle_does_not_overtake_reads() -> None:
    async def scenario(bench: ConnectionBench) -> None:
        bench.ready()
        bench.stream.say(named(1, "slow", "a"), named(2, "fs/close", "h"))
        assert bench.stream.answered == []
        bench.open("a")
        await settle()
        assert bench.stream.answered == [1, 2]

    run_scenario(scenario)


def test_parked_requests_hold_up_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "PARKED_REQUESTS", 2)

    async def scenario(bench: ConnectionBench) -> None:
        bench.ready()
        bench.stream.say(named(1, "parked", "a"), named(2, "parked", "b"), named(3, "quick", "x"))
        assert bench.stream.answered == [3]
        # The third cannot be parked and keeps its slot in the lane.
        bench.stream.say(named(4, "parked", "c"), named(5, "quick", "y"))
        await settle()
        assert bench.stream.answered == [3]
        bench.open("c")
        await settle()
        assert bench.stream.answered == [3, 4, 5]
        bench.open("b")
        await settle()
        bench.stream.say(named(6, "parked", "d"), named(7, "quick", "z"))
        assert bench.stream.answered == [3, 4, 5, 2, 7]
        bench.open("a", "d")

    run_scenario(scenario)


def test_several_at_a_time() -> None:
    async def scenario(bench: ConnectionBench) -> None:
        bench.ready()
        bench.stream.say(*(named(name, "slow", name) for name in "abcd"))
        bench.stream.say(*(named(name, "slowControl", name) for name in "xyz"))
        bench.stream.say(named("f", "fs/close", "f"))
        await settle()
        assert bench.ran == ["a", "b", "x", "y"]
        bench.open("b", "x")
        await settle()
        assert bench.stream.answered == ["b", "x"]
        assert bench.ran == ["a", "b", "x", "y", "c", "z"]
        bench.open("y")
        await settle()
        assert bench.stream.answered == ["b", "x", "y", "f"]
        bench.open("a", "c", "z")
        await settle()
        bench.open("d")
        await settle()
        assert sorted(map(str, bench.stream.answered)) == list("abcdfxyz")

    run_scenario(scenario, slots=2)


def test_other_connections_get_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queued requests run until a limit of time, then callbacks of others, then the next ones."""
    monkeypatch.setattr(connection, "BURST_SECONDS", 0.0)

    async def scenario(bench: ConnectionBench) -> None:
        bench.ready()
        bench.stream.say(named(0, "slow", "a"))
        bench.stream.say(*(named(n, "quick", str(n)) for n in range(10)))
        bench.open("a")
        steps = []
        while len(bench.stream.sent) < 11:
            steps.append(len(bench.stream.sent))
            await asyncio.sleep(0)
        assert steps[-9:] == list(range(2, 11))

    run_scenario(scenario)


def test_queued_requests_run_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BURST_SECONDS", 1000.0)

    async def scenario(bench: ConnectionBench) -> None:
        bench.ready()
        bench.stream.unsent_bytes = connection.UNSENT_BYTES + 1
        bench.connection.pause_writing()
        bench.stream.say(*(named(n, "quick", str(n)) for n in range(3)))
        bench.stream.unsent_bytes = 0
        bench.connection.resume_writing()
        assert bench.stream.answered == [0, 1, 2]

    run_scenario(scenario)


# ---- limits --------------------------------------------------------------------------


def test_too_many_waiting_requests_stop_the_reading() -> None:
    async def scenario(bench: ConnectionBench) -> None:
        bench.ready()
        limit = lanes.QUEUED_REQUESTS
        bench.stream.say(named(-5, "slow", "a"))
        bench.stream.say(*(named(n, "quick", "q") for n in range(limit + 50)))
        assert not bench.stream.receiving
        assert bench.stream.waiting == 50
        bench.open("a")
        while len(bench.stream.sent) < limit + 51:
            await asyncio.sleep(0)
        assert bench.stream.answered == [-5, *range(limit + 50)]
        assert bench.stream.receiving

    run_scenario(scenario)


def test_too_many_pending_bytes_stop_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "PENDING_BYTES", 10_000)

    async def scenario(bench: ConnectionBench) -> None:
        bench.ready()
        big = request(1, "parked", processId="a", pad="x" * 9_000)
        bench.stream.say(big)
        assert bench.stream.receiving
        bench.stream.say(request(2, "parked", processId="b", pad="x" * 2_000))
        bench.stream.say(named(3, "control", "c"))
        assert (bench.stream.receiving, bench.stream.waiting) == (False, 1)
        await settle()
        bench.open("a")
        await settle()
        assert bench.stream.answered == [1, 3]
        bench.open("b")

    run_scenario(scenario)


def test_unread_answers_stop_all_but_control_methods() -> None:
    async def scenario(bench: ConnectionBench) -> None:
        bench.ready()
        table = bench.tables[0]
        bench.stream.unsent_bytes = connection.UNSENT_BYTES + 1
        bench.connection.pause_writing()
        assert table.calls == ["pause"]
        bench.stream.say(named(1, "quick", "a"), named(2, "control", "b"))
        assert bench.stream.answered == [2]
        bench.stream.unsent_bytes = 0
        bench.connection.resume_writing()
        assert table.calls == ["pause", "resume"]
        assert bench.stream.answered == [2, 1]

    run_scenario(scenario)


@pytest.mark.parametrize(
    "message", [b"garbage", {"method": "no/such"}, request(1, "no/such"), named(1, "control", "c")]
)
def test_far_too_much_unread_stops_the_reading(message: object) -> None:
    async def scenario(bench: ConnectionBench) -> None:
        bench.ready()
        bench.stream.unsent_bytes = connection.UNSENT_HARD_BYTES + 1
        bench.connection.pause_writing()
        bench.stream.say(message, message)
        assert (bench.stream.receiving, bench.stream.waiting) == (False, 1)
        bench.stream.unsent_bytes = 0
        bench.connection.resume_writing()
        await settle()
        assert (bench.stream.receiving, len(bench.stream.sent)) == (True, 2)

    run_scenario(scenario)


def test_back_pressure_before_the_handshake() -> None:
    async def scenario(bench: ConnectionBench) -> None:
        bench.connection.pause_writing()
        bench.connection.resume_writing()
        bench.ready()
        bench.stream.say(named(1, "quick", "a"))
        assert bench.stream.answered == [1]

    run_scenario(scenario)


def test_large_messages_are_decoded_in_a_thread_and_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "SHORT_BYTES", 500)
    monkeypatch.setattr(connection, "INLINE_DECODE_BYTES", 1000)

    async def scenario(bench: ConnectionBench) -> None:
        bench.ready()
        large = request(1, "quick", processId="a", pad="x" * 2000)
        bench.stream.say(large, named(2, "quick", "b"))
        assert (bench.stream.receiving, bench.stream.waiting) == (False, 1)
        while len(bench.stream.sent) < 2:
            await asyncio.sleep(0.001)
        assert bench.stream.answered == [1, 2]
        bench.stream.say(b"x" * 2000)
        while len(bench.stream.sent) < 3:
            await asyncio.sleep(0.001)
        assert bench.stream.answered[-1] == -1

    run_scenario(scenario)


_threads: set[str] = set()


def _record_thread(value: dict[str, Any], _: str | None) -> dict[str, Any]:
    _threads.add(threading.current_thread().name)
    return value


class _Recorded(Params, frozen=True):
    """Params that record the thread in which they are decoded."""

    wire_name = "Recorded"
    prepare: ClassVar[Callable[[dict[str, Any], str | None], dict[str, Any]]] = staticmethod(
        _record_thread
    )
    process_id: str


def test_params_of_large_messages_are_decoded_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SHORT_BYTES", 500)
    monkeypatch.setattr(connection, "INLINE_QUOTES", 100)
    monkeypatch.setattr(connection, "INLINE_DECODE_BYTES", 1000)

    async def scenario(bench: ConnectionBench) -> None:
        method = Method(Call("recorded", _Recorded, Result), cast(Any, bench.quick), "fake")
        monkeypatch.setitem(vars(connection)["METHODS"], "recorded", method)
        pad = "x" * 2000
        bench.stream.say(request(1, "recorded", processId="a", pad=pad))
        await _sent(bench, 1)
        assert "client must call initialize" in bench.stream.sent[0]["error"]["message"]
        bench.stream.say(request(2, "recorded", processId=7, pad=pad))
        await _sent(bench, 2)
        assert "expected a string" in bench.stream.sent[1]["error"]["message"]
        bench.ready()
        bench.stream.say(request(3, "recorded", processId="a", pad=pad))
        await _sent(bench, 1)
        bench.stream.say(request(4, "recorded", processId=[], pad=pad))
        await _sent(bench, 2)
        bench.stream.say(request(5, "unknown", pad=pad))
        await _sent(bench, 3)
        assert bench.stream.sent[0] == {"id": 3, "result": {"name": "a"}}
        assert "expected a string" in bench.stream.sent[1]["error"]["message"]
        assert "does not implement `unknown`" in bench.stream.sent[2]["error"]["message"]
        assert _threads == {"test_1"}
        # Few strings are decoded at once, many in the thread.
        bench.stream.say(request(6, "recorded", processId="b", pad="x" * 600))
        assert bench.stream.sent[3] == {"id": 6, "result": {"name": "b"}}
        assert len(_threads) == 2
        _threads.clear()
        bench.stream.say(request(7, "recorded", processId="b", pad=[""] * 150))
        await _sent(bench, 5)
        assert _threads == {"test_1"}

    run_scenario(scenario)


async def _sent(bench: ConnectionBench, count: int) -> None:
    while len(bench.stream.sent) < count:
        await asyncio.sleep(0.001)


def test_a_bug_in_the_decoder_costs_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SHORT_BYTES", 10)
    monkeypatch.setattr(connection, "INLINE_DECODE_BYTES", 10)

    def broken(message: bytes) -> None:
        raise ValueError("a bug")

    async def scenario(bench: ConnectionBench) -> None:
        monkeypatch.setattr(jsonrpc, "decode", broken)
        bench.stream.say(b"x" * 20)
        while bench.stream.closed is None:
            await asyncio.sleep(0.001)
        assert bench.stream.closed == (1011, "internal error")

    run_scenario(scenario)
