"""Broadcast and Attachment: positions, slow connections, gaps and ends, without a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
import pytest

from exec_server.errors import InvalidRequest
from exec_server.process import output
from exec_server.process.output import OutputLog
from exec_server.process.process import Process
from exec_server.protocol.decoding import Notice
from exec_server.protocol.process import (
    CHUNK_BYTES,
    CLOSED,
    EXITED,
    OUTPUT,
    ClosedParams,
    ExitedParams,
    OutputParams,
    OutputRun,
    ProcessId,
)
from exec_server.server import detached
from exec_server.server.detached import Broadcast

_WEB = ProcessId("web")


class FakeProcess:
    """The log of a process, to which the test adds events."""

    def __init__(self) -> None:
        self.id = _WEB
        self.log = OutputLog()


class FakeChannel:
    """A session that takes a number of notifications."""

    def __init__(self, room: int = 1_000_000) -> None:
        self.room = room
        self.sent: list[tuple[str, int]] = []  # the kind and the number
        self.ids: set[str] = set()
        self.ended: list[str] = []

    @property
    def is_writable(self) -> bool:
        return self.room > 0

    def notify(self, notice: Notice[msgspec.Struct], params: msgspec.Struct) -> None:
        self.room -= 1
        event = cast(Any, params)
        self.ids.add(event.process_id)
        self.sent.append((notice.name.removeprefix("process/"), event.seq))

    def attachment_ended(self, process_id: ProcessId) -> None:
        self.ended.append(process_id)

    @property
    def seqs(self) -> list[int]:
        return [seq for _, seq in self.sent]


class World:
    """A broadcast of a fake process."""

    def __init__(self) -> None:
        self.process = FakeProcess()
        self.broadcast = Broadcast("web")
        self.broadcast.process = cast(Process, self.process)

    def say(self, count: int = 1) -> None:
        for _ in range(count):
            seq = self.process.log.append("stdout", b"x")
            self.broadcast.publish(OutputParams(_WEB, seq, "stdout", b"x"))

    def exit(self) -> None:
        seq = self.process.log.number_event()
        self.broadcast.publish(ExitedParams(_WEB, seq, 0, False))

    def close(self) -> None:
        self.broadcast.publish(ClosedParams(_WEB, self.process.log.number_event()))


def _run(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(20):
            await scenario(World())

    asyncio.run(run())


async def _settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_an_attachment_begins_with_the_oldest_output_and_follows() -> None:
    async def scenario(world: World) -> None:
        world.say(2)
        channel = FakeChannel()
        world.broadcast.attach(ProcessId("mine"), channel).begin(0)
        assert channel.sent == []  # the answer to the request precedes the events
        await _settle()
        assert channel.seqs == [1, 2]
        world.say()
        world.exit()
        world.say()
        world.close()
        assert [kind for kind, _ in channel.sent[2:]] == ["output", "exited", "output", "closed"]
        assert (channel.seqs, channel.ids) == ([1, 2, 3, 4, 5, 6], {"mine"})
        assert {OUTPUT.name, EXITED.name, CLOSED.name} == {
            f"process/{kind}" for kind, _ in channel.sent
        }

    _run(scenario)


def test_a_run_of_output_is_one_event() -> None:
    async def scenario(world: World) -> None:
        channel = FakeChannel()
        world.broadcast.attach(ProcessId("mine"), channel).begin(0)
        await _settle()
        data = bytes(2 * CHUNK_BYTES + 1)
        for start in range(0, len(data), CHUNK_BYTES):
            world.process.log.append("stdout", data[start : start + CHUNK_BYTES])
        world.broadcast.publish(OutputRun(_WEB, 1, "stdout", data))
        world.say()
        late = FakeChannel()
        world.broadcast.attach(ProcessId("late"), late).begin(1)
        await _settle()
        world.exit()
        assert (channel.seqs, late.seqs) == ([1, 4, 5], [2, 3, 4, 5])

    _run(scenario)


def test_all_events_of_a_process_that_has_ended_are_sent_in_order() -> None:
    async def scenario(world: World) -> None:
        world.say(detached.BATCH_CHUNKS + 1)
        world.exit()
        world.say(detached.BATCH_CHUNKS)
        world.close()
        channel = FakeChannel()
        world.broadcast.attach(_WEB, channel).begin(0)
        await _settle()
        assert channel.seqs == list(range(1, world.process.log.next_seq))
        assert channel.sent[detached.BATCH_CHUNKS + 1][0] == "exited"
        assert channel.sent[-1][0] == "closed"

    _run(scenario)


def test_a_position_beyond_the_end_is_the_end() -> None:
    async def scenario(world: World) -> None:
        world.say(3)
        for after, expected in ((1, 1), (99, 3)):
            one = world.broadcast.attach(_WEB, channel := FakeChannel())
            one.begin(after)
            assert one.after_seq == expected
            await _settle()
            assert channel.seqs == list(range(expected + 1, 4))

    _run(scenario)


def test_the_exit_and_the_close_are_always_sent() -> None:
    async def scenario(world: World) -> None:
        world.say(3)
        world.exit()
        world.say()
        world.close()
        one = world.broadcast.attach(_WEB, channel := FakeChannel())
        one.begin(99)
        await _settle()
        assert (one.after_seq, channel.seqs) == (3, [4, 5, 6])

    _run(scenario)


def test_a_slow_channel_continues_where_it_stopped_and_delays_no_other() -> None:
    async def scenario(world: World) -> None:
        slow, quick = FakeChannel(room=2), FakeChannel()
        lagging = world.broadcast.attach(_WEB, slow)
        world.broadcast.attach(_WEB, quick)
        world.say(5)
        assert (slow.seqs, quick.seqs) == ([1, 2], [1, 2, 3, 4, 5])
        slow.room = 2
        lagging.push()
        assert slow.seqs == [1, 2, 3, 4]
        slow.room = 100
        world.say()  # not sent before the fifth
        assert slow.seqs == [1, 2, 3, 4]
        lagging.push()
        assert slow.seqs == quick.seqs == [1, 2, 3, 4, 5, 6]

    _run(scenario)


def test_dropped_output_leaves_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "RETAINED_CHUNKS", 2)

    async def scenario(world: World) -> None:
        slow = FakeChannel(room=1)
        lagging = world.broadcast.attach(_WEB, slow)
        world.say(6)
        slow.room = 100
        lagging.push()
        assert slow.seqs == [1, 5, 6]

    _run(scenario)


def test_a_burst_lets_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detached, "BURST_SECONDS", 0.0)

    async def scenario(world: World) -> None:
        world.say(3 * detached.BATCH_CHUNKS)
        channel = FakeChannel()
        one = world.broadcast.attach(_WEB, channel)
        one.push()
        assert len(channel.sent) == detached.BATCH_CHUNKS
        await asyncio.sleep(0)
        assert len(channel.sent) == 2 * detached.BATCH_CHUNKS
        one.close()  # cancels the rest
        await _settle()
        assert len(channel.sent) == 2 * detached.BATCH_CHUNKS

    _run(scenario)


def test_the_flow_is_that_of_one_attachment() -> None:
    async def scenario(world: World) -> None:
        channel, other = FakeChannel(), FakeChannel()
        one = world.broadcast.attach(_WEB, channel)
        world.broadcast.attach(_WEB, other)
        one.set_flow("pause")
        world.say(2)
        await _settle()
        assert (channel.seqs, other.seqs) == ([], [1, 2])
        one.set_flow("send")
        await _settle()
        assert channel.seqs == [1, 2]
        one.set_flow("retain")
        world.say(2)
        world.exit()
        await _settle()
        assert channel.sent[2:] == [("exited", 5)]
        one.set_flow("send")
        world.say()
        world.close()
        assert channel.seqs == [1, 2, 5, 6, 7]

    _run(scenario)


def test_a_new_connection_gets_only_new_events() -> None:
    async def scenario(world: World) -> None:
        channel = FakeChannel(room=0)
        one = world.broadcast.attach(_WEB, channel)
        world.say(3)
        channel.room = 100
        one.skip_to_end()
        world.say()
        assert channel.seqs == [4]

    _run(scenario)


def test_a_forgotten_process_announces_its_end_to_those_that_lack_events() -> None:
    async def scenario(world: World) -> None:
        slow, complete = FakeChannel(room=1), FakeChannel()
        world.broadcast.attach(ProcessId("slow"), slow)
        world.broadcast.attach(ProcessId("complete"), complete)
        world.say(3)
        world.exit()
        world.close()
        world.broadcast.end()
        assert slow.sent == [("output", 1), ("closed", 5)]
        assert complete.seqs == [1, 2, 3, 4, 5]
        assert (slow.ended, complete.ended) == (["slow"], ["complete"])
        assert not world.broadcast.attachments

    _run(scenario)


def test_a_process_that_was_not_started_has_no_events() -> None:
    async def scenario(world: World) -> None:
        world.broadcast.process = None
        channel = FakeChannel()
        world.broadcast.attach(_WEB, channel).begin(0)
        await _settle()
        world.broadcast.end()
        assert (channel.sent, channel.ended) == ([], ["web"])

    _run(scenario)


def test_attachments_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detached, "MAX_ATTACHMENTS", 1)

    async def scenario(world: World) -> None:
        one = world.broadcast.attach(_WEB, FakeChannel())
        with pytest.raises(InvalidRequest, match="at most 1 clients may be attached to web"):
            world.broadcast.attach(_WEB, FakeChannel())
        one.close()
        one.close()
        world.broadcast.attach(_WEB, FakeChannel())

    _run(scenario)


def test_write_ids_of_two_attachments_differ() -> None:
    async def scenario(world: World) -> None:
        one = world.broadcast.attach(_WEB, FakeChannel())
        two = world.broadcast.attach(_WEB, FakeChannel())
        assert one.write_id(None) is None
        assert one.write_id("1") != two.write_id("1")
        assert one.write_id("1") == one.write_id("1")

    _run(scenario)
