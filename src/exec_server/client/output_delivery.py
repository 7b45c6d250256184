"""Delivery: the output of a command, passed on while it runs: to a callback, files or loggers."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import inspect
import io
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, Self

from exec_server.client.results import Chunk
from exec_server.protocol.process import Stream

OnOutput = Callable[[Chunk], Awaitable[None] | None]
"""Called with each chunk; a coroutine that it returns is awaited before the next chunk."""

Logger = logging.Logger | logging.LoggerAdapter[Any]
Target = str | os.PathLike[str] | io.IOBase | Logger
"""A local file by its path, an open file of bytes or text such as `sys.stdout`, or a logger."""

# A longer line is logged in pieces.
LOGGED_CHARACTERS = 65_536


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
