"""Our own standard streams: read as bytes come, written in order, without blocking the loop."""

from __future__ import annotations

import asyncio
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from exec_server.commands.printing import write_all

# Of one read: what a pipe holds.
READ_BYTES: Final = 65_536


def is_nothing(descriptor: int) -> bool:
    """Whether a descriptor is /dev/null or closed, so that nothing can come from it."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return True
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == os.makedev(1, 3)


class Inlet:
    """Bytes from a descriptor as they come."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        # Of a file the kernel does not say whether it is ready: it always is.
        self._is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)

    async def read(self) -> bytes:
        """What is there next; empty at the end, also if that is a terminal's hanging up."""
        while True:
            if not self._is_file:
                await self._readiness()
            try:
                return os.read(self._descriptor, READ_BYTES)
            except BlockingIOError:
                continue  # somebody who shares it was faster
            except OSError:
                return b""

    async def _readiness(self) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        try:
            loop.add_reader(self._descriptor, _resolve, ready)
        except PermissionError:  # a device without readiness, such as /dev/zero
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


class Outlet:
    """Writes to descriptors in one thread, so that a slow reader holds up nothing else.

    The thread is never waited for: whoever reads may never do so again.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "outlet")

    async def write(self, descriptor: int, data: bytes) -> None:
        """Write all of it; raises OSError, such as BrokenPipeError."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, write_all, descriptor, data)
