"""Lines: their ends, their limits, and bytes in any pieces."""

from __future__ import annotations

import pytest

from exec_server.errors import ProtocolError
from exec_server.net.lines import LINE_BYTES, LineSplitter, LineWriter


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
