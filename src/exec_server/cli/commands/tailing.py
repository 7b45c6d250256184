"""Tail: the end of a file of a target, and the data that is appended to it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from exec_server.cli.commands.printing import describe_stdout_errors, print_status
from exec_server.cli.commands.remote_operands import Operand
from exec_server.cli.commands.streams import OutputWriter
from exec_server.client.results import Stat
from exec_server.errors import InvalidRequest, NotFound

# The end of a file is read in growing pieces until it has enough lines, up to the second size.
FIRST_BYTES: Final = 65_536
MAX_BYTES: Final = 64 * 1_048_576
# How often the size is asked for: a reader notices no longer delay, and a server no load.
INTERVAL_SECONDS: Final = 0.5
# Bytes before the position that are compared after a change: a file with others was overwritten.
COMPARED_BYTES: Final = 4096


@dataclass(frozen=True)
class Seen:
    """The file at the end of all links, and its metadata."""

    path: str
    status: Stat

    def is_same_file(self, other: Seen) -> bool:
        return (self.path, self.status.created) == (other.path, other.status.created)


class Tail:
    """Prints one file; `position` is the end of what was printed."""

    def __init__(self, operand: Operand) -> None:
        self._files = operand.environment.files
        self._path = operand.path
        self._label = operand.label
        self._writer = OutputWriter()
        self.position = 0
        self._printed = b""  # the bytes of the file before the position
        self._seen: Seen | None = None

    async def print_end(self, lines: int, heading: bytes = b"") -> None:
        """Print the last lines, after a heading if there is one."""
        seen = await self._look()
        found = seen.status
        size = FIRST_BYTES
        while True:
            start = max(0, found.size - size)
            data = await self._read(start, found.size)
            text = last_lines(data, lines)
            if len(text) < len(data) or start == 0 or size >= MAX_BYTES:
                break
            size *= 8
        self._seen, self.position, self._printed = seen, start + len(data), data[-COMPARED_BYTES:]
        await self._write(heading + text)

    async def print_from(self, line: int, heading: bytes = b"") -> None:
        """Print all lines from this one on, counted from 1, after a heading if there is one."""
        self._seen = await self._look()
        missing = line - 1
        await self._write(heading)
        async with self._files.open(self._path, offset=0) as file:
            async for block in file:
                self._advance_by(block)
                missing, rest = skip_lines(block, missing)
                await self._write(rest)

    async def follow(self) -> None:
        """Print everything that is appended, for ever."""
        while True:
            try:
                seen = await self._look()
            except NotFound:
                seen = None  # it is being replaced
            if seen is not None and seen != self._seen:
                await self._advance(seen)
            await asyncio.sleep(INTERVAL_SECONDS)

    async def _look(self) -> Seen:
        path = await self._files.realpath(self._path)
        try:
            found = await self._files.stat(path, follow_links=False)
        except InvalidRequest:  # a link, on a server without fsList
            found = None
        if found is None or found.is_symlink:  # a link has come in between
            found = await self._files.stat(path)
        return Seen(path, found)

    async def _advance(self, seen: Seen) -> None:
        is_other = self._seen is None or not seen.is_same_file(self._seen)
        if is_other or seen.status.size < self.position or not await self._has_printed():
            print_status(f"{self._label}: the file was replaced or truncated")
            self.position, self._printed = 0, b""
        self._seen = seen
        if seen.status.size > self.position:
            async with self._files.open(self._path, offset=self.position) as file:
                async for block in file:
                    self._advance_by(block)
                    await self._write(block)

    def _advance_by(self, block: bytes) -> None:
        self.position += len(block)
        self._printed = (self._printed + block)[-COMPARED_BYTES:]

    async def _has_printed(self) -> bool:
        """Whether the bytes before the position are still those that were read there."""
        start = self.position - len(self._printed)
        return not self._printed or await self._read(start, self.position) == self._printed

    async def _read(self, start: int, end: int) -> bytes:
        if start == end:
            return (await self._files.read(self._path)) if not end else b""
        async with self._files.open(self._path, offset=start) as file:
            return await file.read(end - start)

    async def _write(self, data: bytes) -> None:
        with describe_stdout_errors():
            await self._writer.write(1, data)


def skip_lines(data: bytes, count: int) -> tuple[int, bytes]:
    """Skip so many lines; returns how many are still to be skipped, and the rest."""
    found = data.count(b"\n")
    if found < count:
        return count - found, b""
    start = 0
    for _ in range(count):
        start = data.index(b"\n", start) + 1
    return 0, data[start:]


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
