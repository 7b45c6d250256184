"""The server's WebSocket over a transport in memory: flow control, budgets and liveness."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.support.clock import Clock
from tests.support.raw_links import frame_bytes
from tests.support.websocket_server import MIB, Connection, Server, close_event, large_frame

from exec_server.net.inbox import BURST, ByteBudget
from exec_server.net.websocket.frames import Event, Opcode
from exec_server.net.websocket.server import (
    PING_SECONDS,
    PROBE_SECONDS,
    STALL_SECONDS,
    TRICKLE_BYTES_PER_SECOND,
)

# ---- flow -----------------------------------------------------------------------------


def test_paused_receiver_is_not_read_for(opened: Connection, clock: Clock) -> None:
    opened.receive(Opcode.TEXT, b"1")
    opened.stream.pause_reading()
    opened.stream.pause_reading()
    assert opened.transport.is_reading_paused
    opened.stream.resume_reading()
    assert opened.transport.is_reading_paused  # not before the buffered messages are delivered
    clock.run_soon()
    assert not opened.transport.is_reading_paused
    opened.receive(Opcode.TEXT, b"2")
    assert opened.receiver.seen == [b"1", b"2"]


def test_messages_wait_for_a_paused_receiver(opened: Connection, clock: Clock) -> None:
    def message_received(message: bytes) -> None:
        opened.receiver.seen.append(message)
        opened.stream.pause_reading()

    opened.receiver.message_received = message_received  # type: ignore[method-assign]
    opened.transport.receive(b"".join(frame_bytes(Opcode.TEXT, b"%d" % n) for n in range(3)))
    assert opened.receiver.seen == [b"0"]
    for count in (2, 3):
        opened.stream.resume_reading()
        clock.run_soon()
        assert len(opened.receiver.seen) == count
        assert opened.transport.is_reading_paused


def test_many_messages_are_delivered_in_bursts(opened: Connection, clock: Clock) -> None:
    count = 3 * BURST
    opened.transport.receive(b"".join(frame_bytes(Opcode.TEXT, b"%d" % n) for n in range(count)))
    assert len(opened.receiver.seen) == BURST
    assert opened.transport.is_reading_paused
    clock.run_soon()
    assert opened.receiver.seen == [b"%d" % n for n in range(count)]
    assert not opened.transport.is_reading_paused


def test_slow_peer_pauses_the_producer_and_gets_one_pong(opened: Connection) -> None:
    opened.stream.pause_writing()
    opened.receive(Opcode.PING, b"1")
    opened.receive(Opcode.PING, b"2")
    assert opened.events() == []
    opened.stream.resume_writing()
    assert opened.events() == [Event(Opcode.PONG, b"2")]
    assert opened.receiver.seen == ["pause", "resume"]


def _with_budget(listener: Server, size: int) -> ByteBudget:
    budget = ByteBudget(size)
    listener.settings = replace(listener.settings, budget=budget)
    return budget


def test_large_message_waits_for_its_part_of_the_budget(listener: Server, clock: Clock) -> None:
    _with_budget(listener, 3 * MIB)
    first, second = listener.open(), listener.open()
    data = large_frame()
    first.transport.receive(data[:100])
    second.transport.receive(data[:100])
    assert not first.transport.is_reading_paused
    assert second.transport.is_reading_paused
    first.transport.receive(data[100:])
    assert not second.transport.is_reading_paused
    second.transport.receive(data[100:])
    assert first.receiver.seen == second.receiver.seen == [b"x" * 2 * MIB]


@pytest.mark.parametrize("end", ["close", "lose"])
def test_lost_connection_gives_its_part_of_the_budget_back(listener: Server, end: str) -> None:
    budget = _with_budget(listener, 3 * MIB)
    connections = [listener.open() for _ in range(2)]
    for connection in connections:
        connection.transport.receive(large_frame()[:100])
    assert budget.has_waiters
    for connection in reversed(connections):
        if end == "close":
            connection.stream.close(1000, "")
        connection.transport.lose()
    assert budget.try_acquire(3 * MIB)


def test_ping_between_fragments_keeps_the_part_of_the_budget(listener: Server) -> None:
    budget = _with_budget(listener, 64 * MIB)
    connection = listener.open()
    connection.receive(Opcode.TEXT, b"x" * 2 * MIB, fin=False)
    connection.receive(Opcode.PING, b"")
    assert not budget.try_acquire(1)
    connection.receive(Opcode.CONTINUATION, b"x")
    assert connection.receiver.seen == [b"x" * (2 * MIB + 1)]
    assert budget.try_acquire(64 * MIB)


def test_probed_peer_may_complete_a_message_that_waits_for_the_budget(listener: Server) -> None:
    budget = _with_budget(listener, 3 * MIB)
    assert budget.try_acquire(2 * MIB)
    opened = listener.open()
    data = large_frame()
    opened.transport.receive(data[:-10])
    assert opened.transport.is_reading_paused
    opened.stream.probe()
    opened.transport.receive(data[-10:])
    assert opened.receiver.seen == [b"x" * 2 * MIB]
    assert not opened.transport.is_reading_paused
    assert not budget.has_waiters


# ---- liveness -------------------------------------------------------------------------


def _advance(clock: Clock, opened: Connection, now: float) -> None:
    clock.advance(now)
    opened.stream.tick(now)


def test_silent_peer_is_pinged_then_cut_off(opened: Connection, clock: Clock) -> None:
    _advance(clock, opened, PING_SECONDS - 1)
    assert opened.events() == []
    _advance(clock, opened, PING_SECONDS)
    _advance(clock, opened, PING_SECONDS + 1)
    assert opened.events() == [Event(Opcode.PING, b"")]
    _advance(clock, opened, 2 * PING_SECONDS)
    assert opened.transport.is_aborted
    clock.run_soon()
    assert opened.receiver.seen == ["lost"]


def test_peer_that_sends_anything_is_not_cut_off(opened: Connection, clock: Clock) -> None:
    for count in range(1, 5):
        _advance(clock, opened, count * PING_SECONDS)
        assert opened.events() == [Event(Opcode.PING, b"")]
        opened.receive(Opcode.PONG)
    assert not opened.transport.is_aborted


@pytest.mark.parametrize("why", ["full", "paused"])
def test_peer_that_cannot_answer_is_not_pinged(opened: Connection, clock: Clock, why: str) -> None:
    if why == "full":
        opened.stream.pause_writing()
    else:
        opened.stream.pause_reading()
    for count in range(1, 5):
        _advance(clock, opened, count * PING_SECONDS)
    assert opened.events() == []
    assert not opened.transport.is_aborted


def test_stalled_message_ends_its_connection(opened: Connection, clock: Clock) -> None:
    data = large_frame()
    opened.transport.receive(data[:100_000])
    clock.advance(STALL_SECONDS)
    opened.transport.receive(data[100_000:100_001])  # progress, if little
    _advance(clock, opened, 2 * STALL_SECONDS)
    assert opened.events() == [Event(Opcode.PING, b"")]
    _advance(clock, opened, 2 * STALL_SECONDS + 1)
    assert opened.events() == [close_event(1008, "message stalled")]


def test_message_of_a_paused_receiver_does_not_stall(opened: Connection, clock: Clock) -> None:
    opened.transport.receive(large_frame()[:100_000])
    opened.stream.pause_reading()
    _advance(clock, opened, 2 * STALL_SECONDS)
    assert opened.events() == []


def test_trickling_message_ends_when_others_wait(listener: Server, clock: Clock) -> None:
    _with_budget(listener, 3 * MIB)
    first, second = listener.open(), listener.open()
    data = large_frame()
    first.transport.receive(data[:100_000])
    limit = STALL_SECONDS + 2 * MIB / TRICKLE_BYTES_PER_SECOND
    now, sent = 0.0, 100_000
    while now <= limit + 5:
        now += 5
        clock.advance(now)
        first.transport.receive(data[sent : sent + 1])
        sent += 1
        first.stream.tick(now)
    assert first.events() == []  # slow, but no other message needs the budget
    second.transport.receive(data[:100_000])
    assert second.transport.is_reading_paused
    first.stream.tick(now)
    assert first.events() == [close_event(1008, "message stalled")]
    assert not second.transport.is_reading_paused
    second.stream.tick(now + STALL_SECONDS)
    assert second.events() == [Event(Opcode.PING, b"")]  # it has as much time from now on


def test_silent_peer_is_cut_off_when_probed(opened: Connection, clock: Clock) -> None:
    opened.stream.pause_reading()
    opened.stream.probe()
    opened.stream.probe()
    assert opened.events() == [Event(Opcode.PING, b"")]
    assert not opened.transport.is_reading_paused
    clock.advance(PROBE_SECONDS)
    assert opened.transport.is_aborted


def test_living_peer_survives_a_probe_and_its_messages_wait(
    opened: Connection, clock: Clock
) -> None:
    opened.stream.pause_reading()
    opened.stream.probe()
    opened.receive(Opcode.TEXT, b"later")
    assert opened.transport.is_reading_paused
    assert opened.receiver.seen == []
    clock.advance(2 * PROBE_SECONDS)
    opened.stream.resume_reading()
    clock.run_soon()
    assert opened.receiver.seen == [b"later"]
    assert not opened.transport.is_aborted
