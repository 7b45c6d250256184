"""The standard streams of the client commands: texts for people, and bytes for programs.

Texts pass through this module, which escapes control characters: servers choose names and error
texts. Only contents (`exec` output, `cat` files) are written as they are, by `OutputWriter`.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import groupby
from typing import TYPE_CHECKING, Final

from exec_server.cli.errors import CommandError
from exec_server.errors import printable

if TYPE_CHECKING:
    import asyncio

    from exec_server.client.process import Process
    from exec_server.protocol.sandbox import Denial


_CLEAR_LINE: Final = "\r\x1b[K"
# One read of a file, or of a pipe that is kept full and so was enlarged.
READ_BYTES: Final = 262_144
# What a read of another pipe that is full returns.
_FULL_PIPE_BYTES: Final = 65_536


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`. Blocking; raises OSError."""
    unwritten = memoryview(data)
    while unwritten:
        try:
            unwritten = unwritten[os.write(descriptor, unwritten) :]
        except BlockingIOError:  # another process has set O_NONBLOCK on the shared description
            select.select([], [descriptor], [])


def print_text(text: str) -> None:
    """Print to stdout, control characters escaped on a terminal and file names as their bytes.

    Blocking. Raises CommandError, or BrokenPipeError if the reader has closed stdout.
    """
    safe = printable(text, keep="\n") if os.isatty(1) else text
    with describe_stdout_errors():
        write_all(1, safe.encode(errors="surrogateescape"))


def json_text(value: object) -> str:
    """The JSON text that a command prints; ASCII, so that a terminal can show it."""
    import json

    return json.dumps(value, indent=2) + "\n"


@contextlib.contextmanager
def describe_stdout_errors() -> Iterator[None]:
    """Turn an OSError, which does not name stdout, into a CommandError that does."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandError(f"cannot write to stdout: {error.strerror}") from None


def print_status(text: str, *, is_raw: bool = False) -> None:
    """Print a line to stderr with the prefix `exec-server:`, to tell it from remote output."""
    print_error(f"exec-server: {text}", is_raw=is_raw)


def print_notice(text: str) -> None:
    """Like `print_status`, and clear a progress bar that stands on the line."""
    if os.isatty(2):
        _write_error(_CLEAR_LINE)
    print_status(text)


def print_error(text: str, *, is_raw: bool = False) -> None:
    """Print a line to stderr; `is_raw` is for a terminal in raw mode. Ignores a closed stderr.

    Newlines in the text are kept; `printable` escapes those of a server.
    """
    line = printable(text, keep="\n") + "\n"
    _write_error(line.replace("\n", "\r\n") if is_raw else line)


def _write_error(text: str) -> None:
    with contextlib.suppress(OSError):
        write_all(2, text.encode(errors="backslashreplace"))


def print_log_records() -> None:
    """Print warnings of the library to stderr like all other texts."""
    import logging  # slow to import, and not needed for shell completion

    class _Printer(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            print_error(f"exec-server: {self.format(record)}")

    logging.basicConfig(handlers=[_Printer()], level=logging.WARNING, format="%(message)s")


def local_time(seconds: float, form: str) -> str:
    """The local time in the form of strftime; `?` for a time that the calendar does not have."""
    try:
        return time.strftime(form, time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "?"


def denial_lines(denial: Denial) -> list[str]:
    """The denied access and the rule of the policy; empty if no rule is known to forbid it."""
    if denial.candidates:
        return ["denied: one of these", *map(_candidate, denial.candidates)]
    if denial.rule is None:
        return []
    return [f"denied: {_access(denial)}", denial.rule]


def _candidate(denial: Denial) -> str:
    return f"- {_access(denial)} ({denial.rule or denial.text})"


def _access(denial: Denial) -> str:
    if denial.operation == "network":
        return "network access"
    if denial.operation == "syscall" or denial.operation is None:
        return "a system call"
    return f"{denial.operation} {denial.path or 'of an unknown path'}"


class StdinReader:
    """Reads bytes from a descriptor as they arrive."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        # epoll refuses regular files: they are always readable.
        self._is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)

    async def read(self) -> bytes:
        """Return the next bytes, or b"" at the end of input or after a terminal's hangup."""
        while True:
            if not self._is_file:
                await self._wait_readable()
            try:
                data = os.read(self._descriptor, READ_BYTES)
            except BlockingIOError:
                continue  # another process that shares the descriptor has read the bytes
            except OSError:
                return b""
            if len(data) == _FULL_PIPE_BYTES:
                from exec_server.host.pipes import enlarge_pipe

                enlarge_pipe(self._descriptor)
            return data

    async def _wait_readable(self) -> None:
        import asyncio  # slow to import, and not needed for texts

        await asyncio.sleep(0)  # a flood of input does not keep others from running
        with contextlib.suppress(OSError, ValueError):  # a number that select does not take
            if select.select([self._descriptor], [], [], 0)[0]:
                return
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        try:
            loop.add_reader(self._descriptor, _resolve, ready)
        except OSError:  # epoll and kqueue do not support devices such as /dev/zero
            self._is_file = True
            await asyncio.sleep(0)
            return
        try:
            await ready
        finally:
            loop.remove_reader(self._descriptor)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class OutputWriter:
    """Writes in one thread, which is never joined: the reader of a pipe may never read again."""

    def __init__(self) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self._thread = ThreadPoolExecutor(1, "output-writer")
        self.is_writing = False

    async def write(self, descriptor: int, data: bytes) -> None:
        """Write all of `data`; raises OSError, such as BrokenPipeError."""
        import asyncio

        loop = asyncio.get_running_loop()
        self.is_writing = True
        try:
            await loop.run_in_executor(self._thread, write_all, descriptor, data)
        finally:
            self.is_writing = False

    async def print(self, data: bytes, descriptor: int = 1) -> None:
        """The same; raises CommandError, or BrokenPipeError."""
        with describe_stdout_errors():
            await self.write(descriptor, data)

    async def write_output(
        self, process: Process, inspect: Callable[[bytes], AbstractContextManager[None]] | None
    ) -> None:
        """Write the output of a command until its end, within what `inspect` returns for it."""
        while chunks := await process.read_some():
            for descriptor, data in by_descriptor((chunk.stream, chunk.data) for chunk in chunks):
                with contextlib.nullcontext() if inspect is None else inspect(data):
                    await self.write(descriptor, data)


def by_descriptor(chunks: Iterable[tuple[str, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Streams and their bytes as descriptors to write to, consecutive ones joined."""
    for is_error, run in groupby(chunks, lambda chunk: chunk[0] == "stderr"):
        yield 2 if is_error else 1, b"".join(data for _, data in run)


def is_null_device(descriptor: int) -> bool:
    """Whether a descriptor is /dev/null or closed, and can deliver no input."""
    try:
        status, null = os.fstat(descriptor), os.stat(os.devnull)
    except OSError:
        return True
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == null.st_rdev
