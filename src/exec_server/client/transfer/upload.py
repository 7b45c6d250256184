"""Upload: copies a file or a tree of this machine to the server's."""

from __future__ import annotations

import asyncio
import errno
import os
import posixpath
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import BinaryIO, Final

from exec_server.client.exceptions import NotADirectory, SandboxDenied
from exec_server.client.results import Stat, Transfer
from exec_server.client.transfer.batches import FILE_BYTES, FileBatch, for_each_batch
from exec_server.client.transfer.batches import write as write_batch
from exec_server.client.transfer.local_directory import pread
from exec_server.client.transfer.local_scan import scan, version
from exec_server.client.transfer.mirror import Extra, Item, check_not_root, extra_entries
from exec_server.client.transfer.open_file import WRITE_BYTES
from exec_server.client.transfer.plan import (
    CHANGED,
    SMALL_BYTES,
    SPECIAL,
    Tally,
    TreeCopy,
    for_each,
    join,
    part_path,
    replace,
    run_xargs,
)
from exec_server.client.transfer.remote_tree import RemoteTree
from exec_server.errors import (
    ConnectionLost,
    ExecServerError,
    InternalError,
    InvalidRequest,
    NotFound,
    RpcError,
    StdinClosed,
    Unsupported,
)

# Attempts for a large file after lost connections.
MAX_ATTEMPTS: Final = 5

_APPEND: Final = 'truncate -s "$2" "$1" && exec head -c "$3" >> "$1"'
# For an existing directory, `ln` would create the symlink inside of it.
_LINK: Final = """
if [ -d "$2" ] && [ ! -L "$2" ]; then echo "$2: Is a directory" >&2; exit 1; fi
ln -sfn -- "$1" "$2"
"""


class TreeUpload(TreeCopy):
    """The common part of uploads: directories, symlinks and modes on the server's machine."""

    async def _replace(
        self,
        items: list[Item],
        extra: Extra,
        source: str,
        target: str,
        fill: Callable[[list[Item], str, str], Awaitable[None]],
    ) -> Transfer:
        """Delete what is in the way, `fill` the target, delete what else is extra."""
        self._tally.expect(items)

        async def remove(item: Item) -> None:
            await self._files.remove(join(target, item.path))

        await self._delete(extra.in_the_way, remove)
        await fill(items, source, target)
        await self._delete_others(extra.others, remove)
        return self._tally.result(list(self._not_failed(items)))

    async def _make_directories(self, path: str, target: str) -> None:
        """Make a directory and all above it; if that fails, find the one that fails."""
        try:
            await self._files.mkdir(join(target, path), parents=True, exist_ok=True)
            return
        except (RpcError, SandboxDenied) as error:
            failure = error
        parts = path.split("/") if path else []
        for depth in range(len(parts)):
            above = "/".join(parts[:depth])
            if above in self._failed:
                return
            try:
                await self._files.mkdir(join(target, above), parents=True, exist_ok=True)
            except (RpcError, SandboxDenied) as error:
                self._fail(above, error)
                return
        self._fail(path, failure)

    async def _link(self, items: list[Item], target: str) -> None:
        arguments = [
            argument
            for item in items
            if item.kind == "l"
            for argument in (item.target, join(target, item.path))
        ]
        if arguments:
            await self._try("symlinks", ["-n", "2", "sh", "-c", _LINK, "sh"], arguments)

    async def _set_modes(self, items: list[Item], target: str) -> None:
        by_mode = defaultdict(list)
        for item in items:
            has_mode = item.mode is None or item.path in self._finished_modes
            if item.kind in "fd" and not has_mode:
                by_mode[item.mode].append(join(target, item.path))
        for mode, paths in by_mode.items():
            # Deepest first: the new mode of a directory may deny access to its entries.
            await self._try("modes", ["chmod", f"{mode:o}"], sorted(paths, reverse=True))

    async def _set_time(self, item: Item, target: str) -> None:
        """Set the modification time of a copy."""
        try:
            await self._files.touch(target, modified_ns=item.time_ns)
        except (RpcError, SandboxDenied) as error:
            self._tally.left_out.append(f"times: {error}")

    async def _try(self, subject: str, argv: list[str], arguments: list[str]) -> None:
        """Run a command for many arguments; a failure is noted in `left_out`."""
        try:
            result = await run_xargs(self._commands, argv, arguments, self._sandbox)
        except (RpcError, Unsupported) as error:
            self._tally.left_out.append(f"{subject}: {error}")
            return
        if not result:
            text = result.error_text.strip() or f"exit code {result.exit_code}"
            self._tally.left_out.append(f"{subject}: {text}")


class Upload(TreeUpload):
    """One upload."""

    async def copy(self, source: str, target: str) -> Transfer:
        """Copy the tree; raises OSError if its top cannot be read."""
        items = await asyncio.to_thread(scan, source, self._fail, self._filter)
        for item in items:
            if item.kind == "?":
                self._fail(item.path, OSError(errno.EINVAL, SPECIAL, join(source, item.path)))
        extra = await self._find_extra(items, target)
        items = list(self._not_failed(items))

        async def is_unchanged(item: Item) -> bool:
            return await self._is_unchanged(item, join(source, item.path), join(target, item.path))

        if self._options.dry_run:
            return await self._plan(items, extra, is_unchanged)
        return await self._replace(items, extra, source, target, self._fill)

    async def _find_extra(self, items: list[Item], target: str) -> Extra:
        """What the target has and the source has not; nothing unless it is to be deleted."""
        excluded = self._end_of_source()
        if not self._may_delete(is_directory=items[0].kind == "d"):
            return Extra.nothing(excluded)
        metadata = await self._stat_or_none(target)
        if metadata is None or not metadata.is_directory:
            return Extra.nothing(excluded)
        check_not_root(await self._files.realpath(target), target)
        tally = Tally(None)
        tree = RemoteTree(
            *(self._files, self._commands, self._sandbox, tally, tally.fail),
            session=self._batch_session,
        )
        existing = await tree.scan(target, self._filter, is_directory=True, needs_find=True)
        self._tally.left_out += (f"deletions: {each.error}" for each in tally.failed)
        return extra_entries(items, existing, self._kept(tally), excluded)

    async def _fill(self, items: list[Item], source: str, target: str) -> None:
        """Create all entries: directories, then files, then symlinks."""

        async def make(path: str) -> None:
            await self._make_directories(path, target)

        async def send(item: Item) -> None:
            here, there = join(source, item.path), join(target, item.path)
            await self._attempt(item, self._send_if_changed(item, here, there), here, there)

        await for_each(leaves(items), make)
        copied = await self._send_batches(source, target, items)
        files = (item for item in self._not_failed(items) if item.kind == "f")
        await for_each((item for item in files if item.path not in copied), send)
        items = list(self._not_failed(items))
        await self._link(items, target)
        await self._set_modes(items, target)
        if self._options.keep_times:
            for item in reversed([item for item in items if item.kind == "d"]):
                await self._set_time(item, join(target, item.path))

    async def _send_batches(self, source: str, target: str, items: list[Item]) -> set[str]:
        """Send small files together; returns the paths of those that were sent."""
        copied: set[str] = set()
        session = self._session
        if session is None:
            return copied

        async def send(batch: FileBatch) -> None:
            paths = [join(source, item.path) for item in batch.items]
            contents = await asyncio.to_thread(_read_small, paths)
            for position in await write_batch(session, batch, contents):
                item = batch.items[position]
                copied.add(item.path)
                if item.mode is not None:
                    self._finished_modes.add(item.path)
                self._copied(item, len(contents[position] or b""))

        await for_each_batch(self._not_failed(items), target, send)
        return copied

    async def _is_unchanged(self, item: Item, source: str, target: str) -> bool:
        if self._options.sync is None:
            return False
        existing = await self._stat_or_none(target)
        if item.kind == "d":
            return existing is not None and existing.is_directory and not existing.is_symlink
        # A mirror has no link in the place of a file.
        follows = existing is not None and not (self._options.delete and existing.is_symlink)
        is_file = existing is not None and existing.is_file and follows
        known = (existing.size, existing.modified) if existing is not None and is_file else None
        return await self._is_equal(item, known, source, target)

    async def _send_if_changed(self, item: Item, source: str, target: str) -> None:
        if await self._is_unchanged(item, source, target):
            self._tally.skip(item.path, item.size)
            return
        await self._send(item, source, target)
        if self._options.keep_times:
            await self._set_time(item, target)

    async def _send(self, item: Item, source: str, target: str) -> None:
        if item.size > SMALL_BYTES:
            async with self._large:
                await self._send_large(item, source, target)
            return
        data = await asyncio.to_thread(_read_whole, source)
        await self._files.write(target, data)
        self._tally.advance(item.path, len(data))

    async def _send_large(self, item: Item, source: str, target: str) -> None:
        existing = await self._stat_or_none(target)
        if existing is not None and existing.is_directory:
            raise InvalidRequest(f"{target}: Is a directory")
        if existing is not None and existing.is_symlink:
            target = await self._files.realpath(target)
        part = part_path(target, item)
        with await _open_in_thread(source) as file:
            offset = await self._resumable(file, part, item)
            self._tally.resume(item.path, offset)
            for attempt in range(1, MAX_ATTEMPTS + 1):
                try:
                    if offset:
                        await self._append(file, part, item, offset)
                    else:
                        await self._write(file, part, item)
                    break
                except _Interrupted as interruption:
                    if attempt == MAX_ATTEMPTS:
                        raise ConnectionLost(f"{target}: {interruption}") from None
                    offset = interruption.reached
            if version(os.fstat(file.fileno())) != item.modified:
                await self._files.remove(part, missing_ok=True)
                raise OSError(errno.EBUSY, CHANGED, source)
        await self._finish(part, target, item)

    async def _stat_or_none(self, path: str) -> Stat | None:
        try:
            return await self._files.stat(path)
        except (NotFound, NotADirectory):
            return None

    async def _resumable(self, file: BinaryIO, part: str, item: Item) -> int:
        """The number of correct bytes that an earlier attempt has copied."""
        try:
            size = (await self._files.stat(part)).size
        except NotFound:
            return 0
        if not 0 < size <= item.size:
            return 0
        return size if await self._has_same_start(part, file.fileno(), size) else 0

    async def _write(self, file: BinaryIO, part: str, item: Item) -> None:
        writer = self._files.open(part, "wb", in_place=True)
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
        """Append the rest by a process, because an open file starts at offset 0."""
        argv = ["/bin/sh", "-c", _APPEND, "sh", part, str(offset), str(item.size - offset)]
        sent = 0
        try:
            async with self._commands.start(argv, stdin=True, sandbox=self._sandbox) as process:
                async for block in _blocks(file, offset):
                    await process.write(block)
                    sent += len(block)
                    self._tally.advance(item.path, len(block))
                if await process.wait():
                    raise InternalError("the rest of the file cannot be appended")
        except (RpcError, StdinClosed, UnicodeEncodeError, Unsupported) as error:
            self._tally.advance(item.path, -offset - sent)
            raise _Interrupted(0, str(error)) from None

    async def _finish(self, part: str, target: str, item: Item) -> None:
        """Give a complete file its name and its mode, with one command if possible."""
        has_mode = await replace(
            self._files, self._commands, self._sandbox, (part, target), mode=item.mode
        )
        if has_mode:
            self._finished_modes.add(item.path)


class _Interrupted(ExecServerError):
    """A file is incomplete; its first `reached` bytes were copied."""

    def __init__(self, reached: int, reason: str) -> None:
        super().__init__(reason)
        self.reached = reached


def leaves(items: list[Item]) -> list[str]:
    """The directories without directories below them: making these makes all."""
    directories = {item.path for item in items if item.kind == "d"}
    inner = {posixpath.dirname(path) for path in directories if path}
    return sorted(directories - inner)


def _read_small(paths: list[str]) -> list[bytes | None]:
    """The contents of small files; None for a file that cannot be read, or has grown."""
    contents: list[bytes | None] = []
    for path in paths:
        try:
            with open(path, "rb", buffering=0) as file:
                data = file.read(FILE_BYTES + 1)
        except OSError:
            data = None
        is_whole = data is not None and len(data) <= FILE_BYTES
        contents.append(data if is_whole else None)
    return contents


def _read_whole(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


async def _open_in_thread(path: str) -> BinaryIO:
    loop = asyncio.get_running_loop()
    opening: asyncio.Future[BinaryIO] = loop.run_in_executor(None, _open_local, path)
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        # The thread goes on, and nothing else would close the file that it opens.
        opening.add_done_callback(_close_opened)
        raise


def _open_local(path: str) -> BinaryIO:
    return open(path, "rb")


def _close_opened(opening: asyncio.Future[BinaryIO]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


async def _blocks(file: BinaryIO, offset: int) -> AsyncIterator[bytes]:
    """The blocks of a file from an offset on, each read in a thread."""
    descriptor = file.fileno()
    while block := await asyncio.to_thread(pread, descriptor, WRITE_BYTES, offset):
        yield block
        offset += len(block)
