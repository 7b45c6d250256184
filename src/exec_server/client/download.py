"""Download: a file or a tree of the server's machine to this one.

The server need not be trusted with more than the directory it is copied to: names that lead out
of it are refused, nothing is written through a link, and links are made last.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import Final

from exec_server.client.results import Transfer
from exec_server.client.transfer import (
    MAX_ENTRIES,
    SMALL_BYTES,
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


class Download(TreeCopy):
    """One download."""

    async def copy(self, source: str, target: str) -> Transfer:
        """Copy it; raises OSError for what cannot be written here."""
        top = await self._files.stat(source)  # NotFound is the plainest way to say so
        items = await self._scan(source, is_directory=top.is_directory)
        self._tally.expect(items)
        _check_paths(items)
        for item in items:
            if item.kind not in "fdl":
                self._tally.left_out.append(f"{item.path}: neither file, directory nor link")
        directories = [item for item in items if item.kind == "d"]
        await asyncio.to_thread(_make_directories, target, [item.path for item in directories])

        async def fetch(item: Item) -> None:
            await self._fetch(item, below(source, item.path), below(target, item.path))
            self._tally.finish(item.path)

        await each((item for item in items if item.kind == "f"), fetch)
        await asyncio.to_thread(_finish_tree, target, items)
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
        self._tally.left_out += [line for line in found.error_text.splitlines() if line.strip()]
        if found.lost_bytes or found.stdout.count(b"\0") > MAX_ENTRIES * _FIELDS:
            raise InvalidRequest(f"{source}: more than {MAX_ENTRIES} entries")
        return list(_parse(found.stdout))

    async def _scan_plainly(self, source: str, *, is_directory: bool) -> list[Item]:
        """Without the commands: neither modes nor links."""
        if not is_directory:
            return [await self._look(source, "")]
        self._tally.left_out.append("modes and links: the machine has no GNU find")
        items = [Item("", "d", None, 0, "")]
        prefix = source.rstrip("/") + "/"
        async for entry in self._files.walk(source):
            path = entry.path.removeprefix(prefix)
            if entry.is_directory:
                items.append(Item(path, "d", None, 0, ""))
            else:
                items.append(await self._look(entry.path, path))
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
        else:
            data = await self._files.read(source)
            await asyncio.to_thread(_write_whole, part, data, item.mode)
            self._tally.advance(item.path, len(data))
        await asyncio.to_thread(_rename, part, target, item.mode)

    async def _fetch_large(self, item: Item, source: str, part: str) -> None:
        descriptor = await asyncio.to_thread(_open_part, part, item.mode)
        try:
            offset = os.fstat(descriptor).st_size
            if offset > item.size:
                offset = 0
                os.ftruncate(descriptor, 0)
            self._tally.resume(item.path, offset)
            async with self._files.open(source, offset=offset) as reader:
                async for block in reader:
                    await asyncio.to_thread(_write_all, descriptor, block, offset)
                    offset += len(block)
                    self._tally.advance(item.path, len(block))
        finally:
            os.close(descriptor)
        if offset != item.size:
            await asyncio.to_thread(os.unlink, part)
            raise InvalidRequest(f"{source}: it was changed while it was copied")


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


def _make_directories(top: str, paths: list[str]) -> None:
    for path in paths:
        directory = below(top, path)
        if path and os.path.islink(directory):
            raise InvalidRequest(f"{directory}: it is a link, and nothing is written through one")
        os.makedirs(directory, exist_ok=True)


def _write_whole(part: str, data: bytes, mode: int | None) -> None:
    descriptor = _open_part(part, mode)
    try:
        os.ftruncate(descriptor, 0)
        _write_all(descriptor, data, 0)
    finally:
        os.close(descriptor)


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


def _finish_tree(top: str, items: list[Item]) -> None:
    """Links, and then the modes of directories, which may forbid to write there; deepest first."""
    for item in items:
        if item.kind == "l":
            path = below(top, item.path)
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISDIR(os.lstat(path).st_mode):
                    os.unlink(path)
            os.symlink(item.target, path)
    for item in sorted(items, key=lambda item: item.path, reverse=True):
        if item.kind == "d" and item.mode is not None:
            os.chmod(below(top, item.path), item.mode)
