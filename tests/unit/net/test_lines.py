"""Lines: their ends, their limits, and bytes in any pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from exec_server.errors import InternalError, ProtocolError
from exec_server.net.lines import LINE_BYTES, LineSplitter, LineStream, LineWriter


def _lines(splitter: LineSplitter) -> list[bytes]:
    lines = []
    while (line := splitter.next_line()) is not None:
        lines.append(line)
    return lines


def test_lines_end_in_lf_or_crlf_and_blank_lines_are_skipped() -> None:
    splitter = LineSplitter()
    splitter.feed(b"one\ntwo\r\n\n\r\n \t\nth\rree\n")
    assert _lines(splitter) == [b"one", b"two", b"th\rree"]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_lines_may_arrive_in_any_pieces(size: int) -> None:
    data = b"first\nsecond\r\n\nthird line\n" + "vierte \u00e4\n".encode() + b"unfinished"
    splitter = LineSplitter()
    lines = []
    for start in range(0, len(data), size):
        splitter.feed(data[start : start + size])
        lines += _lines(splitter)
    assert lines == [b"first", b"second", b"third line", "vierte \u00e4".encode()]
    splitter.feed(b"\n")
    assert _lines(splitter) == [b"unfinished"]


def test_several_lines_after_the_end_of_a_partial_one() -> None:
    splitter = LineSplitter()
    splitter.feed(b"on")
    splitter.feed(b"e\ntwo\nthr")
    splitter.feed(b"ee\n")
    assert _lines(splitter) == [b"one", b"two", b"three"]


def test_cleared_splitter_has_forgotten_everything() -> None:
    splitter = LineSplitter()
    splitter.feed(b"one\ntw")
    splitter.clear()
    splitter.feed(b"three\n")
    assert _lines(splitter) == [b"three"]


@pytest.mark.parametrize("line", [b'{"id":"\xff"}\n', b"\xc3\n", b"\xed\xa0\x80\n"])
def test_line_that_is_not_utf_8_is_refused(line: bytes) -> None:
    splitter = LineSplitter()
    splitter.feed(b"good\n" + line)
    assert splitter.next_line() == b"good"
    with pytest.raises(ProtocolError, match=r"^line is not UTF-8$"):
        splitter.next_line()


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_longest_line_is_accepted(end: bytes) -> None:
    splitter = LineSplitter(10)
    splitter.feed(b"x" * 10 + end[:-1])
    assert splitter.next_line() is None
    splitter.feed(end[-1:])
    assert splitter.next_line() == b"x" * 10


@pytest.mark.parametrize("data", [b"x" * 11 + b"\n", b"x" * 11 + b"\r\n", b"x" * 12])
def test_longer_line_is_refused_whether_it_has_ended_or_not(data: bytes) -> None:
    splitter = LineSplitter(10)
    splitter.feed(data)
    with pytest.raises(ProtocolError, match=r"^line is too long$"):
        splitter.next_line()


def test_limit_of_the_protocol() -> None:
    assert LINE_BYTES == 64 * 1024 * 1024


def test_parts_of_a_message_become_one_line() -> None:
    written: list[bytes] = []
    writer = LineWriter(written.append)
    writer.write(b"one ")
    writer.write(b"two")
    writer.finish()
    assert b"".join(written) == b"one two\n"


class _Receiver:
    def __init__(self, events: list[object]) -> None:
        self._events = events

    def message_received(self, message: bytes) -> None:
        self._events.append(message)

    def pause_writing(self) -> None:
        self._events.append("pause")

    def resume_writing(self) -> None:
        self._events.append("resume")

    def connection_lost(self) -> None:
        self._events.append("lost")


class _Stream(LineStream):
    """Keeps what is written, why it was closed, and the events of its receiver."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.reasons: list[str] = []
        self.events: list[object] = []
        self._deliver_to(_Receiver(self.events))

    def feed(self, data: bytes) -> None:
        self._bytes_received(data)

    def close(self, code: int, reason: str) -> None:
        self.reasons.append(reason)
        self._end()

    def _write(self, data: bytes) -> None:
        self.written += data

    def _update_reading(self) -> None:
        self.events.append("flowing" if self._inbox.is_flowing else "not flowing")


def test_a_stream_delivers_lines_until_one_is_invalid() -> None:
    async def scene() -> None:
        stream = _Stream()
        stream.feed(b"one\ntw")
        stream.pause_reading()
        stream.feed(b"o\n")
        assert stream.events == [b"one", "not flowing"]
        stream.resume_reading()
        await asyncio.sleep(0)
        assert stream.events[2:] == [b"two", "flowing"]
        stream.feed(b"\xff\nthree\n")
        stream.feed(b"four\n")
        await asyncio.sleep(0)
        assert stream.events[4:] == ["not flowing", "lost"]
        assert stream.reasons == ["line is not UTF-8"]

    asyncio.run(scene())


def test_a_stream_sends_messages_whole_or_in_parts_or_ends() -> None:
    async def parts(*, fail: bool) -> AsyncIterator[bytes]:
        yield b"a"
        if fail:
            raise InternalError("no more")
        yield b"b"

    async def scene() -> None:
        stream = _Stream()
        stream.send(b"one")
        await stream.send_parts(parts(fail=False), 2)
        assert stream.written == b"one\nab\n"
        with pytest.raises(InternalError):
            await stream.send_parts(parts(fail=True), 2)
        assert stream.reasons == ["a message could not be completed"]

    asyncio.run(scene())


def test_a_full_pipe_pauses_the_producer() -> None:
    async def scene() -> None:
        stream = _Stream()
        stream.pause_writing()
        stream.resume_writing()
        assert stream.events == ["pause", "resume"]

    asyncio.run(scene())
