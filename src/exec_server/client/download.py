"""Download: a file or a tree of the server's machine to this one.

The server need not be trusted with more than the directory it is copied to: names that lead out
of it are refused, nothing is written through a link, and links are made last.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from typing import Final

from exec_server.client.results import Result, Transfer
from exec_server.client.transfer import (
    CHANGED,
    MAX_ENTRIES,
    SMALL_BYTES,
    SPECIAL,
    Item,
    TreeCopy,
    below,
    each,
    part_path,
)
from exec_server.errors import InvalidRequest, RpcError

# Kind, mode, size, time, path and target of a link, each ended by NUL.
_FORMAT: Final = "%y\\0%m\\0%s\\0%T@\\0%P\\0%l\\0"
_FIELDS: Final = 6
_THROUGH: Final = "it is a link, and nothing is written through one"
# What find says about something that it cannot read.
_COMPLAINT: Final = re.compile(r"[^:]*find: ['\u2018](.*)['\u2019]: (.*)")


class Download(TreeCopy):
    """One download."""

    async def copy(self, source: str, target: str) -> Transfer:
        """Copy it; raises OSError if the top cannot be written here."""
        top = await self._files.stat(source)  # NotFound is the plainest way to say so
        items = await self._scan(source, is_directory=top.is_directory)
        _check_paths(items)
        for item in items:
            if item.kind not in "fdl":
                error = InvalidRequest(f"{below(source, item.path)}: {SPECIAL}")
                self._fail(item.path, error)
        items = self._left(items)
        self._tally.expect(items)
        directories = [item.path for item in items if item.kind == "d"]
        await asyncio.to_thread(_make_directories, target, directories, self._fail)

        async def fetch(item: Item) -> None:
            there, here = below(source, item.path), below(target, item.path)
            await self._attempt(item, self._fetch(item, there, here), here, there)

        await each((item for item in self._left(items) if item.kind == "f"), fetch)
        await asyncio.to_thread(_make_links, target, self._left(items), self._fail)
        items = self._left(items)
        self._tally.left_out += await asyncio.to_thread(_set_modes, target, items)
        return self._tally.result(items)

    # ---- what there is ----------------------------------------------------------------

    async def _scan(self, source: str, *, is_directory: bool) -> list[Item]:
        words = ["find", "-H", source, "-printf", _FORMAT]
        try:
            found = await self._commands.run(
                words, cwd="/", env={"LC_ALL": "C"}, sandbox=self._sandbox
            )
        except (RpcError, UnicodeEncodeError):
            found = None
        if found is None or not found.stdout:
            return await self._scan_plainly(source, is_directory=is_directory)
        if not found:
            self._note_complaints(source, found)
        if found.lost_bytes or found.stdout.count(b"\0") > MAX_ENTRIES * _FIELDS:
            raise InvalidRequest(f"{source}: more than {MAX_ENTRIES} entries")
        return list(_parse(found.stdout))

    def _note_complaints(self, source: str, found: Result) -> None:
        """What find could not look at; what it has found there all the same is copied."""
        for line in os.fsdecode(found.stderr).splitlines():
            match = _COMPLAINT.fullmatch(line)
            path, reason = match.groups() if match else (source, line)
            error = InvalidRequest(f"{path}: {reason}")
            if path == source and found.stdout.count(b"\0") <= _FIELDS:
                raise error  # there is nothing else
            self._tally.fail(path.removeprefix(source).lstrip("/"), error)

    async def _scan_plainly(self, source: str, *, is_directory: bool) -> list[Item]:
        """Without the commands: neither modes nor links."""
        if not is_directory:
            return [await self._look(source, "")]
        self._tally.left_out.append("modes and links: the machine has no GNU find")
        items = [Item("", "d", None, 0, "")]
        prefix = source.rstrip("/") + "/"

        def note(error: RpcError) -> None:
            path = error.message.partition(": ")[0]
            self._tally.fail(path.removeprefix(prefix), error)

        async for entry in self._files.walk(source, on_error=note):
            path = entry.path.removeprefix(prefix)
            if entry.is_directory:
                items.append(Item(path, "d", None, 0, ""))
                continue
            try:
                items.append(await self._look(entry.path, path))
            except RpcError as error:
                self._fail(path, error)
            if len(items) > MAX_ENTRIES:
                raise InvalidRequest(f"{source}: more than {MAX_ENTRIES} entries")
        return items

    async def _look(self, source: str, path: str) -> Item:
        found = await self._files.stat(source)
        kind = "f" if found.is_file else "?"
        return Item(path, kind, None, found.size, str(found.modified))

    # ---- content ----------------------------------------------------------------------

    async def _fetch(self, item: Item, source: str, target: str) -> None:
        part = part_path(target, item)
        if item.size > SMALL_BYTES:
            async with self._large:
                await self._fetch_large(item, source, part)
            await asyncio.to_thread(_rename, part, target, item.mode)
            return
        data = await self._files.read(source)
        await asyncio.to_thread(_write_whole, part, target, data, item.mode)
        self._tally.advance(item.path, len(data))

    async def _fetch_large(self, item: Item, source: str, part: str) -> None:
        file = _Part(part, item.mode)
        try:
            await asyncio.to_thread(file.open)
            offset = await self._resumable(file.descriptor, source, item)
            self._tally.resume(item.path, offset)
            async with self._files.open(source, offset=offset) as reader:
                async for block in reader:
                    await asyncio.to_thread(file.write, block, offset)
                    offset += len(block)
                    self._tally.advance(item.path, len(block))
                is_same = offset == item.size and not await reader.is_changed()
        finally:
            file.close()
        if not is_same:
            with contextlib.suppress(FileNotFoundError):
                await asyncio.to_thread(os.unlink, part)
            raise InvalidRequest(f"{source}: {CHANGED}")

    async def _resumable(self, descriptor: int, source: str, item: Item) -> int:
        """How much of the file is here from an earlier attempt, and right; the rest is cut off."""
        size = os.fstat(descriptor).st_size
        if 0 < size <= item.size and await self._is_same(source, descriptor, size):
            return size
        os.ftruncate(descriptor, 0)
        return 0


def _parse(listing: bytes) -> Iterator[Item]:
    fields = os.fsdecode(listing).split("\0")
    for start in range(0, len(fields) - _FIELDS, _FIELDS):
        kind, mode, size, modified, path, target = fields[start : start + _FIELDS]
        yield Item(path, kind, int(mode, 8) & 0o777, int(size), modified, target)


def _check_paths(items: list[Item]) -> None:
    """Refuse what would lead out of the tree, or through something that is not of it."""
    directories = {item.path for item in items if item.kind == "d"}
    for item in items:
        parts = item.path.split("/")
        if item.path and (
            any(part in ("", ".", "..") for part in parts)
            or "/".join(parts[:-1]) not in directories
        ):
            raise InvalidRequest(f"the server names a path that leads elsewhere: {item.path!r}")


# ---- this machine, in threads ---------------------------------------------------------


def _make_directories(top: str, paths: list[str], fail: Callable[[str, OSError], None]) -> None:
    """Make them, each before those below it; `fail` gets what cannot be, and raises at the top."""
    gone: set[str] = set()
    for path in paths:
        if path and os.path.dirname(path) in gone:
            gone.add(path)
            continue
        directory = below(top, path)
        try:
            if path and os.path.islink(directory):
                raise OSError(errno.ELOOP, _THROUGH, directory)
            os.makedirs(directory, exist_ok=True)
        except OSError as error:
            gone.add(path)
            fail(path, error)


def _write_whole(part: str, target: str, data: bytes, mode: int | None) -> None:
    """A small file, complete at once; nothing is left of one that cannot be written."""
    descriptor = _open_part(part, mode)
    try:
        try:
            os.ftruncate(descriptor, 0)
            _write_all(descriptor, data, 0)
        finally:
            os.close(descriptor)
        _rename(part, target, mode)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
        raise


class _Part:
    """A large file until it is complete.

    A thread may still be opening or writing it when whoever waits for that is cancelled; the lock
    is so that it is closed all the same, and that nothing goes to a descriptor of somebody else.
    """

    def __init__(self, path: str, mode: int | None) -> None:
        self._path = path
        self._mode = mode
        self._lock = threading.Lock()
        self._is_closed = False
        self.descriptor = -1

    def open(self) -> None:
        with self._lock:
            if not self._is_closed:
                self.descriptor = _open_part(self._path, self._mode)

    def write(self, data: bytes, offset: int) -> None:
        with self._lock:
            if not self._is_closed:
                _write_all(self.descriptor, data, offset)

    def close(self) -> None:
        """Close it; it is removed if there is nothing to go on with."""
        with self._lock:
            self._is_closed = True
            if self.descriptor >= 0:
                if not os.fstat(self.descriptor).st_size:
                    os.unlink(self._path)
                os.close(self.descriptor)


def _open_part(part: str, mode: int | None) -> int:
    """A file that gets a mode of its own at last is not for others before."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(part, flags, 0o666 if mode is None else 0o600)


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written


def _rename(part: str, target: str, mode: int | None) -> None:
    """Give a complete file its mode and its name."""
    if mode is not None:
        os.chmod(part, mode)
    if os.path.isdir(target) and not os.path.islink(target):
        os.unlink(part)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
    os.replace(part, target)


def _make_links(top: str, items: list[Item], fail: Callable[[str, OSError], None]) -> None:
    for item in items:
        if item.kind == "l":
            path = below(top, item.path)
            try:
                with contextlib.suppress(FileNotFoundError):
                    if not stat.S_ISDIR(os.lstat(path).st_mode):
                        os.unlink(path)
                os.symlink(item.target, path)
            except OSError as error:
                fail(item.path, OSError(error.errno, error.strerror, path))


def _set_modes(top: str, items: list[Item]) -> list[str]:
    """The modes of directories, which may forbid to write there, deepest first; what cannot be."""
    left_out = []
    for item in sorted(items, key=lambda item: item.path, reverse=True):
        if item.kind == "d" and item.mode is not None:
            path = below(top, item.path)
            try:
                os.chmod(path, item.mode)
            except OSError as error:
                left_out.append(f"modes: {path}: {error.strerror}")
    return left_out
