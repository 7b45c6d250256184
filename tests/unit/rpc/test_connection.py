"""Connection over an in-memory stream: handshake, lanes, limits, answers.

The methods are fakes whose handlers wait until the test lets them go, so that every order can
be produced on purpose.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from typing import Any, cast

import pytest

from exec_server.core.processes import ProcessTable
from exec_server.core.threads import Threads
from exec_server.errors import NotFound
from exec_server.protocol import process, session
from exec_server.protocol.method import Call
from exec_server.protocol.wire import Params, Result
from exec_server.rpc import connection
from exec_server.rpc.connection import Connection, Host
from exec_server.rpc.methods import Method
from exec_server.rpc.scope import Encoded, Machine, Scope, Streamed
from exec_server.rpc.session import SessionRegistry

_ENVIRONMENT = session.EnvironmentInfo(
    session.Shell("sh", "/bin/sh"),
    "0",
    "local",
    None,
    None,
    "linux",
    [],
    [],
    "/tmp",
    session.Capabilities(),
)


class _Name(Params, frozen=True):
    """Like the params of process methods: the name of a process, and anything else."""

    wire_name = "Name"
    omissible = ("pad",)
    process_id: str
    pad: str | None = None


class _Done(Result, frozen=True):
    name: str


class MemoryStream:
    """A MessageStream that keeps what is sent, and delivers what a client says when wanted."""

    is_strict = False
    origin = "message from memory"

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.parts: list[bytes] = []
        self.receiving = True
        self.unsent_bytes = 0
        self.closed: tuple[int, str] | None = None
        self.probed = 0
        self.receiver: Connection | None = None
        self._inbox: list[bytes] = []

    def send(self, message: bytes) -> None:
        self.sent.append(json.loads(message))

    async def send_parts(self, parts: AsyncIterator[bytes], size: int) -> None:
        self.parts = [part async for part in parts]
        if self.closed is None:
            assert sum(map(len, self.parts)) == size
            self.send(b"".join(self.parts))

    def unsent(self) -> int:
        return self.unsent_bytes

    def hold(self, *, receiving: bool) -> None:
        self.receiving = receiving
        if receiving:
            asyncio.get_running_loop().call_soon(self._deliver)

    def probe(self) -> None:
        self.probed += 1

    def close(self, code: int, reason: str) -> None:
        if self.closed is None:
            self.closed = (code, reason)
            assert self.receiver is not None
            asyncio.get_running_loop().call_soon(self.receiver.link_lost)

    def say(self, *messages: object) -> None:
        """What the client sends; kept back while the connection holds."""
        self._inbox += [m if isinstance(m, bytes) else json.dumps(m).encode() for m in messages]
        self._deliver()

    def _deliver(self) -> None:
        assert self.receiver is not None
        while self._inbox and self.receiving:
            self.receiver.message_received(self._inbox.pop(0))

    @property
    def answered(self) -> list[object]:
        return [message.get("id") for message in self.sent]

    @property
    def waiting(self) -> int:
        return len(self._inbox)


class _Table:
    """A ProcessTable without processes."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    async def end(self) -> None:
        self.calls.append("end")


class Bench:
    """A connection with fake methods, and what its handlers were asked."""

    def __init__(self, tasks: asyncio.TaskGroup, threads: Threads, places: int) -> None:
        self.tables: list[_Table] = []
        self.ran: list[str] = []
        self.gates: dict[str, asyncio.Future[None]] = {}
        machine = Machine(_ENVIRONMENT, {}, "/bin/sh", threads, cast(Any, None))
        sessions = SessionRegistry(self._make_table, tasks, 1000.0)
        self.sessions = sessions
        self.host = Host(machine, sessions, tasks, places)
        self.stream = MemoryStream()
        self.connection = self.connect(self.stream)

    def _make_table(self, emit: object) -> ProcessTable:
        self.tables.append(_Table())
        return cast(ProcessTable, self.tables[-1])

    def connect(self, stream: MemoryStream) -> Connection:
        stream.receiver = Connection(self.host, stream)
        return stream.receiver

    def ready(self) -> None:
        self.stream.say(_request(0, "initialize", clientName="x"), {"method": "initialized"})
        self.stream.sent.clear()

    # Handlers. `quick` answers at once, `slow` when the test opens the gate of that name.

    def quick(self, scope: Scope, params: _Name) -> _Done:
        self.ran.append(params.process_id)
        return _Done(params.process_id)

    def slow(self, scope: Scope, params: _Name) -> Awaitable[_Done]:
        self.ran.append(params.process_id)
        gate = self.gates[params.process_id] = asyncio.get_running_loop().create_future()

        async def wait() -> _Done:
            await gate
            return _Done(params.process_id)

        return wait()

    def open(self, *names: str) -> None:
        for name in names:
            self.gates[name].set_result(None)

    def methods(self) -> dict[str, Method[Any, Any]]:
        rows: list[Method[Any, Any]] = [
            Method(Call("quick", _Name, _Done), self.quick, "fake"),
            Method(Call("slow", _Name, _Done), self.slow, "fake"),
            Method(Call("control", _Name, _Done), self.quick, "exec", control=True),
            Method(Call("slowControl", _Name, _Done), self.slow, "exec", control=True),
            Method(Call("fs/close", _Name, _Done), self.quick, "filesystem", control=True),
            Method(Call("aside", _Name, _Done), self.slow, "fake", steps_aside=True),
            Method(Call("unit", None, _Done), lambda s, p: _Done("unit"), "unit words"),
            Method(Call("fail", _Name, _Done), _fail, "fake"),
            Method(Call("failLater", _Name, _Done), _fail_later, "fake"),
            Method(Call("encoded", _Name, _Done), lambda s, p: Encoded(b'{"x":1}'), "fake"),
            Method(Call("streamed", _Name, _Done), _streamed, "fake"),
            Method(process.START, self.start, "exec"),
        ]
        return {row.call.name: row for row in rows}

    def start(self, scope: Scope, params: process.StartParams) -> Any:
        self.ran.append(f"start {params.process_id}")
        return _Done(params.process_id)


def _fail(scope: Scope, params: _Name) -> _Done:
    if params.process_id == "rpc":
        raise NotFound("it is not there")
    if params.process_id == "os":
        raise FileNotFoundError(2, "anything")
    raise ValueError("a bug")


async def _fail_later(scope: Scope, params: _Name) -> _Done:
    return _fail(scope, params)


async def _streamed(scope: Scope, params: _Name) -> Streamed:
    async def parts() -> AsyncIterator[bytes]:
        yield b'{"big":'
        if params.process_id == "broken":
            raise OSError(5, "I/O")
        yield b"1}"

    return Streamed(len(b'{"big":1}'), parts())


def _request(request_id: object, method: str, **params: object) -> dict[str, object]:
    return {"id": request_id, "method": method, "params": params}


def _named(request_id: object, method: str, name: str) -> dict[str, object]:
    return _request(request_id, method, processId=name)


def _start(request_id: object, name: str) -> dict[str, object]:
    return _request(
        request_id, "process/start", processId=name, argv=["x"], cwd="/", env={}, tty=False
    )


async def _turns(count: int = 5) -> None:
    """Let everything run that waits for nothing but its turn on the loop."""
    for _ in range(count):
        await asyncio.sleep(0)


Scenario = Callable[[Bench], Awaitable[None]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a scenario on a fresh connection."""

    def play(scenario: Scenario, *, places: int = 1) -> None:
        async def run() -> None:
            with closing(Threads(1, "test")) as threads:
                async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
                    bench = Bench(tasks, threads, places)
                    monkeypatch.setattr(connection, "METHODS", bench.methods())
                    try:
                        await scenario(bench)
                    finally:
                        await _turns()
                        for task in list(bench.connection._running):
                            task.cancel()
                        await bench.sessions.end_all()

        asyncio.run(run())

    return play


# ---- the handshake --------------------------------------------------------------------


def test_initialize_and_initialized(play: Callable[..., None]) -> None:
    async def scenario(bench: Bench) -> None:
        stream = bench.stream
        stream.say(_named(1, "quick", "a"))
        stream.say(_request("i", "initialize", clientName="x"))
        stream.say(_named(2, "quick", "b"))
        stream.say({"method": "initialized"}, {"method": "initialized", "params": [1]})
        stream.say(_named(3, "quick", "c"))
        before, initialized, between, after = stream.sent
        assert before["error"] == {
            "code": -32600,
            "message": "client must call initialize before using fake methods",
        }
        assert initialized["id"] == "i"
        assert initialized["result"]["environmentInfo"]["shell"] == {
            "name": "sh",
            "path": "/bin/sh",
        }
        assert between["error"]["message"] == (
            "client must send initialized before using fake methods"
        )
        assert after == {"id": 3, "result": {"name": "c"}}
        assert bench.ran == ["c"]

    play(scenario)


def test_params_are_judged_before_the_handshake(play: Callable[..., None]) -> None:
    async def scenario(bench: Bench) -> None:
        bench.stream.say(_request(1, "quick", processId=5), _request(2, "unit", x=1))
        bench.stream.say({"id": 3, "method": "unit", "params": []})
        bench.stream.say({"id": 4, "method": "unit", "params": None})
        codes = [message["error"]["code"] for message in bench.stream.sent]
        assert codes == [-32602, -32602, -32602, -32600]
        assert "unit words methods" in bench.stream.sent[3]["error"]["message"]

    play(scenario)


def test_initialize_succeeds_once(play: Callable[..., None]) -> None:
    async def scenario(bench: Bench) -> None:
        unknown = _request(1, "initialize", clientName="x", resumeSessionId="no")
        bench.stream.say(
            unknown, _request(2, "initialize"), _request(3, "initialize", clientName="x")
        )
        bench.stream.say(_request(4, "initialize", clientName="x"))
        texts = [message.get("error", {}).get("message") for message in bench.stream.sent]
        assert texts == [
            "unknown session id no",
            "missing field `clientName`",
            None,
            "initialize may only be sent once per connection",
        ]

    play(scenario)


def test_early_initialized_ends_the_connection(play: Callable[..., None]) -> None:
    async def scenario(bench: Bench) -> None:
        bench.stream.say({"method": "initialized"})
        assert bench.stream.closed == (1008, "initialized before initialize")

    play(scenario)


@pytest.mark.parametrize(
    "message", [{"id": 1, "result": None}, {"id": "x", "error": {"code": 1, "message": "m"}}]
)
def test_stray_response_ends_the_connection(play: Callable[..., None], message: object) -> None:
    async def scenario(bench: Bench) -> None:
        bench.ready()
        bench.stream.say(message)
        assert bench.stream.closed == (1008, "response to a request that was never made")

    play(scenario)


# ---- what is not a request ------------------------------------------------------------


def test_malformed_messages_are_answered_and_survived(play: Callable[..., None]) -> None:
    async def scenario(bench: Bench) -> None:
        bench.stream.say(b"garbage", [], {"method": "no/such"})
        bench.ready()
        bench.stream.say(b"garbage", [], {"method": "no/such", "params": 1})
        prefix = "failed to parse message from memory: "
        assert bench.stream.sent == [
            {"error": {"code": -32600, "message": text}, "id": -1}
            for text in (
                prefix + "expected value at line 1 column 1",
                prefix + "expected a JSON-RPC object",
                "unexpected notification method: no/such",
            )
        ]
        assert bench.stream.closed is None

    play(scenario)


def test_unknown_methods(play: Callable[..., None]) -> None:
    async def scenario(bench: Bench) -> None:
        bench.stream.say(_request("a", "no/such"), _request(5, "initialized"))
        assert [message["id"] for message in bench.stream.sent] == ["a", 5]
        assert bench.stream.sent[0]["error"] == {
            "code": -32601,
            "message": "exec-server stub does not implement `no/such` yet",
        }

    play(scenario)


# ---- answers --------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fail", "failLater"])
def test_exceptions_become_answers(
    play: Callable[..., None], method: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(bench: Bench) -> None:
        bench.ready()
        bench.stream.say(*(_named(n, method, n) for n in ("rpc", "os", "bug")))
        await _turns(20)
        errors = {message["id"]: message["error"] for message in bench.stream.sent}
        assert errors == {
            "rpc": {"code": -32004, "message": "it is not there"},
            "os": {"code": -32004, "message": "anything (os error 2)"},
            "bug": {"code": -32603, "message": "internal error"},
        }
        bench.stream.say(_named(1, "quick", "still alive"))
        assert bench.ran == ["still alive"]

    with caplog.at_level(logging.ERROR):
        play(scenario)
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_results_that_are_text_already(play: Callable[..., None]) -> None:
    async def scenario(bench: Bench) -> None:
        bench.ready()
        bench.stream.say(_named(1, "encoded", "x"), _named(2, "streamed", "x"))
        await _turns()
        assert bench.stream.sent == [{"id": 1, "result": {"x": 1}}, {"id": 2, "result": {"big": 1}}]
        assert len(bench.stream.parts) == 4

    play(scenario)


def test_half_an_answer_ends_the_connection(play: Callable[..., None]) -> None:
    async def scenario(bench: Bench) -> None:
        bench.ready()
        bench.stream.say(_named(1, "streamed", "broken"))
        await _turns()
        assert bench.stream.closed == (1011, "a file could not be read to its end")

    play(scenario)


# ---- order ----------------------------------------------------------------------------


def test_one_after_another(play: Callable[..., None]) -> None:
    async def scenario(bench: Bench) -> None:
        bench.ready()
        bench.stream.say(_named(1, "slow", "a"), _named(2, "quick", "b"), _named(3, "slow", "c"))
        bench.stream.say(_named(4, "quick", "d"))
        await _turns()
        assert (bench.ran, bench.stream.answered) == (["a"], [])
        bench.open("a")
        await _turns()
        assert (bench.ran, bench.stream.answered) == (["a", "b", "c"], [1, 2])
        bench.open("c")
        await _turns()
        assert bench.stream.answered == [1, 2, 3, 4]

    play(scenario)


def test_control_methods_overtake(play: Callable[..., None]) -> None:
    async def scenario(bench: Bench) -> None:
        bench.ready()
        bench.stream.say(_named(1, "slow", "a"), _named(2, "quick", "b"), _named(3, "control", "p"))
        assert bench.stream.answered == [3]
        # One lane each: a control method that waits holds up only its own kind.
        bench.stream.say(_named(4, "slowControl", "c"), _named(5, "control", "q"))
        await _turns()
        assert bench.stream.answered == [3]
        bench.open("c")
        await _turns()
        assert bench.stream.answered == [3, 4, 5]
        bench.open("a")
        await _turns()
        assert bench.stream.answered == [3, 4, 5, 1, 2]

    play(scenario)


def test_control_methods_do_not_overtake_the_start_they_mean(play: Callable[..., None]) -> None:
    async def scenario(bench: Bench) -> None:
        bench.ready()
        bench.stream.say(_named(1, "slow", "a"), _start(2, "p"), _start(3, "p"))
        bench.stream.say(_named(4, "control", "p"), _named(5, "control", "other"))
        bench.stream.say({"id": 6, "method": "control", "params": ["p", None]})
        assert bench.stream.answered == [5]
        bench.open("a")
        await _turns()
        assert bench.stream.answered == [5, 1, 2, 3, 4, 6]
        bench.stream.say(_named(7, "slow", "b"), _named(8, "control", "p"))
        assert bench.stream.answered[-1] == 8

    play(scenario)


def test_closing_a_handle_does_not_overtake_reads(play: Callable[..., None]) -> None:
    async def scenario(bench: Bench) -> None:
        bench.ready()
        bench.stream.say(_named(1, "slow", "a"), _named(2, "fs/close", "h"))
        assert bench.stream.answered == []
        bench.open("a")
        await _turns()
        assert bench.stream.answered == [1, 2]

    play(scenario)


def test_who_steps_aside_holds_up_nobody(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "ASIDE_REQUESTS", 2)

    async def scenario(bench: Bench) -> None:
        bench.ready()
        bench.stream.say(_named(1, "aside", "a"), _named(2, "aside", "b"), _named(3, "quick", "x"))
        assert bench.stream.answered == [3]
        # The third has no room aside and keeps its place in the lane.
        bench.stream.say(_named(4, "aside", "c"), _named(5, "quick", "y"))
        await _turns()
        assert bench.stream.answered == [3]
        bench.open("c")
        await _turns()
        assert bench.stream.answered == [3, 4, 5]
        bench.open("b")
        await _turns()
        bench.stream.say(_named(6, "aside", "d"), _named(7, "quick", "z"))
        assert bench.stream.answered == [3, 4, 5, 2, 7]
        bench.open("a", "d")

    play(scenario)


def test_several_at_a_time(play: Callable[..., None]) -> None:
    async def scenario(bench: Bench) -> None:
        bench.ready()
        bench.stream.say(*(_named(name, "slow", name) for name in "abcd"))
        bench.stream.say(*(_named(name, "slowControl", name) for name in "xyz"))
        bench.stream.say(_named("f", "fs/close", "f"))
        await _turns()
        assert bench.ran == ["a", "b", "x", "y"]
        bench.open("b", "x")
        await _turns()
        assert bench.stream.answered == ["b", "x"]
        assert bench.ran == ["a", "b", "x", "y", "c", "z"]
        bench.open("y")
        await _turns()
        assert bench.stream.answered == ["b", "x", "y", "f"]
        bench.open("a", "c", "z")
        await _turns()
        bench.open("d")
        await _turns()
        assert sorted(map(str, bench.stream.answered)) == list("abcdfxyz")

    play(scenario, places=2)


def test_other_connections_get_their_turn(play: Callable[..., None]) -> None:
    async def scenario(bench: Bench) -> None:
        bench.ready()
        count = connection.BURST + 10
        bench.stream.say(_named(0, "slow", "a"))
        bench.stream.say(*(_named(n, "quick", str(n)) for n in range(count)))
        bench.open("a")
        while len(bench.stream.sent) < 2:
            await asyncio.sleep(0)
        assert len(bench.stream.sent) == connection.BURST + 1
        await _turns()
        assert len(bench.stream.sent) == count + 1

    play(scenario)


# ---- limits ---------------------------------------------------------------------------


def test_too_many_waiting_requests_stop_the_reading(play: Callable[..., None]) -> None:
    async def scenario(bench: Bench) -> None:
        bench.ready()
        limit = connection.QUEUED_REQUESTS
        bench.stream.say(_named(-5, "slow", "a"))
        bench.stream.say(*(_named(n, "quick", "q") for n in range(limit + 50)))
        assert not bench.stream.receiving
        assert bench.stream.waiting == 50
        bench.open("a")
        while len(bench.stream.sent) < limit + 51:
            await asyncio.sleep(0)
        assert bench.stream.answered == [-5, *range(limit + 50)]
        assert bench.stream.receiving

    play(scenario)


def test_too_many_pending_bytes_stop_the_reading(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PENDING_BYTES", 10_000)

    async def scenario(bench: Bench) -> None:
        bench.ready()
        big = _request(1, "aside", processId="a", pad="x" * 9_000)
        bench.stream.say(big)
        assert bench.stream.receiving
        bench.stream.say(_request(2, "aside", processId="b", pad="x" * 2_000))
        bench.stream.say(_named(3, "control", "c"))
        assert (bench.stream.receiving, bench.stream.waiting) == (False, 1)
        await _turns()
        bench.open("a")
        await _turns()
        assert bench.stream.answered == [1, 3]
        bench.open("b")

    play(scenario)


def test_unread_answers_stop_all_but_control_methods(play: Callable[..., None]) -> None:
    async def scenario(bench: Bench) -> None:
        bench.ready()
        table = bench.tables[0]
        bench.stream.unsent_bytes = connection.UNSENT_BYTES + 1
        bench.connection.sending_slow()
        assert table.calls == ["pause"]
        bench.stream.say(_named(1, "quick", "a"), _named(2, "control", "b"))
        assert bench.stream.answered == [2]
        bench.stream.unsent_bytes = 0
        bench.connection.sending_ready()
        assert table.calls == ["pause", "resume"]
        assert bench.stream.answered == [2, 1]

    play(scenario)


@pytest.mark.parametrize(
    "message",
    [b"garbage", {"method": "no/such"}, _request(1, "no/such"), _named(1, "control", "c")],
)
def test_far_too_much_unread_stops_the_reading(play: Callable[..., None], message: object) -> None:
    async def scenario(bench: Bench) -> None:
        bench.ready()
        bench.stream.unsent_bytes = connection.UNSENT_HARD_BYTES + 1
        bench.connection.sending_slow()
        bench.stream.say(message, message)
        assert (bench.stream.receiving, bench.stream.waiting) == (False, 1)
        bench.stream.unsent_bytes = 0
        bench.connection.sending_ready()
        await _turns()
        assert (bench.stream.receiving, len(bench.stream.sent)) == (True, 2)

    play(scenario)


def test_back_pressure_before_the_handshake(play: Callable[..., None]) -> None:
    async def scenario(bench: Bench) -> None:
        bench.connection.sending_slow()
        bench.connection.sending_ready()
        bench.ready()
        bench.stream.say(_named(1, "quick", "a"))
        assert bench.stream.answered == [1]

    play(scenario)


def test_large_messages_are_decoded_aside_and_in_order(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "DECODED_INLINE_BYTES", 1000)

    async def scenario(bench: Bench) -> None:
        bench.ready()
        large = _request(1, "quick", processId="a", pad="x" * 2000)
        bench.stream.say(large, _named(2, "quick", "b"))
        assert (bench.stream.receiving, bench.stream.waiting) == (False, 1)
        while len(bench.stream.sent) < 2:
            await asyncio.sleep(0.001)
        assert bench.stream.answered == [1, 2]
        bench.stream.say(b"x" * 2000)
        while len(bench.stream.sent) < 3:
            await asyncio.sleep(0.001)
        assert bench.stream.answered[-1] == -1

    play(scenario)


def test_a_bug_in_the_decoder_costs_one_connection(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "DECODED_INLINE_BYTES", 10)

    def broken(message: bytes) -> None:
        raise ValueError("a bug")

    async def scenario(bench: Bench) -> None:
        monkeypatch.setattr(connection.jsonrpc, "decode", broken)
        bench.stream.say(b"x" * 20)
        while bench.stream.closed is None:
            await asyncio.sleep(0.001)
        assert bench.stream.closed == (1011, "internal error")

    play(scenario)


# ---- what goes on after its request ---------------------------------------------------


def _scope(bench: Bench) -> Scope:
    assert bench.connection._scope is not None
    return bench.connection._scope


def test_what_was_started_waits_for_the_client_and_ends_with_the_link(
    play: Callable[..., None],
) -> None:
    async def scenario(bench: Bench) -> None:
        seen: list[str] = []

        async def go_on() -> None:
            try:
                await _scope(bench).until_sendable()
                seen.append("sendable")
                await asyncio.get_running_loop().create_future()
            finally:
                seen.append("ended")

        bench.connection.sending_slow()
        bench.ready()
        assert _scope(bench).start(go_on())
        await _turns()
        assert seen == []
        bench.connection.sending_ready()
        await _turns()
        assert seen == ["sendable"]
        bench.connection.link_lost()
        assert not _scope(bench).start(go_on())
        await _turns()
        assert seen == ["sendable", "ended"]

    play(scenario)


def test_what_was_started_and_fails_ends_only_its_connection(
    play: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise ValueError("a bug")

    async def scenario(bench: Bench) -> None:
        bench.ready()
        assert _scope(bench).start(fail())
        await _turns()
        assert bench.stream.closed == (1011, "internal error")

    play(scenario)
    assert "a bug" in caplog.text


# ---- the end and the session ----------------------------------------------------------


def test_lost_link_abandons_requests_and_detaches(play: Callable[..., None]) -> None:
    async def scenario(bench: Bench) -> None:
        bench.ready()
        bench.stream.say(_named(1, "slow", "a"), _named(2, "quick", "b"), _named(3, "aside", "c"))
        bench.stream.say(_named(4, "slowControl", "d"), _named(5, "control", "e"))
        await _turns()
        bench.connection.link_lost()
        await _turns()
        assert all(gate.cancelled() for gate in bench.gates.values())
        assert bench.stream.sent == []
        assert bench.ran == ["a", "d"]
        assert bench.tables[0].calls == ["resume"]

    play(scenario)


def test_session_moves_to_another_connection(play: Callable[..., None]) -> None:
    async def scenario(bench: Bench) -> None:
        bench.stream.say(_request(0, "initialize", clientName="x"), {"method": "initialized"})
        session_id = bench.stream.sent[0]["result"]["sessionId"]
        second = MemoryStream()
        bench.connect(second)
        resume = _request(1, "initialize", clientName="y", resumeSessionId=session_id)
        second.say(resume)
        assert second.sent[0]["error"]["code"] == -32010
        assert bench.stream.probed == 1
        bench.connection.link_lost()
        await _turns()
        second.say(resume)
        assert second.sent[1]["result"]["sessionId"] == session_id
        notice = session_notice(bench, session_id)
        assert second.sent[2] == notice
        assert notice not in bench.stream.sent

    play(scenario)


def session_notice(bench: Bench, session_id: str) -> dict[str, Any]:
    """Has the session say something; returns what should be on the wire."""
    found = bench.sessions._sessions[session.SessionId(session_id)]
    found._notify(process.CLOSED, process.ClosedParams(process.ProcessId("p"), 3))
    return {"method": "process/closed", "params": {"processId": "p", "seq": 3}}


def test_notifications_are_compact() -> None:
    text = connection.jsonrpc.encode_notification(
        process.CLOSED, process.ClosedParams(process.ProcessId("ü"), 3)
    )
    assert text == '{"method":"process/closed","params":{"processId":"ü","seq":3}}'.encode()
