"""Reading the output of a process up to a pattern or by lines; what follows stays unread.

A search puts back all chunks that it has not used, also if it fails or is cancelled.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Final, Protocol, Self

import msgspec

from exec_server.client.arguments import check_seconds
from exec_server.client.results import Chunk, Line
from exec_server.protocol.process import Stream

Pattern = bytes | str | re.Pattern[bytes]

# Output that is searched for a pattern, as much as is queued for a slow reader.
SEARCHED_BYTES: Final = 16 * 1_048_576
# A longer line is given in pieces, so that output without line ends does not fill the memory.
LINE_BYTES: Final = 1_048_576
# Pieces of output that are held at the same time; each takes memory beside its bytes. Neighbours of
# one stream are joined, so only output that alternates between the streams reaches this.
HELD_PIECES: Final = 65_536
# A piece of this size is not joined with its neighbour, so that chunks stay small.
JOINED_BYTES: Final = 65_536


class OutputSource(Protocol):
    """An iteration over the output of one process."""

    @property
    def has_more(self) -> bool:
        """Whether the next chunk was received already."""
        ...

    async def __anext__(self) -> Chunk: ...

    def put_back(self, chunks: Sequence[Chunk]) -> None:
        """Make these chunks the next ones again."""
        ...


class Pieces:
    """Output that was taken and can be put back: small chunks are joined; no I/O."""

    def __init__(self) -> None:
        self._pieces: list[tuple[Stream, bytearray, int]] = []  # with the bytes lost before
        self._sizes: dict[Stream, int] = {}

    def __len__(self) -> int:
        return len(self._pieces)

    def size(self, stream: Stream) -> int:
        return self._sizes.get(stream, 0)

    def add(self, chunk: Chunk) -> None:
        self._sizes[chunk.stream] = self.size(chunk.stream) + len(chunk.data)
        if self._pieces and not chunk.lost_before:
            stream, data, _ = self._pieces[-1]
            if stream == chunk.stream and len(data) < JOINED_BYTES:
                data += chunk.data
                return
        self._pieces.append((chunk.stream, bytearray(chunk.data), chunk.lost_before))

    def take_stream(self, stream: Stream | None = None) -> tuple[bytes, Stream]:
        """Remove the output of one stream, that of the first piece if none is named."""
        stream = stream or self._pieces[0][0]
        taken = b"".join(data for of, data, _ in self._pieces if of == stream)
        others = [piece for piece in self._pieces if piece[0] != stream]
        self._pieces, self._sizes = [], {}
        for of, data, lost in others:
            self.add(Chunk(of, bytes(data), lost))
        return taken, stream

    def chunks(self, start: int = 0) -> list[Chunk]:
        """The output without its first bytes."""
        chunks = []
        for stream, data, lost in self._pieces:
            if start < len(data):
                chunks.append(Chunk(stream, bytes(data[start:]), 0 if start else lost))
            start = max(0, start - len(data))
        return chunks


class PatternMatch(msgspec.Struct, frozen=True):
    """What `expect` has found: `pattern` is the one at `index`, `before` the output before it.

    `groups` are those of a compiled pattern; None for one that took no part.
    """

    index: int
    pattern: Pattern
    before: bytes
    matched: bytes
    groups: tuple[bytes | None, ...] = ()

    def group(self, key: int | str = 0) -> bytes | None:
        """A group by its number or name, as of `re.Match`; 0 is everything that matched."""
        if key == 0:
            return self.matched
        if isinstance(key, str):
            names = self.pattern.groupindex if isinstance(self.pattern, re.Pattern) else {}
            if key not in names:
                raise IndexError(f"the pattern has no group {key!r}")
            key = names[key]
        if not 0 < key <= len(self.groups):
            raise IndexError(f"the pattern has no group {key}")
        return self.groups[key - 1]

    @property
    def text(self) -> str:
        """`before` as text; invalid UTF-8 becomes U+FFFD."""
        return self.before.decode(errors="replace")


class PatternSearch:
    """Looks for patterns in output that arrives in pieces; no I/O."""

    def __init__(self, patterns: Sequence[Pattern]) -> None:
        """Raises TypeError for a pattern of another type, ValueError for an empty one or none."""
        self._patterns = patterns
        self._wanted = [_searchable(pattern) for pattern in patterns]
        if not patterns:
            raise ValueError("there are no patterns to expect")
        self.output = bytearray()
        self.match: PatternMatch | None = None
        self.end = 0  # of the match in `output`
        self._unsearched = 0  # bytes at the end of the output, for compiled patterns

    @property
    def pattern(self) -> object:
        """The pattern, or the list of several ones."""
        return self._patterns[0] if len(self._patterns) == 1 else list(self._patterns)

    def feed(self, data: bytes, *, has_more: bool = False) -> bool:
        """Add output; whether a pattern was found: the earliest match, the first of its patterns.

        A compiled pattern is searched in all of the output again, so while more output is at hand
        it is searched only after the output has grown by a quarter, or a literal was found.
        """
        begin = len(self.output)
        self.output += data
        spans: list[tuple[int, int, int, tuple[bytes | None, ...]]] = [
            (start, start + len(wanted), index, ())
            for index, wanted in enumerate(self._wanted)
            # The literal may have begun in earlier output.
            if isinstance(wanted, bytes)
            and (start := self.output.find(wanted, max(0, begin - len(wanted) + 1))) >= 0
        ]
        self._unsearched += len(data)
        if spans or not has_more or self._unsearched * 4 >= len(self.output):
            self._unsearched = 0
            spans += [
                (*match.span(), index, tuple(part and bytes(part) for part in match.groups()))
                for index, wanted in enumerate(self._wanted)
                if not isinstance(wanted, bytes)
                and (match := wanted.search(self.output)) is not None
            ]
        if not spans:
            return False
        start, self.end, index, groups = min(spans, key=lambda span: (span[0], span[2]))
        before, matched = bytes(self.output[:start]), bytes(self.output[start : self.end])
        self.match = PatternMatch(index, self._patterns[index], before, matched, groups)
        return True


def _searchable(pattern: Pattern) -> bytes | re.Pattern[bytes]:
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
    return pattern


async def expect(
    source: OutputSource, patterns: Sequence[Pattern], seconds: float | None
) -> PatternMatch:
    """Read up to and including the first match; see Process.expect."""
    search = PatternSearch(patterns)
    match, pieces = await _search(source, search, seconds)
    source.put_back(pieces.chunks(search.end))
    return match


async def wait_for_output(source: OutputSource, pattern: Pattern, seconds: float | None) -> bytes:
    """The text that matches the pattern; all output stays unread."""
    match, pieces = await _search(source, PatternSearch([pattern]), seconds)
    source.put_back(pieces.chunks())
    return match.matched


async def _search(
    source: OutputSource, search: PatternSearch, seconds: float | None
) -> tuple[PatternMatch, Pieces]:
    """The match, and the output up to the chunk in which it ends; on failure all is put back."""
    from exec_server.client.exceptions import PatternNotFound  # most programs do not search

    pieces = Pieces()
    check_seconds(seconds)
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            while True:
                chunk = await source.__anext__()
                pieces.add(chunk)
                is_full = len(search.output) + len(chunk.data) > SEARCHED_BYTES
                is_full = is_full or len(pieces) > HELD_PIECES
                search.feed(chunk.data, has_more=source.has_more and not is_full)
                if search.match is not None:
                    return search.match, pieces
                if is_full:
                    raise PatternNotFound(search.pattern, bytes(search.output), is_over=False)
    except BaseException as error:
        source.put_back(pieces.chunks())
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

    def __init__(self, source: OutputSource) -> None:
        self._source = source

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Line:
        pieces = Pieces()
        try:
            while True:
                chunk = await self._source.__anext__()
                if (end := _line_end(chunk, pieces)) is None:
                    pieces.add(chunk)
                    continue
                begun, stream = pieces.take_stream(chunk.stream)
                if end < len(chunk.data):
                    pieces.add(Chunk(stream, chunk.data[end:]))
                return _line(begun + chunk.data[:end], stream)
        except StopAsyncIteration:
            if not pieces:
                raise
            return _line(*pieces.take_stream())
        finally:
            self._source.put_back(pieces.chunks())


def _line_end(chunk: Chunk, pieces: Pieces) -> int | None:
    """The end of the first line in a chunk, None if the line goes on behind it."""
    if end := chunk.data.find(b"\n") + 1:
        return end
    is_long = pieces.size(chunk.stream) + len(chunk.data) >= LINE_BYTES
    return len(chunk.data) if is_long or len(pieces) >= HELD_PIECES else None


def _line(data: bytes, stream: Stream) -> Line:
    return Line(data.removesuffix(b"\n").removesuffix(b"\r").decode(errors="replace"), stream)
