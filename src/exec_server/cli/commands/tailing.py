"""Tail: the end of a file of a target, and the data that is appended to it."""

from __future__ import annotations

import asyncio
from typing import Final

from exec_server.cli.commands.printing import describe_stdout_errors, print_status
from exec_server.cli.commands.remote_operands import Operand
from exec_server.cli.commands.streams import OutputWriter
from exec_server.client.results import Stat
from exec_server.errors import NotFound

# The end of a file is read in growing pieces until it has enough lines, up to the second size.
FIRST_BYTES: Final = 65_536
MAX_BYTES: Final = 64 * 1_048_576
# How often the size is asked for: a reader notices no longer delay, and a server no load.
INTERVAL_SECONDS: Final = 0.5


class Tail:
    """Prints one file; `position` is the end of what was printed."""

    def __init__(self, operand: Operand) -> None:
        self._files = operand.environment.files
        self._path = operand.path
        self._label = operand.label
        self._writer = OutputWriter()
        self.position = 0
        self._created: float | None = None

    async def print_end(self, lines: int) -> None:
        """Print the last lines."""
        found = await self._files.stat(self._path)
        self._created = found.created
        size = FIRST_BYTES
        while True:
            start = max(0, found.size - size)
            data = await self._read(start, found.size)
            text = last_lines(data, lines)
            if len(text) < len(data) or start == 0 or size >= MAX_BYTES:
                break
            size *= 8
        self.position = found.size
        await self._write(text)

    async def follow(self) -> None:
        """Print everything that is appended, for ever."""
        while True:
            try:
                found = await self._files.stat(self._path)
            except NotFound:
                found = None  # it is being replaced
            if found is not None:
                await self._advance(found)
            await asyncio.sleep(INTERVAL_SECONDS)

    async def _advance(self, found: Stat) -> None:
        if found.size < self.position or found.created != self._created:
            print_status(f"{self._label}: the file was replaced or truncated")
            self.position, self._created = 0, found.created
        if found.size > self.position:
            async with self._files.open(self._path, offset=self.position) as file:
                async for block in file:
                    self.position += len(block)
                    await self._write(block)

    async def _read(self, start: int, end: int) -> bytes:
        if start == end:
            return (await self._files.read(self._path)) if not end else b""
        async with self._files.open(self._path, offset=start) as file:
            return await file.read(end - start)

    async def _write(self, data: bytes) -> None:
        with describe_stdout_errors():
            await self._writer.write(1, data)


def last_lines(data: bytes, count: int) -> bytes:
    """The last lines of a text; one without a line break at its end is a line, too."""
    if count == 0:
        return b""
    end = len(data) - 1 if data.endswith(b"\n") else len(data)
    for _ in range(count):
        end = data.rfind(b"\n", 0, end)
        if end < 0:
            return data
    return data[end + 1 :]
