"""Output of commands: passed on while they run, collected up to a limit, or read by patterns.

Delivery passes it to a callback, files or loggers; CollectedOutput keeps it for a Result; `Lines`,
`read_until` and `wait_for_output` read it from a process.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import inspect
import io
import logging
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol, Self

import msgspec

from exec_server.client.arguments import check_number
from exec_server.client.exceptions import PatternNotFound
from exec_server.client.results import Chunk, Line
from exec_server.errors import InvalidParams
from exec_server.protocol.process import Stream

OnOutput = Callable[[Chunk], Awaitable[None] | None]

Logger = logging.Logger | logging.LoggerAdapter[Any]
Target = str | os.PathLike[str] | io.IOBase | Logger

# A longer line is logged in pieces.
LOGGED_CHARACTERS = 65_536

# The end of a stream grows by so much beyond its limit before it is cut, so that small chunks are
# not moved each time.
SLACK_BYTES: Final = 65_536

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


"""Called with each chunk; a coroutine that it returns is awaited before the next chunk."""
"""A local file by its path, an open file of bytes or text such as `sys.stdout`, or a logger."""


class Delivery:
    """The receivers of a command's output, for `async with`; a terminal's output is stdout."""

    def __init__(
        self, on_output: OnOutput | None, stdout: Target | None, stderr: Target | None
    ) -> None:
        """Raises TypeError for a target of another type, ValueError for `stderr="stdout"`."""
        if stderr == "stdout":  # in other libraries it merges the streams
            raise ValueError(
                'stderr="stdout" would write a file of that name: use merge_stderr=True, or '
                '"./stdout" for the file'
            )
        if on_output is not None and not callable(on_output):
            raise TypeError(f"on_output must be callable, not {type(on_output).__name__}")
        self._on_output = on_output
        self._writers = {
            stream: _writer(target, stream)
            for target, stream in ((stdout, _STDOUT), (stderr, _STDERR))
            if target is not None
        }
        if _is_same_path(stdout, stderr):  # opened twice, each would overwrite the other
            self._writers[_STDERR] = self._writers[_STDOUT]

    @property
    def has_receivers(self) -> bool:
        return self._on_output is not None or bool(self._writers)

    async def __aenter__(self) -> Self:
        self._opened = await asyncio.to_thread(self._open) if self._writers else None
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._opened is not None:
            await asyncio.to_thread(self._opened.close)

    def _open(self) -> contextlib.ExitStack:
        with contextlib.ExitStack() as opened:
            for writer in dict.fromkeys(self._writers.values()):
                writer.open()
                opened.callback(writer.close)
            return opened.pop_all()

    async def deliver(self, chunks: Sequence[Chunk]) -> None:
        """Pass chunks to all receivers; raises the exception of the first one that fails."""
        if self._on_output is not None:
            for chunk in chunks:
                waiting = self._on_output(chunk)
                if inspect.isawaitable(waiting):
                    await waiting
        if self._writers:
            # A disk, a pipe or a terminal may block.
            await asyncio.to_thread(self._write, chunks)

    def _write(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            writer = self._writers.get(_STDERR if chunk.stream == "stderr" else _STDOUT)
            if writer is not None:
                writer.write(chunk.data)
        for writer in self._writers.values():
            writer.flush()


class _Writer(Protocol):
    def open(self) -> None: ...
    def write(self, data: bytes) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class _PathWriter:
    """A local file that is replaced when the command starts."""

    _file: io.BufferedWriter

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path

    def open(self) -> None:
        self._file = open(self._path, "wb")  # noqa: SIM115 - `close` closes it

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _FileWriter:
    """An open file of bytes, which stays open."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def open(self) -> None: ...

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None: ...


class _TextWriter(_FileWriter):
    """An open file of text; characters may be divided between chunks."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, data: bytes) -> None:
        self._file.write(self._decoder.decode(data))

    def close(self) -> None:
        if rest := self._decoder.decode(b"", final=True):
            self._file.write(rest)


class _LogWriter:
    """A logger, which gets each line."""

    def __init__(self, logger: Logger, level: int) -> None:
        self._logger = logger
        self._level = level
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._line = ""

    def open(self) -> None: ...

    def write(self, data: bytes) -> None:
        *lines, self._line = (self._line + self._decoder.decode(data)).split("\n")
        for line in lines:
            self._log(line)
        if len(self._line) > LOGGED_CHARACTERS:
            self._log(self._line)
            self._line = ""

    def flush(self) -> None: ...

    def close(self) -> None:
        self._line += self._decoder.decode(b"", final=True)
        if self._line:
            self._log(self._line)

    def _log(self, line: str) -> None:
        self._logger.log(self._level, "%s", line.removesuffix("\r"))


_STDOUT: Stream = "stdout"
_STDERR: Stream = "stderr"


def _is_same_path(stdout: Target | None, stderr: Target | None) -> bool:
    if isinstance(stdout, str | os.PathLike) and isinstance(stderr, str | os.PathLike):
        return os.path.realpath(stdout) == os.path.realpath(stderr)
    return False


def _writer(target: Target, stream: Stream) -> _Writer:
    if isinstance(target, str | os.PathLike):
        return _PathWriter(target)
    if isinstance(target, logging.Logger | logging.LoggerAdapter):
        return _LogWriter(target, logging.INFO if stream == _STDOUT else logging.WARNING)
    if isinstance(target, io.TextIOBase) or hasattr(target, "encoding"):
        return _TextWriter(target)
    if hasattr(target, "write") and hasattr(target, "flush"):
        return _FileWriter(target)
    kind = type(target).__name__
    raise TypeError(f"{stream} must be a path, an open file or a logger, not {kind}")


# CollectedOutput: the output of a command up to a limit, for both streams together or for each.
class OutputLimit(msgspec.Struct, frozen=True):
    """A limit for each stream: its first `head` bytes and its last `tail` bytes are kept."""

    head: int = 0
    tail: int = 0


class CollectedOutput:
    """The output of a command up to a limit; the rest is counted, for each stream."""

    def __init__(self, limit: int | OutputLimit) -> None:
        # Not lists of chunks: chunks of one byte would take fifty times their size.
        self._streams: dict[bool, _SharedLimit | _HeadAndTail]
        self.received = 0
        if isinstance(limit, OutputLimit):
            for name, size in (("head", limit.head), ("tail", limit.tail)):
                if size < 0:
                    raise InvalidParams(f"{name} of output_limit must not be negative: {size}")
            self._streams = {is_error: _HeadAndTail(limit) for is_error in (False, True)}
            return
        if limit < 0:
            raise InvalidParams(f"output_limit must not be negative: {limit}")
        remaining = _Remaining(limit)
        self._streams = {is_error: _SharedLimit(remaining) for is_error in (False, True)}

    def add(self, stream: Stream, data: bytes) -> None:
        self._streams[stream == "stderr"].add(data)

    @property
    def stdout(self) -> bytes:
        return self._streams[False].kept()

    @property
    def stderr(self) -> bytes:
        return self._streams[True].kept()

    @property
    def lost_stdout(self) -> int:
        return self._streams[False].lost_bytes

    @property
    def lost_stderr(self) -> int:
        return self._streams[True].lost_bytes


class _Remaining:
    """The bytes that two streams may still keep."""

    def __init__(self, size: int) -> None:
        self.size = size


class _SharedLimit:
    """The beginning of a stream that shares its limit with the other one."""

    def __init__(self, remaining: _Remaining) -> None:
        self._remaining = remaining
        self._data = bytearray()
        self.lost_bytes = 0

    def add(self, data: bytes) -> None:
        kept = data[: self._remaining.size]
        self._remaining.size -= len(kept)
        self.lost_bytes += len(data) - len(kept)
        self._data += kept

    def kept(self) -> bytes:
        return bytes(self._data)


class _HeadAndTail:
    """The beginning and the end of a stream."""

    def __init__(self, limit: OutputLimit) -> None:
        self._limit = limit
        self._head = bytearray()
        self._tail = bytearray()
        self._received = 0

    def add(self, data: bytes) -> None:
        self._received += len(data)
        taken = min(len(data), self._limit.head - len(self._head))
        self._head += data[:taken]
        self._tail += data[taken:]
        if len(self._tail) > self._limit.tail + SLACK_BYTES:
            self._cut()

    def _cut(self) -> None:
        del self._tail[: max(0, len(self._tail) - self._limit.tail)]

    def kept(self) -> bytes:
        self._cut()
        return bytes(self._head) + bytes(self._tail)

    @property
    def lost_bytes(self) -> int:
        return self._received - len(self._head) - min(len(self._tail), self._limit.tail)


# Reading the output of a process up to a pattern or by lines; the rest stays unread.
#
# A search takes chunks until it has found its end, and puts back all that it has not used. So it
# can be followed by any other way of reading, and a search that fails or is cancelled loses
# nothing.
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
        self._unsearched = 0  # bytes at the end of the output, for a compiled pattern

    def feed(self, data: bytes, *, has_more: bool = False) -> bool:
        """Add output; whether the pattern was found.

        A compiled pattern is searched in all of the output again, so while more output is at hand
        it is searched only after the output has grown by a quarter.
        """
        begin = len(self.output)
        self.output += data
        if isinstance(self._wanted, bytes):
            # The literal may have begun in earlier output.
            start = self.output.find(self._wanted, max(0, begin - len(self._wanted) + 1))
            if start >= 0:
                self.found, self.end = self._wanted, start + len(self._wanted)
            return self.found is not None
        self._unsearched += len(data)
        if has_more and self._unsearched * 4 < len(self.output):
            return False
        self._unsearched = 0
        if (match := self._wanted.search(self.output)) is not None:
            self.found, self.end = bytes(match[0]), match.end()
        return self.found is not None


async def read_until(source: OutputSource, pattern: Pattern, seconds: float | None) -> bytes:
    """The output up to and including the pattern; see Process.read_until."""
    search = PatternSearch(pattern)
    pieces = await _search(source, search, seconds)
    source.put_back(pieces.chunks(search.end))
    return bytes(search.output[: search.end])


async def wait_for_output(source: OutputSource, pattern: Pattern, seconds: float | None) -> bytes:
    """The text that matches the pattern; all output stays unread."""
    search = PatternSearch(pattern)
    source.put_back((await _search(source, search, seconds)).chunks())
    assert search.found is not None
    return search.found


async def _search(source: OutputSource, search: PatternSearch, seconds: float | None) -> Pieces:
    """The output up to the chunk in which the pattern ends; on failure all is put back."""
    pieces = Pieces()
    check_number(seconds)
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            while True:
                chunk = await source.__anext__()
                pieces.add(chunk)
                is_full = len(search.output) + len(chunk.data) > SEARCHED_BYTES
                is_full = is_full or len(pieces) > HELD_PIECES
                if search.feed(chunk.data, has_more=source.has_more and not is_full):
                    return pieces
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
