"""Reading up to patterns and by lines: in pieces, from two streams, and without a loss."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
from tests.support.memory_session import outcome, play

from exec_server.client import output as reader_module
from exec_server.client.exceptions import PatternNotFound
from exec_server.client.output import (
    Lines,
    Pattern,
    PatternMatch,
    PatternSearch,
    Pieces,
    expect,
    wait_for_output,
)
from exec_server.client.results import Chunk, Line


class Output:
    """Chunks that end, or go on for ever."""

    def __init__(self, *data: bytes | Chunk, is_endless: bool = False) -> None:
        self.chunks = deque(
            Chunk("stdout", each) if isinstance(each, bytes) else each for each in data
        )
        self._is_endless = is_endless

    @property
    def has_more(self) -> bool:
        return bool(self.chunks)

    async def __anext__(self) -> Chunk:
        if self.chunks:
            return self.chunks.popleft()
        if self._is_endless:
            await asyncio.Event().wait()
        raise StopAsyncIteration

    def put_back(self, chunks: Sequence[Chunk]) -> None:
        self.chunks.extendleft(reversed(chunks))

    @property
    def rest(self) -> bytes:
        return b"".join(chunk.data for chunk in self.chunks)


async def read_until(output: Output, pattern: Pattern, seconds: float | None) -> bytes:
    """As Process.read_until does it."""
    match = await expect(output, [pattern], seconds)
    return match.before + match.matched


@pytest.mark.parametrize(
    "pattern", [b">>> ", ">>> ", re.compile(rb">{3}\s"), re.compile(rb"(?P<prompt>>>> )")]
)
@pytest.mark.parametrize(
    "chunks", [(b"hello\n>>> rest",), (b"hello\n>", b">", b"> rest"), (b"hello\n>>> ", b"rest")]
)
def test_the_output_up_to_a_pattern(pattern: Any, chunks: tuple[bytes, ...]) -> None:
    async def run() -> None:
        output = Output(*chunks)
        assert await wait_for_output(output, pattern, None) == b">>> "
        assert output.rest == b"hello\n>>> rest"
        assert await read_until(output, pattern, None) == b"hello\n>>> "
        assert output.rest == b"rest"

    play(run())


def test_what_follows_keeps_its_stream() -> None:
    async def run() -> None:
        output = Output(b"out", Chunk("stderr", b"error: rest"))
        assert await read_until(output, b"error:", None) == b"outerror:"
        assert list(output.chunks) == [Chunk("stderr", b" rest")]

    play(run())


def test_a_failed_search_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        for read in (read_until, wait_for_output):
            output = Output(b"one", b"two")
            with pytest.raises(
                PatternNotFound, match="the output ended without b'three'"
            ) as raised:
                await read(output, b"three", 10)
            assert (output.rest, raised.value.output) == (b"onetwo", b"onetwo")
            output = Output(b"one", b"two", is_endless=True)
            with pytest.raises(TimeoutError, match=r"no b'three' in the output after 0\.01 s"):
                await read(output, b"three", 0.01)
            assert output.rest == b"onetwo"
            reading = asyncio.get_running_loop().create_task(outcome(read(output, b"3", None)))
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait([reading])
            assert output.rest == b"onetwo"
            monkeypatch.setattr(reader_module, "SEARCHED_BYTES", 5)
            with pytest.raises(PatternNotFound, match="6 bytes of output are without b'three'"):
                await read(output, b"three", None)
            assert output.rest == b"onetwo"
            monkeypatch.undo()

    play(run())


def test_patterns_of_other_types() -> None:
    for wrong, kind in ((3, TypeError), (re.compile("x"), TypeError), (b"", ValueError)):
        with pytest.raises(kind, match="pattern"):
            PatternSearch([wrong])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="no patterns"):
        PatternSearch([])


async def _lines(output: Output) -> list[tuple[str, str]]:
    return [(line.stream, line) async for line in Lines(output)]


def test_lines_of_two_streams() -> None:
    async def run() -> None:
        output = Output(
            b"one\ntw",
            Chunk("stderr", b"err"),
            b"o\r\n",
            b"\n\nlast \xc3",
            Chunk("stderr", b"or\nend"),
            b"\xbc",
        )
        assert await _lines(output) == [
            ("stdout", "one"),
            ("stdout", "two"),
            ("stdout", ""),
            ("stdout", ""),
            ("stderr", "error"),
            ("stdout", "last ü"),
            ("stderr", "end"),
        ]

    play(run())


def test_what_follows_a_line_stays_unread() -> None:
    async def run() -> None:
        output = Output(Chunk("stderr", b"warn"), b"one\ntwo\nthr")
        line = await anext(Lines(output))
        assert (line, line.stream, isinstance(line, Line)) == ("one", "stdout", True)
        assert list(output.chunks) == [Chunk("stderr", b"warn"), Chunk("stdout", b"two\nthr")]
        endless = Output(b"begun", is_endless=True)
        reading = asyncio.get_running_loop().create_task(outcome(anext(Lines(endless))))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
        assert endless.rest == b"begun"

    play(run())


def test_a_long_line_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "LINE_BYTES", 4)

    async def run() -> None:
        lines = await _lines(Output(b"abc", Chunk("stderr", b"x"), b"defg", b"h"))
        assert lines == [("stdout", "abcdefg"), ("stderr", "x"), ("stdout", "h")]

    play(run())


def test_small_chunks_are_joined_and_losses_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "JOINED_BYTES", 3)
    pieces = Pieces()
    for chunk in (
        *(Chunk("stdout", b".") for _ in range(4)),
        Chunk("stderr", b"x"),
        Chunk("stderr", b"y", 7),
        Chunk("stdout", b"!"),
    ):
        pieces.add(chunk)
    assert (len(pieces), pieces.size("stdout"), pieces.size("stderr")) == (5, 5, 2)
    last = [Chunk("stderr", b"y", 7), Chunk("stdout", b"!")]
    assert pieces.chunks(5) == last
    assert pieces.chunks(4) == [Chunk("stderr", b"x"), *last]
    assert pieces.chunks(1)[:2] == [Chunk("stdout", b".."), Chunk("stdout", b".")]
    assert pieces.take_stream("stderr") == (b"xy", "stderr")
    assert pieces.chunks() == [Chunk("stdout", b"..."), Chunk("stdout", b".!")]
    assert pieces.take_stream() == (b"....!", "stdout")
    assert (len(pieces), pieces.chunks(), pieces.size("stdout")) == (0, [], 0)


def test_many_small_chunks_are_one_piece() -> None:
    async def run() -> None:
        dots = [b"."] * 20_000
        assert await _lines(Output(*dots)) == [("stdout", "." * 20_000)]
        for pattern in (b"!", re.compile(rb"!")):
            output = Output(*dots, b"!rest")
            assert len(await read_until(output, pattern, None)) == 20_001
            assert output.rest == b"rest"
        output = Output(*dots)
        with pytest.raises(PatternNotFound):
            await wait_for_output(output, b"!", None)
        assert list(output.chunks) == [Chunk("stdout", b"." * 20_000)]

    play(run())


def test_alternating_streams_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "HELD_PIECES", 3)
    mixed = [Chunk("stdout", b"o"), Chunk("stderr", b"e")] * 3

    async def run() -> None:
        output = Output(*mixed, is_endless=True)
        for pattern in (b"!", re.compile(rb"!")):
            with pytest.raises(PatternNotFound, match="4 bytes of output are without"):
                await read_until(output, pattern, None)
            assert list(output.chunks) == mixed
        line = await anext(Lines(output))
        assert (line, line.stream) == ("ee", "stderr")

    play(run())


def test_a_compiled_pattern_is_not_searched_for_each_chunk_at_hand() -> None:
    search = PatternSearch([re.compile(rb"x")])
    assert not search.feed(b"." * 100, has_more=True)
    assert not search.feed(b"x", has_more=True)
    assert search.feed(b"." * 40, has_more=True)
    assert search.end == 101
    search = PatternSearch([re.compile(rb"x")])
    assert not search.feed(b"." * 100)
    assert search.feed(b"x")


# ---- several patterns -----------------------------------------------------------------


def test_the_earliest_match_wins_then_the_first_pattern() -> None:
    async def run() -> None:
        output = Output(b"a dollar$ then password: ", b"and $ again")
        patterns: list[Pattern] = ["password: ", b"$ ", re.compile(rb"\$ ")]
        found = await expect(output, patterns, None)
        assert found == PatternMatch(1, b"$ ", b"a dollar", b"$ ")
        assert (found.text, found.group(), found.group(0)) == ("a dollar", b"$ ", b"$ ")
        found = await expect(output, patterns, None)
        assert (found.index, found.before) == (0, b"then ")
        assert output.rest == b"and $ again"
        # Without the literal, and although it comes later.
        found = await expect(output, [b"again", re.compile(rb"\$")], None)
        assert (found.index, found.matched, output.rest) == (1, b"$", b" again")

    play(run())


def test_a_literal_does_not_overtake_a_compiled_pattern_whose_search_was_put_off() -> None:
    search = PatternSearch([b"second", re.compile(rb"first")])
    assert not search.feed(b"." * 1000, has_more=True)
    assert not search.feed(b"first", has_more=True)
    assert search.feed(b"second", has_more=True)
    assert search.match is not None
    assert (search.match.index, search.match.matched, search.end) == (1, b"first", 1005)


def test_groups_by_number_and_name() -> None:
    async def run() -> None:
        pattern = re.compile(rb"port (?P<port>\d+)(/udp)?")
        found = await expect(Output(b"listening at port 80."), [b"x", pattern], None)
        assert (found.index, found.pattern, found.groups) == (1, pattern, (b"80", None))
        assert (found.group("port"), found.group(1), found.group(2)) == (b"80", b"80", None)
        for wrong in (3, -1, "host"):
            with pytest.raises(IndexError, match="the pattern has no group"):
                found.group(wrong)
        found = await expect(Output(b"x"), ["x"], None)
        with pytest.raises(IndexError, match="no group 'port'"):
            found.group("port")

    play(run())


def test_the_end_without_any_pattern_names_all() -> None:
    async def run() -> None:
        with pytest.raises(PatternNotFound, match=r"ended without \[b'x', 'y'\]") as raised:
            await expect(Output(b"z"), [b"x", "y"], None)
        assert (raised.value.pattern, raised.value.output) == ([b"x", "y"], b"z")

    play(run())
