"""One stream of a relay in memory: fair sending, queues, the shared budget, and its ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, cast

import pytest
from tests.support.clock import Clock

from exec_server.errors import InternalError, RelayError
from exec_server.net.inbox import ByteBudget
from exec_server.net.relay_stream import (
    FREE_BYTES,
    PROBE_SECONDS,
    QUEUED_MESSAGES,
    SEND_HIGH_BYTES,
    SEND_LOW_BYTES,
    STALL_SECONDS,
    RelayStream,
)
from exec_server.net.stream import MessageStream
from exec_server.relay.records import ONE_RECORD_BYTES, RecordSplitter, split_records


class Channel:
    """Frames that are their records."""

    stream_id = "s"
    message_bytes = 10_000_000

    def __init__(self) -> None:
        self.incoming_size = 0
        self.is_spent = False
        self.drops = 0

    def drop_incoming(self) -> None:
        self.drops += 1

    def records(self, message: bytes) -> Iterator[bytes | memoryview]:
        if not message:
            raise RelayError("message of 0 bytes")
        return split_records(message)

    def one_record(self, message: bytes) -> bytes:
        return b"".join(self.records(message))

    def splitter(self, size: int) -> RecordSplitter:
        return RecordSplitter(size, start=b"", record_bytes=1000)

    def seal(self, record: bytes | memoryview) -> bytes:
        if self.is_spent:
            raise RelayError("no more numbers")
        return bytes(record)


class Carrier:
    """The link below; the test sends the frames of the scheduled stream."""

    def __init__(self) -> None:
        self.is_full = False
        self.frames: list[bytes] = []
        self.scheduled: list[RelayStream] = []
        self.ended: list[str] = []

    def send_frame(self, frame: bytes) -> None:
        self.frames.append(frame)

    def schedule(self, stream: RelayStream) -> None:
        self.scheduled.append(stream)

    def end_stream(self, stream_id: str) -> None:
        self.ended.append(stream_id)

    def send_all(self) -> None:
        [stream] = self.scheduled
        self.scheduled.clear()
        while stream.send_next():
            pass


class Receiver:
    def __init__(self, stream: MessageStream) -> None:
        self.stream = stream
        self.seen: list[Any] = []

    def message_received(self, message: bytes) -> None:
        self.seen.append(message)
        if message == b"pause":
            self.stream.pause_reading()
        elif message == b"close":
            self.stream.close(0, "asked for")

    def pause_writing(self) -> None:
        self.seen.append("pause writing")

    def resume_writing(self) -> None:
        self.seen.append("resume writing")

    def connection_lost(self) -> None:
        self.seen.append("lost")


def _stream(carrier: Carrier, channel: Channel, *arguments: Any) -> RelayStream:
    return RelayStream(cast(Any, carrier), cast(Any, channel), *arguments)


class Link:
    """A stream with both its neighbours."""

    def __init__(self, budget: int = 10_000_000) -> None:
        self.carrier = Carrier()
        self.channel = Channel()
        self.budget = ByteBudget(budget)
        self.reading: list[bool] = []
        made: list[Receiver] = []

        def make(stream: MessageStream) -> Receiver:
            made.append(Receiver(stream))
            return made[0]

        self.stream = _stream(self.carrier, self.channel, make, self.budget, self.reading.append)
        self.seen = made[0].seen


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
    return clock


@pytest.fixture
def link(clock: Clock) -> Link:
    return Link()


# ---- receiving ------------------------------------------------------------------------


def test_messages_are_delivered_at_once(link: Link) -> None:
    link.stream.messages_received([b"%d" % number for number in range(1000)])
    assert link.seen == [b"%d" % number for number in range(1000)]


def test_messages_wait_for_a_paused_receiver(link: Link, clock: Clock) -> None:
    link.stream.messages_received([b"1", b"pause", b"2", b"pause", b"3"])
    assert (link.seen, link.reading) == ([b"1", b"pause"], [False])
    link.stream.resume_reading()
    clock.run_soon()
    assert link.seen == [b"1", b"pause", b"2", b"pause"]
    link.stream.resume_reading()
    clock.run_soon()
    assert link.seen[-1] == b"3"
    assert link.reading == [False, True]


def test_too_many_waiting_messages_end_the_stream(link: Link) -> None:
    link.stream.pause_reading()
    link.stream.messages_received([b"x"] * QUEUED_MESSAGES)
    with pytest.raises(RelayError, match=r"^too many messages wait$"):
        link.stream.messages_received([b"x"])


def test_waiting_messages_take_a_part_of_the_budget(clock: Clock) -> None:
    link = Link(budget=1000)
    link.stream.pause_reading()
    link.stream.messages_received([b"x" * (FREE_BYTES + 600)])
    assert not link.budget.try_acquire(500)
    with pytest.raises(RelayError, match=r"^no room for a large message$"):
        link.stream.messages_received([b"x" * 500])
    link.stream.resume_reading()
    clock.run_soon()
    assert link.budget.try_acquire(1000)


def test_large_message_that_stalls_ends_the_stream(link: Link, clock: Clock) -> None:
    link.channel.incoming_size = FREE_BYTES + 1
    link.stream.messages_received([])
    clock.advance(STALL_SECONDS - 1)
    link.stream.messages_received([])
    clock.advance(2 * STALL_SECONDS - 2)
    assert link.carrier.ended == []
    clock.advance(2 * STALL_SECONDS - 1)
    assert (link.carrier.ended, link.seen) == (["s"], ["lost"])
    assert link.budget.try_acquire(10_000_000)
    assert clock.waiting == []


def test_large_message_does_not_stall_while_the_receiver_is_paused(
    link: Link, clock: Clock
) -> None:
    link.channel.incoming_size = FREE_BYTES + 1
    link.stream.messages_received([])
    link.stream.pause_reading()
    clock.advance(5 * STALL_SECONDS)
    assert link.carrier.ended == []
    link.stream.resume_reading()
    link.channel.incoming_size = 0
    link.stream.messages_received([b"whole"])
    clock.advance(10 * STALL_SECONDS)
    assert (link.carrier.ended, link.seen) == ([], [b"whole"])
    assert clock.waiting == []


# ---- sending --------------------------------------------------------------------------


def test_short_message_is_sent_at_once(link: Link) -> None:
    link.stream.send(b"short")
    assert (link.carrier.frames, link.stream.unsent()) == ([b"short"], 0)


def test_messages_are_sent_in_turn_when_the_carrier_is_full_or_they_are_long(link: Link) -> None:
    link.carrier.is_full = True
    link.stream.send(b"first")
    link.carrier.is_full = False
    link.stream.send(b"second")  # not before the first
    long = b"x" * (2 * ONE_RECORD_BYTES)
    link.stream.send(long)
    assert link.carrier.frames == []
    assert link.stream.unsent() == 11 + len(long)
    link.carrier.send_all()
    assert link.carrier.frames[:2] == [b"first", b"second"]
    assert b"".join(link.carrier.frames[2:]) == long
    assert link.stream.unsent() == 0


def test_unsent_bytes_pause_and_resume_the_producer(link: Link) -> None:
    link.carrier.is_full = True
    message = b"x" * 50_000
    while link.stream.unsent() <= SEND_HIGH_BYTES:
        assert link.seen == []
        link.stream.send(message)
    link.stream.send(message)
    assert link.seen == ["pause writing"]
    [stream] = link.carrier.scheduled
    while link.stream.unsent() > SEND_LOW_BYTES:
        assert link.seen == ["pause writing"]
        assert stream.send_next()
    assert link.seen == ["pause writing", "resume writing"]


@pytest.mark.parametrize("message", [b"", b"x"])
def test_message_that_cannot_be_sent_ends_the_stream(
    link: Link, clock: Clock, message: bytes
) -> None:
    link.channel.is_spent = True
    link.stream.send(message)
    clock.run_soon()
    assert (link.carrier.ended, link.seen) == (["s"], ["lost"])


def test_queued_frame_that_cannot_be_sealed_ends_the_stream(link: Link, clock: Clock) -> None:
    link.carrier.is_full = True
    link.stream.send(b"x")
    link.channel.is_spent = True
    link.carrier.send_all()
    clock.run_soon()
    assert (link.carrier.ended, link.seen) == (["s"], ["lost"])


async def _parts(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def _finish(sending: Coroutine[Any, Any, None]) -> None:
    with pytest.raises(StopIteration):
        sending.send(None)


def test_message_in_parts_is_cut_into_records(link: Link) -> None:
    _finish(link.stream.send_parts(_parts(b"a" * 1500, b"b" * 600), 2100))
    link.carrier.send_all()
    assert link.carrier.frames == [b"a" * 1000, b"a" * 500 + b"b" * 500, b"b" * 100]
    assert link.seen == ["pause writing", "resume writing"]


def test_message_in_parts_that_fills_its_records(link: Link) -> None:
    _finish(link.stream.send_parts(_parts(b"a" * 1000), 1000))
    link.carrier.send_all()
    assert link.carrier.frames == [b"a" * 1000]


def test_message_of_another_size_than_announced_ends_the_stream(link: Link, clock: Clock) -> None:
    _finish(link.stream.send_parts(_parts(b"a"), 2))
    clock.run_soon()
    assert (link.carrier.ended, link.seen) == (["s"], ["pause writing", "lost"])


def test_message_that_breaks_off_half_way_ends_the_stream(link: Link, clock: Clock) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"half"
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match=r"^no more$"):
        link.stream.send_parts(parts(), 8).send(None)
    clock.run_soon()
    assert (link.carrier.ended, link.seen) == (["s"], ["pause writing", "lost"])


def test_message_in_parts_that_is_too_large_is_refused(link: Link) -> None:
    text = "the answer has 10000001 bytes; a relay carries 10000000"
    with pytest.raises(InternalError) as refusal:
        link.stream.send_parts(_parts(), 10_000_001).send(None)
    assert refusal.value.message == text
    assert link.carrier.ended == []


# ---- liveness and the end -------------------------------------------------------------


def test_silent_peer_loses_its_stream_when_probed(link: Link, clock: Clock) -> None:
    link.stream.probe()
    clock.advance(PROBE_SECONDS)
    assert (link.carrier.ended, link.seen) == (["s"], ["lost"])
    link.stream.probe()
    assert clock.waiting == []


def test_living_peer_survives_a_probe(link: Link, clock: Clock) -> None:
    link.stream.probe()
    link.stream.messages_received([])
    clock.advance(2 * PROBE_SECONDS)
    assert link.carrier.ended == []


def test_closed_stream_sends_its_queued_frames_first(link: Link, clock: Clock) -> None:
    link.carrier.is_full = True
    link.stream.send(b"last")
    link.stream.close(0, "test")
    link.stream.close(0, "test")
    link.stream.send(b"late")
    link.stream.messages_received([b"late"])
    clock.run_soon()
    assert (link.carrier.ended, link.seen, link.channel.drops) == ([], ["lost"], 0)
    link.carrier.send_all()
    assert (link.carrier.frames, link.carrier.ended) == ([b"last"], ["s"])
    assert link.channel.drops == 1
    assert link.reading == []  # a closed stream does not pause its socket


def test_receiver_may_close_while_it_gets_a_message(link: Link, clock: Clock) -> None:
    link.stream.messages_received([b"close", b"dropped"])
    clock.run_soon()
    assert link.seen == [b"close", "lost"]


def test_lost_stream_sends_nothing_more(link: Link, clock: Clock) -> None:
    link.carrier.is_full = True
    link.stream.send(b"queued")
    link.stream.stream_lost()
    assert link.channel.drops == 1
    link.stream.stream_lost()
    assert link.seen == ["lost"]
    link.carrier.send_all()
    assert (link.carrier.frames, link.carrier.ended, clock.waiting) == ([], [], [])


def test_stream_of_a_shared_socket_does_not_pause_it(clock: Clock) -> None:
    stream = _stream(Carrier(), Channel(), Receiver, ByteBudget(0))
    stream.pause_reading()
    stream.messages_received([b"1"])
    stream.resume_reading()
    clock.run_soon()
    assert stream.receiver.seen == [b"1"]  # type: ignore[attr-defined]
