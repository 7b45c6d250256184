"""The command's own stdin, stdout and stderr, without blocking the event loop."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Final

from exec_server.cli.commands.printing import write_all
from exec_server.client.process import Process
from exec_server.host import platform

# One read returns at most the capacity of a pipe.
READ_BYTES: Final = 65_536


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
                return os.read(self._descriptor, READ_BYTES)
            except BlockingIOError:
                continue  # another process that shares the descriptor has read the bytes
            except OSError:
                return b""

    async def _wait_readable(self) -> None:
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
    """Writes to descriptors in one thread, so that a slow reader does not block the loop.

    The thread is never joined: the reader of the pipe may never read again.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "output-writer")
        self.is_writing = False

    async def write(self, descriptor: int, data: bytes) -> None:
        """Write all of `data`; raises OSError, such as BrokenPipeError."""
        loop = asyncio.get_running_loop()
        if len(data) > READ_BYTES:  # not for a short command: it would take longer to start
            platform.keep_freed_memory()
        self.is_writing = True
        try:
            await loop.run_in_executor(self._thread, write_all, descriptor, data)
        finally:
            self.is_writing = False

    async def write_output(self, process: Process, inspect: Callable[[bytes], None] | None) -> None:
        """Write the output of a command until its end; `inspect` is called with it before."""
        while chunks := await process.read_some():
            for is_error, run in groupby(chunks, lambda chunk: chunk.stream == "stderr"):
                data = b"".join(chunk.data for chunk in run)
                if inspect is not None:
                    inspect(data)
                await self.write(2 if is_error else 1, data)
