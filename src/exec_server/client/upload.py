"""Upload: a file or a tree of this machine to the server's."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from typing import BinaryIO, Final

from exec_server.client.failures import SandboxDenied
from exec_server.client.open_file import WRITTEN_BYTES
from exec_server.client.results import Transfer
from exec_server.client.transfer import (
    CHANGED,
    MAX_ENTRIES,
    SMALL_BYTES,
    SPECIAL,
    Item,
    TreeCopy,
    apply,
    below,
    each,
    part_path,
)
from exec_server.errors import (
    ConnectionLost,
    ExecServerError,
    InternalError,
    InvalidRequest,
    NotFound,
    RpcError,
    StdinClosed,
)

# How often a large file is begun again on a machine without the commands to go on.
ATTEMPTS: Final = 5

_KINDS: Final = {stat.S_IFREG: "f", stat.S_IFDIR: "d", stat.S_IFLNK: "l"}
_APPEND: Final = 'truncate -s "$2" "$1" && exec head -c "$3" >> "$1"'
_FINISH: Final = '[ ! -d "$2" ] && chmod "$3" "$1" && mv -f "$1" "$2"'
# Into a directory that is in the way `ln` would put the link.
_LINK: Final = """
if [ -d "$2" ] && [ ! -L "$2" ]; then echo "$2: Is a directory" >&2; exit 1; fi
ln -sfn -- "$1" "$2"
"""


class Upload(TreeCopy):
    """One upload."""

    async def copy(self, source: str, target: str) -> Transfer:
        """Copy it; raises OSError if the top cannot be read here."""
        self._finished_modes: set[str] = set()
        items = await asyncio.to_thread(_scan, source, self._fail)
        for item in items:
            if item.kind == "?":
                self._fail(item.path, OSError(errno.EINVAL, SPECIAL, below(source, item.path)))
        items = self._left(items)
        self._tally.expect(items)

        async def make(path: str) -> None:
            await self._make(path, target)

        async def send(item: Item) -> None:
            here, there = below(source, item.path), below(target, item.path)
            await self._attempt(item, self._send(item, here, there), here, there)

        await each(_leaves(items), make)
        await each((item for item in self._left(items) if item.kind == "f"), send)
        items = self._left(items)
        await self._link(items, target)
        await self._set_modes(items, target)
        return self._tally.result(items)

    async def _make(self, path: str, target: str) -> None:
        """Make a directory and all above it; if that fails, find out which of them it is."""
        try:
            await self._files.mkdir(below(target, path), parents=True, exist_ok=True)
            return
        except (RpcError, SandboxDenied) as error:
            failure = error
        parts = path.split("/") if path else []
        for depth in range(len(parts)):
            above = "/".join(parts[:depth])
            if above in self._missing:
                return
            try:
                await self._files.mkdir(below(target, above), parents=True, exist_ok=True)
            except (RpcError, SandboxDenied) as error:
                self._fail(above, error)
                return
        self._fail(path, failure)

    # ---- content ----------------------------------------------------------------------

    async def _send(self, item: Item, source: str, target: str) -> None:
        if item.size > SMALL_BYTES:
            async with self._large:
                await self._send_large(item, source, target)
            return
        data = await asyncio.to_thread(_read_whole, source)
        await self._files.write(target, data)
        self._tally.advance(item.path, len(data))

    async def _send_large(self, item: Item, source: str, target: str) -> None:
        if await self._is_directory(target):
            raise InvalidRequest(f"{target}: Is a directory")
        part = part_path(target, item)
        with await asyncio.to_thread(open, source, "rb") as file:
            offset = await self._resumable(file, part, item)
            self._tally.resume(item.path, offset)
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    if offset:
                        await self._append(file, part, item, offset)
                    else:
                        await self._write(file, part, item)
                    break
                except _Interrupted as interruption:
                    if attempt == ATTEMPTS:
                        raise ConnectionLost(f"{target}: {interruption}") from None
                    offset = interruption.reached
            if _version(os.fstat(file.fileno())) != item.modified:
                await self._files.remove(part, missing_ok=True)
                raise OSError(errno.EBUSY, CHANGED, source)
        await self._finish(part, target, item)

    async def _is_directory(self, path: str) -> bool:
        try:
            return (await self._files.stat(path)).is_directory
        except NotFound:
            return False

    async def _resumable(self, file: BinaryIO, part: str, item: Item) -> int:
        """How much of the file is there from an earlier attempt, and right."""
        try:
            size = (await self._files.stat(part)).size
        except NotFound:
            return 0
        if not 0 < size <= item.size:
            return 0
        return size if await self._is_same(part, file.fileno(), size) else 0

    async def _write(self, file: BinaryIO, part: str, item: Item) -> None:
        """From the beginning, through an open file."""
        writer = self._files.open(part, "wb")
        sent = 0
        try:
            async with writer:
                async for block in _blocks(file, 0):
                    await writer.write(block)
                    sent += len(block)
                    self._tally.advance(item.path, len(block))
        except ConnectionLost as error:
            self._tally.advance(item.path, writer.written - sent)
            raise _Interrupted(writer.written, str(error)) from None

    async def _append(self, file: BinaryIO, part: str, item: Item, offset: int) -> None:
        """From somewhere in the middle, through a process: an open file begins at 0."""
        words = ["/bin/sh", "-c", _APPEND, "sh", part, str(offset), str(item.size - offset)]
        sent = 0
        try:
            async with self._commands.start(
                words, cwd="/", stdin=True, sandbox=self._sandbox
            ) as process:
                async for block in _blocks(file, offset):
                    await process.write(block)
                    sent += len(block)
                    self._tally.advance(item.path, len(block))
                if await process.wait():
                    raise InternalError("the rest cannot be appended")
        except (RpcError, StdinClosed, UnicodeEncodeError) as error:
            self._tally.advance(item.path, -offset - sent)
            raise _Interrupted(0, str(error)) from None

    async def _finish(self, part: str, target: str, item: Item) -> None:
        """Give a complete file its name and its mode, at once if possible."""
        assert item.mode is not None
        script = ["-n", "3", "sh", "-c", _FINISH, "sh"]
        try:
            done = await apply(
                self._commands, script, (part, target, f"{item.mode:o}"), self._sandbox
            )
        except RpcError:
            done = None
        if done:
            self._finished_modes.add(item.path)
            return
        await self._files.copy(part, target)
        await self._files.remove(part, missing_ok=True)

    # ---- modes and links --------------------------------------------------------------

    async def _link(self, items: list[Item], target: str) -> None:
        words = [
            word
            for item in items
            if item.kind == "l"
            for word in (item.target, below(target, item.path))
        ]
        if words:
            await self._try("links", ["-n", "2", "sh", "-c", _LINK, "sh"], words)

    async def _set_modes(self, items: list[Item], target: str) -> None:
        by_mode = defaultdict(list)
        for item in items:
            if item.kind in "fd" and item.path not in self._finished_modes:
                by_mode[item.mode].append(below(target, item.path))
        for mode, paths in by_mode.items():
            # Deepest first: a directory may become one that cannot be entered.
            await self._try("modes", ["chmod", f"{mode:o}"], sorted(paths, reverse=True))

    async def _try(self, what: str, words: list[str], paths: list[str]) -> None:
        try:
            result = await apply(self._commands, words, paths, self._sandbox)
        except RpcError as error:
            self._tally.left_out.append(f"{what}: {error}")
            return
        if not result:
            text = result.error_text.strip() or f"exit code {result.exit_code}"
            self._tally.left_out.append(f"{what}: {text}")


class _Interrupted(ExecServerError):
    """A file is not complete; so much of it is there for sure."""

    def __init__(self, reached: int, reason: str) -> None:
        super().__init__(reason)
        self.reached = reached


# ---- this machine, in threads ---------------------------------------------------------


def _scan(top: str, fail: Callable[[str, OSError], None]) -> list[Item]:
    """The tree, directories before what is in them; a link at the top counts as its target.

    `fail` gets what cannot be read, and raises if that is the top.
    """
    items = []
    for path, found in _walk(top, fail):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "?")
        try:
            target = os.readlink(below(top, path)) if kind == "l" else ""
        except OSError as error:
            fail(path, error)
            continue
        mode = stat.S_IMODE(found.st_mode) & 0o777
        items.append(Item(path, kind, mode, found.st_size, _version(found), target))
        if len(items) > MAX_ENTRIES:
            raise InvalidRequest(f"{top}: more than {MAX_ENTRIES} entries")
    return items


def _walk(top: str, fail: Callable[[str, OSError], None]) -> Iterator[tuple[str, os.stat_result]]:
    found = os.stat(top)
    yield "", found
    waiting = [""] if stat.S_ISDIR(found.st_mode) else []
    while waiting:
        directory = waiting.pop()
        try:
            with os.scandir(below(top, directory)) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            fail(directory, error)
            continue
        for entry in entries:
            path = f"{directory}/{entry.name}" if directory else entry.name
            try:
                found = entry.stat(follow_symlinks=False)
            except OSError as error:
                fail(path, error)
                continue
            yield path, found
            if entry.is_dir(follow_symlinks=False):
                waiting.append(path)


def _version(found: os.stat_result) -> str:
    return f"{found.st_size} {found.st_mtime_ns}"


def _leaves(items: list[Item]) -> list[str]:
    """The directories that have none below them: making these makes all."""
    directories = {item.path for item in items if item.kind == "d"}
    inner = {os.path.dirname(path) for path in directories if path}
    return sorted(directories - inner)


def _read_whole(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


async def _blocks(file: BinaryIO, offset: int) -> AsyncIterator[bytes]:
    """The file from an offset on, each block read in a thread."""
    descriptor = file.fileno()
    while block := await asyncio.to_thread(os.pread, descriptor, WRITTEN_BYTES, offset):
        yield block
        offset += len(block)
