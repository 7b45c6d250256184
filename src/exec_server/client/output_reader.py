"""Reading the output of a process up to a pattern or by lines; the rest stays unread.

A search takes chunks until it has found its end, and puts back all that it has not used. So it can
be followed by any other way of reading, and a search that fails or is cancelled loses nothing.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Final, Protocol, Self

from exec_server.client.exceptions import PatternNotFound
from exec_server.client.results import Chunk, Line
from exec_server.protocol.process import Stream

Pattern = bytes | str | re.Pattern[bytes]

# Output that is searched for a pattern, as much as is queued for a slow reader.
SEARCHED_BYTES: Final = 16 * 1_048_576
# A longer line is given in pieces, so that output without line ends does not fill the memory.
LINE_BYTES: Final = 1_048_576


class Source(Protocol):
    """An iteration over the output of one process."""

    async def __anext__(self) -> Chunk: ...

    def put_back(self, chunks: Sequence[Chunk]) -> None:
        """Make these chunks the next ones again."""
        ...


class PatternSearch:
    """Looks for a pattern in output that arrives in pieces; no I/O."""

    def __init__(self, pattern: Pattern) -> None:
        """Raises TypeError for a pattern of another type, ValueError for an empty one."""
        self.pattern = pattern
        if isinstance(pattern, str):
            pattern = pattern.encode()
        if isinstance(pattern, re.Pattern):
            if not isinstance(pattern.pattern, bytes):
                raise TypeError('a compiled pattern must be one of bytes: re.compile(rb"…")')
        elif not isinstance(pattern, bytes):
            kind = type(pattern).__name__
            raise TypeError(f"a pattern is bytes, str or a compiled pattern, not {kind}")
        elif not pattern:
            raise ValueError("a pattern must not be empty")
        self._wanted = pattern
        self.output = bytearray()
        self.found: bytes | None = None
        self.end = 0  # of the match in `output`

    def feed(self, data: bytes) -> bool:
        """Add output; whether the pattern was found."""
        begin = len(self.output)
        self.output += data
        if isinstance(self._wanted, bytes):
            # The literal may have begun in earlier output.
            start = self.output.find(self._wanted, max(0, begin - len(self._wanted) + 1))
            if start >= 0:
                self.found, self.end = self._wanted, start + len(self._wanted)
        elif (match := self._wanted.search(self.output)) is not None:
            self.found, self.end = bytes(match[0]), match.end()
        return self.found is not None


async def read_until(source: Source, pattern: Pattern, seconds: float | None) -> bytes:
    """The output up to and including the pattern; see Process.read_until."""
    search = PatternSearch(pattern)
    chunks = await _search(source, search, seconds)
    rest = len(search.output) - search.end
    if rest:
        last = chunks[-1]  # the match ends in it, or it would have been found before
        source.put_back([Chunk(last.stream, last.data[-rest:])])
    return bytes(search.output[: search.end])


async def wait_for_output(source: Source, pattern: Pattern, seconds: float | None) -> bytes:
    """The text that matches the pattern; all output stays unread."""
    search = PatternSearch(pattern)
    source.put_back(await _search(source, search, seconds))
    assert search.found is not None
    return search.found


async def _search(source: Source, search: PatternSearch, seconds: float | None) -> list[Chunk]:
    """The chunks up to the one in which the pattern ends; on failure all are put back."""
    chunks: list[Chunk] = []
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            while True:
                chunks.append(await source.__anext__())
                if search.feed(chunks[-1].data):
                    return chunks
                if len(search.output) > SEARCHED_BYTES:
                    raise PatternNotFound(search.pattern, bytes(search.output), is_over=False)
    except BaseException as error:
        source.put_back(chunks)
        if isinstance(error, StopAsyncIteration):
            raise PatternNotFound(search.pattern, bytes(search.output), is_over=True) from None
        if isinstance(error, TimeoutError) and scope.expired():
            text = f"no {search.pattern!r} in the output after {seconds:g} s"
            raise TimeoutError(text) from None
        raise


class Lines:
    """The lines of the output, for `async for`; each is of one stream.

    The output after the last line that was taken stays unread.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Line:
        chunks: list[Chunk] = []
        try:
            while True:
                chunks.append(await self._source.__anext__())
                if (taken := _first_line(chunks)) is not None:
                    line, chunks = taken
                    return line
        except StopAsyncIteration:
            if not chunks:
                raise
            stream = chunks[0].stream
            data = _joined(chunks, stream)
            chunks = [chunk for chunk in chunks if chunk.stream != stream]
            return _line(data, stream)
        finally:
            self._source.put_back(chunks)


def _first_line(chunks: list[Chunk]) -> tuple[Line, list[Chunk]] | None:
    """The line that the last chunk completes, and the chunks without it."""
    last = chunks[-1]
    end = last.data.find(b"\n") + 1
    if not end:
        size = sum(len(chunk.data) for chunk in chunks if chunk.stream == last.stream)
        if size < LINE_BYTES:
            return None
        end = len(last.data)
    head = Chunk(last.stream, last.data[:end])
    line = _line(_joined([*chunks[:-1], head], last.stream), last.stream)
    rest = [chunk for chunk in chunks[:-1] if chunk.stream != last.stream]
    if end < len(last.data):
        rest.append(Chunk(last.stream, last.data[end:]))
    return line, rest


def _joined(chunks: Sequence[Chunk], stream: Stream) -> bytes:
    return b"".join(chunk.data for chunk in chunks if chunk.stream == stream)


def _line(data: bytes, stream: Stream) -> Line:
    return Line(data.removesuffix(b"\n").removesuffix(b"\r").decode(errors="replace"), stream)
