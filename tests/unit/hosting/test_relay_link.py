"""A link of the rendezvous on a transport in memory: the fast path, the other one, and the end."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest
from tests.support.memory_transport import MemoryTransport
from tests.support.raw_links import frame_bytes

from exec_server.errors import ProtocolError
from exec_server.hosting.relay_link import (
    PING_SECONDS,
    PONG_SECONDS,
    READ_BYTES,
    TURN_FRAMES,
    RelayLink,
    flush_links,
)
from exec_server.net.websocket.frames import (
    FrameReader,
    Opcode,
    close_answer,
    close_payload,
    frame_header,
)
from exec_server.relay.frames import FRAME_BYTES


class End:
    """Notes everything that a link reports."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.counts: list[tuple[int, int]] = []
        self.handled: list[int] = []
        self.texts = 0
        self.pauses: list[bool] = []
        self.lost = 0
        self.on_frame: Callable[[bytes], None] = lambda frame: None

    def frame_received(self, frame: bytes) -> None:
        self.frames.append(frame)
        self.on_frame(frame)

    def bytes_read(self, count: int, messages: int, frames: int) -> None:
        self.counts.append((count, messages))
        self.handled.append(frames)

    def text_received(self) -> None:
        self.texts += 1

    def writing_changed(self, *, is_paused: bool) -> None:
        self.pauses.append(is_paused)

    def link_lost(self) -> None:
        self.lost += 1


class Bench:
    """A link with its end and its transport."""

    def __init__(self, first: bytes = b"", *, is_tls: bool = False) -> None:
        self.end = End()
        self.transport = MemoryTransport(asyncio.Protocol(), is_tls=is_tls)
        self.link = RelayLink(self.transport, "tok")
        self.link.start(self.end, first, 1000)


def on_loop(scene: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(scene())

    run.__name__ = scene.__name__
    return run


def close_code(written: bytes) -> int:
    """The code of the close frame at the end of what was written."""
    at = written.rindex(b"\x88")
    return int(struct.unpack("!H", written[at + 2 : at + 4])[0])


@on_loop
async def test_whole_frames_are_delivered_and_counted() -> None:
    bench = Bench()
    frames = [b"", b"x", b"y" * 125, b"z" * 126, b"w" * 70_000, b"v" * 262_144]
    for frame in frames:
        bench.transport.receive(frame_bytes(2, frame))
    assert bench.end.frames == frames
    assert sum(count for _, count in bench.end.counts) == len(frames)
    two = frame_bytes(2, b"one") + frame_bytes(2, b"two")
    bench.transport.receive(two)
    assert bench.end.counts[-1] == (len(two), 2)
    bench.transport.lose()


@on_loop
async def test_bytes_after_the_upgrade_are_delivered_first() -> None:
    frame = b"f" * (READ_BYTES - 100)
    bench = Bench(frame_bytes(2, frame) + frame_bytes(2, b"second")[:-1])
    assert bench.end.frames == [frame]
    bench.transport.receive(frame_bytes(2, b"second")[-1:])
    assert bench.end.frames == [frame, b"second"]
    assert bench.transport.limits == (1000, 250)
    bench.transport.lose()


@on_loop
async def test_control_frames_and_fragments_take_the_other_path_and_leave_it() -> None:
    bench = Bench()
    parts = frame_bytes(2, b"frag", fin=False) + frame_bytes(9, b"ping") + frame_bytes(0, b"ment")
    bench.transport.receive(parts[:7])
    bench.transport.receive(parts[7:] + frame_bytes(10, b"") + frame_bytes(2, b"next")[:4])
    assert bench.end.frames == [b"fragment"]
    assert bench.transport.take_written() == b"\x8a\x04ping"
    bench.transport.receive(frame_bytes(2, b"next")[4:])
    bench.transport.receive(frame_bytes(1, b"text"))
    assert bench.end.frames == [b"fragment", b"next"]
    assert bench.end.texts == 1
    bench.transport.lose()


def _random_frame(random: Random) -> bytes:
    """Mostly a whole message; sometimes a fragment, a control frame or a violation."""
    size = random.choice([0, 1, 5, 125, 126, 127, 3000, 65_535, 65_536, 70_000])
    opcode = random.choice([2] * 12 + [0, 1, 3, 8, 9, 9, 10])
    payload = random.randbytes(size if opcode < 8 else min(size, 125))
    return frame_bytes(
        opcode,
        b"\xc3\xa9" * 3 if opcode == 1 and random.random() < 0.8 else payload,
        fin=random.random() < 0.9,
        mask=random.random() < 0.98,
        rsv=int(random.random() < 0.02),
    )


def _expected(data: bytes) -> tuple[list[bytes], int, bytes]:
    """Messages, number of texts and written frames, by the codec of all other WebSockets."""
    reader = FrameReader(message_bytes=FRAME_BYTES)
    reader.feed(data)
    frames: list[bytes] = []
    texts, written = 0, b""
    try:
        while (event := reader.next_event()) is not None:
            if event.opcode is Opcode.CLOSE:
                payload = close_answer(event.payload)
                return frames, texts, written + frame_header(Opcode.CLOSE, len(payload)) + payload
            if event.opcode is Opcode.PING:
                written += frame_header(Opcode.PONG, len(event.payload)) + event.payload
            elif event.opcode is Opcode.BINARY:
                frames.append(event.payload)
            texts += event.opcode is Opcode.TEXT
    except ProtocolError as error:
        payload = close_payload(error.close_code, error.reason)
        written += frame_header(Opcode.CLOSE, len(payload)) + payload
    return frames, texts, written


@pytest.mark.parametrize("seed", range(60))
def test_the_fast_loop_delivers_what_the_codec_of_all_websockets_does(seed: int) -> None:
    random = Random(seed)
    data = b"".join(_random_frame(random) for _ in range(40))
    cuts = sorted(random.randrange(len(data)) for _ in range(random.choice([0, 3, 60])))

    async def scene() -> None:
        bench = Bench()
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            if start < end and bench.link.is_open:
                bench.transport.receive(data[start:end])
                while bench.transport.is_reading_paused:
                    await asyncio.sleep(0)
        assert (bench.end.frames, bench.end.texts, bench.transport.written) == _expected(data)
        bench.transport.lose()

    asyncio.run(scene())


@pytest.mark.parametrize("kind", ["messages", "pings", "pings and messages", "fragments"])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_flood_of_tiny_frames_is_handled_in_turns(kind: str, is_first: bool) -> None:
    count = 5 * TURN_FRAMES
    ping, message = frame_bytes(9, b""), frame_bytes(2, b"m")
    fragments = frame_bytes(2, b"m", fin=False) + frame_bytes(0, b"", fin=False) * count
    flood = {
        "messages": message * count,
        "pings": ping * count,
        "pings and messages": (ping + message) * count,
        "fragments": fragments + frame_bytes(0, b""),
    }[kind] + frame_bytes(2, b"last")

    async def scene() -> None:
        bench = Bench(flood if is_first else b"")
        if not is_first:
            bench.transport.receive(flood)
        turns = 1
        while bench.transport.is_reading_paused:
            done = sum(bench.end.handled)
            await asyncio.sleep(0)
            assert sum(bench.end.handled) - done <= 2 * TURN_FRAMES
            turns += 1
        assert turns >= 5
        messages = {"messages": count, "pings": 0, "fragments": 1}.get(kind, count)
        assert bench.end.frames == [b"m"] * messages + [b"last"]
        pongs = count if "pings" in kind else 0
        assert bench.transport.written == b"\x8a\x00" * pongs
        bench.transport.lose()

    asyncio.run(scene())


@on_loop
async def test_a_flood_waits_while_reading_is_held_and_ends_with_its_link() -> None:
    bench = Bench()
    bench.transport.receive(frame_bytes(2, b"m") * (2 * TURN_FRAMES + 1))
    bench.link.hold_reading()
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(bench.end.frames) == TURN_FRAMES
    bench.link.release_reading()
    await asyncio.sleep(0)
    assert len(bench.end.frames) == 2 * TURN_FRAMES
    bench.transport.lose()
    bench.transport.close()
    await asyncio.sleep(0)
    assert len(bench.end.frames) == 2 * TURN_FRAMES


@on_loop
async def test_full_reads_of_small_frames_leave_the_loop_to_others() -> None:
    bench = Bench()
    frame = frame_bytes(2, b"m" * 2000)
    bench.transport.receive((frame * 200)[:READ_BYTES])
    assert bench.transport.is_reading_paused
    await asyncio.sleep(0)
    assert not bench.transport.is_reading_paused
    assert len(bench.end.frames) == READ_BYTES // len(frame)
    bench.transport.lose()


@on_loop
async def test_a_flood_after_our_close_frame_is_read_in_turns() -> None:
    bench = Bench()
    bench.link.close(1012, "bye")
    bench.transport.receive(frame_bytes(9, b"") * (TURN_FRAMES + 1) + frame_bytes(8, b"\x03\xf4"))
    assert bench.transport.is_reading_paused
    assert not bench.transport.is_closing()
    await asyncio.sleep(0)
    assert bench.transport.is_closing()
    bench.transport.lose()


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame_bytes(2, b"x" * 262_145), 1009),
        (frame_bytes(2, b"x", mask=False), 1002),
        (frame_bytes(2, b"x" * 300, mask=False), 1002),
        (frame_bytes(2, b"x" * 70_000, mask=False), 1002),
        (frame_bytes(3, b"x"), 1002),
        (frame_bytes(2, b"x", rsv=1), 1002),
        (frame_bytes(0, b"x"), 1002),
    ],
)
def test_a_broken_rule_ends_the_link(data: bytes, code: int) -> None:
    async def scene() -> None:
        bench = Bench()
        bench.transport.receive(data[:200])
        if bench.link.is_open:
            bench.transport.receive(data[200:])
        assert close_code(bench.transport.written) == code
        assert bench.end.lost == 1
        bench.transport.lose()
        assert bench.end.lost == 1

    asyncio.run(scene())


@on_loop
async def test_frames_are_gathered_and_written_together() -> None:
    bench, other = Bench(), Bench()

    def forward(frame: bytes) -> None:
        other.link.send(frame)
        assert other.transport.written == b""

    bench.end.on_frame = forward
    bench.transport.receive(frame_bytes(2, b"one") + frame_bytes(2, b"t" * 200))
    header = frame_header(2, 200)  # type: ignore[arg-type]
    assert other.transport.written == b"\x82\x03one" + header + b"t" * 200
    for each in (bench, other):
        each.transport.lose()


@on_loop
async def test_writing_that_pauses_is_reported_and_pongs_wait() -> None:
    bench = Bench()
    bench.link.pause_writing()
    for payload in (b"1", b"2"):
        bench.transport.receive(frame_bytes(9, payload))
    assert bench.transport.take_written() == b""
    bench.link.resume_writing()
    assert bench.transport.take_written() == b"\x8a\x012"
    assert bench.end.pauses == [True, False]
    bench.transport.buffered = 7
    assert bench.link.unsent() == 7
    bench.transport.lose()
    assert bench.link.unsent() == 0


@on_loop
async def test_reading_is_held_as_often_as_it_is_released() -> None:
    bench = Bench()
    bench.link.hold_reading()
    bench.link.hold_reading()
    bench.link.release_reading()
    assert bench.transport.is_reading_paused
    bench.link.release_reading()
    assert not bench.transport.is_reading_paused
    bench.transport.lose()


@on_loop
async def test_a_silent_peer_is_pinged_and_then_dropped() -> None:
    bench = Bench()
    now = asyncio.get_running_loop().time() + PING_SECONDS + 1
    bench.link.tick(now)
    assert bench.transport.take_written() == b"\x89\x00"
    bench.transport.receive(frame_bytes(10, b""))
    bench.link.tick(now + PING_SECONDS + 1)
    assert bench.transport.take_written() == b"\x89\x00"
    bench.link.tick(now + PING_SECONDS + PONG_SECONDS + 2)
    assert bench.transport.is_aborted
    assert bench.end.lost == 1
    bench.link.tick(now + 1000)


@on_loop
async def test_a_closed_link_waits_for_the_answer_of_its_peer() -> None:
    bench = Bench()
    bench.link.send(b"last")
    bench.link.close(1012, "bye")
    assert bench.transport.written.startswith(b"\x82\x04last\x88")
    assert close_code(bench.transport.written) == 1012
    assert bench.transport.has_written_eof
    assert bench.end.lost == 1
    bench.link.close(1000, "again")
    bench.link.send(b"too late")
    flush_links()
    bench.transport.receive(frame_bytes(2, b"dropped") + frame_bytes(8, b"\x03\xf4"))
    assert bench.end.frames == []
    assert bench.transport.is_closing()
    bench.transport.lose()


@on_loop
async def test_garbage_after_a_close_frame_ends_the_link() -> None:
    bench = Bench(is_tls=True)
    bench.link.close(1012, "bye")
    assert not bench.transport.is_closing()
    bench.transport.receive(frame_bytes(3, b"x"))
    assert bench.transport.is_closing()
    bench.transport.lose()


@on_loop
async def test_the_close_frame_of_a_peer_is_answered() -> None:
    bench = Bench()
    bench.transport.receive(frame_bytes(8, b"\x03\xe8") + frame_bytes(2, b"x"))
    assert bench.transport.written == b"\x88\x02\x03\xe8"
    assert bench.transport.is_closing()
    assert bench.end.lost == 1
    bench.transport.lose()


@on_loop
async def test_a_link_that_is_closed_while_a_read_is_handled_delivers_no_more() -> None:
    bench = Bench()
    bench.end.on_frame = lambda frame: bench.link.close(1008, "no more")
    bench.transport.receive(frame_bytes(2, b"one") + frame_bytes(2, b"two"))
    assert bench.end.frames == [b"one"]
    bench.transport.eof()
    bench.transport.lose()


@on_loop
async def test_the_end_of_the_connection_is_reported_once() -> None:
    for end in (MemoryTransport.eof, MemoryTransport.lose):
        bench = Bench()
        end(bench.transport)
        assert bench.end.lost == 1
