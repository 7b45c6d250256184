"""Download: copies a file or a tree of the server's machine to this one.

A malicious server can change nothing but the entries of the target: Listing checks the tree that it
describes, and LocalTree follows no symlink. Symlinks are created last.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import posixpath
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Final

from exec_server.client.commands import SystemCommands
from exec_server.client.engine.session import ClientSession
from exec_server.client.results import Progress, Transfer
from exec_server.client.transfer.batches import FileBatch, for_each_batch
from exec_server.client.transfer.batches import read as read_batch
from exec_server.client.transfer.local_directory import Directory, pwrite, set_file_mode
from exec_server.client.transfer.local_scan import scan
from exec_server.client.transfer.mirror import Extra, Item, check_not_root, extra_entries
from exec_server.client.transfer.plan import (
    CHANGED,
    SMALL_BYTES,
    SPECIAL,
    CopyOptions,
    RemoteFiles,
    Tally,
    TreeCopy,
    for_each,
    join,
    part_path,
)
from exec_server.client.transfer.remote_tree import Listing, RemoteTree, folded
from exec_server.errors import InvalidRequest
from exec_server.protocol.sandbox import Sandbox

# Directories that are known to have no entries but those of this download: some megabytes. In
# others, an entry is looked up before it is replaced.
NEW_DIRECTORIES: Final = 65_536

# Whether an entry of another spelling may be the very file that was copied.
IGNORES_CASE: Final = sys.platform in ("darwin", "win32")

_SAME_NAME: Final = "another entry of the tree has the same name on this file system"

# A small file may have grown since it was listed. Its content is one answer.
MAX_GROWN_BYTES: Final = 2 * SMALL_BYTES


class LocalTree:
    """A file or directory to create; paths of items are relative to it, and "" is the top.

    The server chooses names, and perhaps symlinks of an earlier download. So every entry is reached
    from a descriptor of the caller's directory, component by component: a link that is in the way,
    or is put there at any moment, is an error or is replaced, and never written through. Blocking.
    """

    def __init__(
        self,
        top: str,
        *,
        is_directory: bool,
        is_ambiguous: Callable[[str], bool] = lambda path: False,
    ) -> None:
        """The last component of `top` is not followed either, unless a slash or dot is after it.

        `is_ambiguous` tells whether a path may have the same name as another one here.
        """
        self._top = top
        self._is_directory = is_directory
        self._is_ambiguous = is_ambiguous
        self._lock = threading.Lock()  # guards `_root`: threads go on after a cancellation
        self._root: Directory | None = None
        self._is_closed = False
        self._name = ""
        self._ambiguous: set[tuple[int, int]] = set()  # device and inode of placed files
        self._new_directories: set[str] = set()  # made by this download

    def open(self) -> None:
        """Open the directory of the top, which is created for a tree; raises OSError."""
        directory, self._name = _split(self._top)
        with self._named(""), self._lock:
            if self._is_closed:
                return
            if self._is_directory:
                os.makedirs(directory, exist_ok=True)
            self._root = Directory.open(directory)

    def close(self) -> None:
        """Close the directory; a thread that is still at work gets ECANCELED."""
        with self._lock:
            self._is_closed = True
            if self._root is not None:
                self._root.close()
            self._root = None

    def make_directories(self, items: Iterator[Item], fail: Callable[[str, OSError], None]) -> None:
        """Make directories from the top down; `fail` is called for errors, and may raise them."""
        failed: set[str] = set()
        for item in items:
            if item.path and posixpath.dirname(item.path) in failed:
                failed.add(item.path)
                continue
            try:
                self._make_directory(item.path)
            except OSError as error:
                failed.add(item.path)
                fail(item.path, error)

    def _make_directory(self, path: str) -> None:
        with self._named(path), self._parent(path) as (directory, name):
            try:
                directory.make_directory(name)
            except FileExistsError as exists:
                try:
                    directory.child(name).close()
                except NotADirectoryError:
                    raise exists from None
            else:
                if len(self._new_directories) < NEW_DIRECTORIES:
                    self._new_directories.add(path)

    def write_file(self, item: Item, data: bytes) -> None:
        """Write a small file; its temporary file is removed if that fails."""
        with self._named(item.path), self._parent(item.path) as (directory, name):
            self._write(directory, name, item, data)

    def write_files(self, files: Sequence[tuple[Item, bytes | memoryview]]) -> list[Item]:
        """Write small files that may be of one directory; returns those that are written."""
        written = []
        for path, group in groupby(files, lambda file: file[0].path.rpartition("/")[0]):
            together = list(group)
            try:
                with self._parent(together[0][0].path) as (directory, _):
                    is_new = path in self._new_directories
                    for item, data in together:
                        name = item.path.rpartition("/")[2]
                        try:
                            self._write(directory, name, item, data, is_new=is_new)
                        except OSError:
                            continue
                        written.append(item)
            except OSError:
                continue  # the directory is gone
        return written

    def _write(
        self,
        directory: Directory,
        name: str,
        item: Item,
        data: bytes | memoryview,
        *,
        is_new: bool = False,
    ) -> None:
        """Write a file; `is_new` saves system calls if only this download fills the directory."""
        part = part_path(name, item)
        try:
            descriptor = directory.create_part(part, item.mode)
        except FileExistsError:  # an attempt was killed, or its computer stopped
            descriptor = directory.open_part(part, item.mode)
            os.ftruncate(descriptor, 0)
        try:
            try:
                _write_all(descriptor, data, 0)
                inode = self._finish(descriptor, item)
            finally:
                os.close(descriptor)
            if not is_new or inode is not None:
                self._check_place(directory, name)
            directory.replace(part, name)
            if inode is not None:
                self._ambiguous.add(inode)
        except OSError:
            directory.remove(part)
            raise

    def open_part(self, item: Item) -> int:
        """A descriptor of the temporary file of a large file; the caller closes it."""
        with self._named(item.path), self._parent(item.path) as (directory, name):
            return directory.open_part(part_path(name, item), item.mode)

    def place_part(self, item: Item) -> None:
        """Give a complete temporary file its mode and its name, or remove it."""
        with self._named(item.path), self._parent(item.path) as (directory, name):
            part = part_path(name, item)
            descriptor = directory.open_part(part, item.mode)
            try:
                try:
                    inode = self._finish(descriptor, item)
                finally:
                    os.close(descriptor)
                self._check_place(directory, name)
                directory.replace(part, name)  # Windows does that only after it was closed
                if inode is not None:
                    self._ambiguous.add(inode)
            except OSError:
                directory.remove(part)
                raise

    def remove_part(self, item: Item) -> None:
        """Remove a temporary file, if there is one."""
        with self._named(item.path), self._parent(item.path) as (directory, name):
            directory.remove(part_path(name, item))

    def remove(self, item: Item) -> None:
        """Remove an entry that is there, or an empty directory."""
        with self._named(item.path), self._parent(item.path) as (directory, name):
            if item.kind == "d":
                directory.remove_directory(name)
            else:
                directory.remove(name)

    def make_symlinks(self, items: Iterator[Item], fail: Callable[[str, OSError], None]) -> None:
        """Make symlinks, which replace files and other symlinks; `fail` is called for errors."""
        for item in items:
            try:
                with self._named(item.path), self._parent(item.path) as (directory, name):
                    # symlink(2) reports these errors.
                    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                        _check_replaceable(name, directory)
                        directory.remove(name)
                    directory.make_symlink(item.target, name)
            except OSError as error:
                fail(item.path, error)

    def set_modes(self, items: Iterator[Item]) -> list[str]:
        """Set the modes of directories; returns the errors."""
        errors = []
        for item in items:
            if item.mode is None:
                continue
            try:
                with self._named(item.path), self._parent(item.path) as (directory, name):
                    directory.set_mode(name, item.mode)
            except OSError as error:
                errors.append(f"modes: {error.filename}: {error.strerror}")
        return errors

    def _finish(self, descriptor: int, item: Item) -> tuple[int, int] | None:
        """Give a complete file its mode; returns its inode if another path may lead to it here."""
        if item.mode is not None:
            set_file_mode(descriptor, item.mode)
        if not self._is_ambiguous(item.path):
            return None
        info = os.fstat(descriptor)
        return info.st_dev, info.st_ino

    def _check_place(self, directory: Directory, name: str) -> None:
        """Refuse to replace an entry by a file, if it must stay."""
        try:
            metadata = _check_replaceable(name, directory)
        except FileNotFoundError:
            return
        if (metadata.st_dev, metadata.st_ino) in self._ambiguous:
            raise FileExistsError(errno.EEXIST, _SAME_NAME)

    @contextmanager
    def _parent(self, path: str) -> Iterator[tuple[Directory, str]]:
        """The open directory of an entry, and the entry's name in it."""
        with self._lock:
            if self._root is None:
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
            directory = self._root.duplicate()
        try:
            names = [self._name, *path.split("/")] if path else [self._name]
            for name in names[:-1]:
                below = directory.child(name)
                directory.close()
                directory = below
            yield directory, names[-1]
        finally:
            directory.close()

    @contextmanager
    def _named(self, path: str) -> Iterator[None]:
        """Give errors the whole path of the entry."""
        try:
            yield
        except OSError as error:
            whole = join(self._top, path)
            raise OSError(error.errno, error.strerror or str(error), whole) from None


def _split(top: str) -> tuple[str, str]:
    """The directory of the top, and the name of the top in it."""
    directory, name = os.path.split(top)
    if not name and not os.path.isdir(top):
        directory, name = os.path.split(top.rstrip("/" + os.sep))
    if name in ("", ".", ".."):
        return top, "."
    return directory or ".", name


def _check_replaceable(name: str, directory: Directory) -> os.stat_result:
    """Refuse to replace a directory or a device, also one that a link leads to."""
    metadata = directory.lstat(name)
    if stat.S_ISDIR(metadata.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    kind = metadata.st_mode
    if stat.S_ISLNK(kind):
        with contextlib.suppress(OSError):
            kind = directory.stat(name).st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISLNK(kind) or stat.S_ISDIR(kind)):
        raise OSError(errno.EINVAL, SPECIAL)
    return metadata


def _write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    written = pwrite(descriptor, data, offset)
    while written < len(data):
        written += pwrite(descriptor, memoryview(data)[written:], offset + written)


class Part:
    """The open temporary file of a large file.

    A thread may still open or write the file after its caller was cancelled. The lock makes sure
    that the file is closed then, and that no write uses a descriptor that was opened elsewhere.
    """

    def __init__(self, tree: LocalTree, item: Item) -> None:
        self._tree = tree
        self._item = item
        self._lock = threading.Lock()
        self._is_closed = False
        self.descriptor = -1

    def open(self) -> None:
        with self._lock:
            if not self._is_closed:
                self.descriptor = self._tree.open_part(self._item)

    def write(self, data: bytes, offset: int) -> None:
        with self._lock:
            if not self._is_closed:
                _write_all(self.descriptor, data, offset)

    def close(self) -> None:
        """Close the file, and remove it if it is empty."""
        with self._lock:
            self._is_closed = True
            if self.descriptor >= 0:
                is_empty = not os.fstat(self.descriptor).st_size
                os.close(self.descriptor)
                self.descriptor = -1
                if is_empty:
                    self._tree.remove_part(self._item)


class Download(TreeCopy):
    """One download."""

    def __init__(
        self,
        files: RemoteFiles,
        commands: SystemCommands,
        progress: Callable[[Progress], None] | None,
        sandbox: Sandbox | None,
        options: CopyOptions | None = None,
        *,
        session: ClientSession | None = None,
    ) -> None:
        super().__init__(files, commands, progress, sandbox, options, session=session)
        self._tree = RemoteTree(files, commands, sandbox, self._tally, self._fail, session=session)

    async def copy(self, source: str, target: str) -> Transfer:
        """Copy the tree; raises OSError if its top cannot be written."""
        metadata = await self._files.stat(source)  # raises NotFound, the clearest error
        listing = await self._tree.scan(
            *(source, self._filter),
            is_directory=metadata.is_directory,
            needs_find=self._options.delete,
        )
        top = next(iter(listing))
        if top.kind == "l":  # the server has followed it before
            raise InvalidRequest(f"{source}: {CHANGED}")
        for item in listing.of_kind("".join(set(listing.kinds) - set("fdl"))):
            error = InvalidRequest(f"{join(source, item.path)}: {SPECIAL}")
            self._fail(item.path, error)
        extra = await self._find_extra(listing, target, is_directory=top.kind == "d")

        async def is_unchanged(item: Item) -> bool:
            return await self._is_unchanged(item, join(target, item.path), join(source, item.path))

        if self._options.dry_run:
            return await self._plan(self._not_failed(listing), extra, is_unchanged)
        self._tally.expect(self._not_failed(listing.of_kind("f")))
        tree = LocalTree(target, is_directory=top.kind == "d", is_ambiguous=listing.is_ambiguous)

        async def remove(item: Item) -> None:
            await asyncio.to_thread(tree.remove, item)

        try:
            await asyncio.to_thread(tree.open)
            await self._delete(extra.in_the_way, remove)
            await self._fill(tree, listing, source, target)
            await self._delete_others(extra.others, remove)
        finally:
            tree.close()
        return self._tally.result(self._not_failed(listing.of_kind("dl")))

    async def _find_extra(self, listing: Listing, target: str, *, is_directory: bool) -> Extra:
        """What the target has and the source has not; nothing unless it is to be deleted."""
        excluded = self._end_of_source()
        is_possible = self._may_delete(is_directory=is_directory)
        if not is_possible or not await asyncio.to_thread(os.path.isdir, target):
            return Extra.nothing(excluded)
        check_not_root(await asyncio.to_thread(os.path.realpath, target), target)
        tally = Tally(None)
        existing = await asyncio.to_thread(scan, target, tally.fail, self._filter)
        self._tally.left_out += (f"deletions: {each.error}" for each in tally.failed)
        if IGNORES_CASE:
            paths = {item.path for item in listing}
            names = set(map(folded, paths))
            existing = [
                item for item in existing if item.path in paths or folded(item.path) not in names
            ]
        return extra_entries(listing, existing, self._kept(tally), excluded)

    async def _fill(self, tree: LocalTree, listing: Listing, source: str, target: str) -> None:
        """Create all entries: directories, then files, then symlinks."""
        directories = self._not_failed(listing.of_kind("d"))
        await asyncio.to_thread(tree.make_directories, directories, self._fail)

        async def fetch(item: Item) -> None:
            there, here = join(source, item.path), join(target, item.path)
            await self._attempt(item, self._fetch_if_changed(tree, item, here, there), here, there)

        copied = await self._fetch_batches(tree, listing, source)
        if len(copied) < self._tally.total_files:
            files = self._not_failed(listing.of_kind("f"))
            await for_each((item for item in files if item.path not in copied), fetch)
        links = self._not_failed(listing.of_kind("l"))
        await asyncio.to_thread(tree.make_symlinks, links, self._fail)
        # Deepest first: the new mode of a directory may deny access to its entries.
        directories = self._not_failed(listing.of_kind("d", deepest_first=True))
        self._tally.left_out += await asyncio.to_thread(tree.set_modes, directories)
        if self._options.keep_times:
            for item in self._not_failed(listing.of_kind("d", deepest_first=True)):
                await asyncio.to_thread(_set_time, join(target, item.path), item.time_ns)

    async def _fetch_batches(self, tree: LocalTree, listing: Listing, source: str) -> set[str]:
        """Fetch small files together; returns the paths of those that were fetched."""
        copied: set[str] = set()
        session = self._session
        if session is None:
            return copied

        # One thread writes: several would wait for the interpreter more than for the disk.
        writing = asyncio.Lock()

        async def fetch(batch: FileBatch) -> None:
            contents = await read_batch(session, batch)
            read = zip(batch.items, contents, strict=True)
            files = [(item, content) for item, content in read if content is not None]
            sizes = {item.path: len(content) for item, content in files}
            async with writing:
                written = await asyncio.to_thread(tree.write_files, files)
            for item in written:
                copied.add(item.path)
                self._copied(item, sizes[item.path])

        await for_each_batch(self._not_failed(listing.of_kind("f")), source, fetch)
        return copied

    async def _is_unchanged(self, item: Item, target: str, source: str) -> bool:
        if self._options.sync is None:
            return False
        if item.kind == "d":
            return await asyncio.to_thread(_is_own_directory, target)
        existing = await asyncio.to_thread(_size_and_time, target)
        return await self._is_equal(item, existing, target, source)

    async def _fetch_if_changed(
        self, tree: LocalTree, item: Item, target: str, source: str
    ) -> None:
        if await self._is_unchanged(item, target, source):
            self._tally.skip(item.path, item.size)
            return
        await self._fetch(tree, item, source)
        if self._options.keep_times:
            await asyncio.to_thread(_set_time, target, item.time_ns)

    async def _fetch(self, tree: LocalTree, item: Item, source: str) -> None:
        if item.size > SMALL_BYTES:
            async with self._large:
                await self._fetch_large(tree, item, source)
            await asyncio.to_thread(tree.place_part, item)
            return
        data = await self._files.read(source, limit=MAX_GROWN_BYTES)
        await asyncio.to_thread(tree.write_file, item, data)
        self._tally.advance(item.path, len(data))

    async def _fetch_large(self, tree: LocalTree, item: Item, source: str) -> None:
        part = Part(tree, item)
        try:
            await asyncio.to_thread(part.open)
            offset = await self._resumable(part.descriptor, source, item)
            self._tally.resume(item.path, offset)
            async with self._files.open(source, offset=offset) as reader:
                async for block in reader:
                    offset += len(block)
                    if offset > item.size:
                        break
                    await asyncio.to_thread(part.write, block, offset - len(block))
                    self._tally.advance(item.path, len(block))
                is_same = offset == item.size and not await reader.is_changed()
        finally:
            part.close()
        if not is_same:
            await asyncio.to_thread(tree.remove_part, item)
            raise InvalidRequest(f"{source}: {CHANGED}")

    async def _resumable(self, descriptor: int, source: str, item: Item) -> int:
        """The number of correct bytes of an earlier attempt; a wrong file is truncated."""
        size = os.fstat(descriptor).st_size
        if 0 < size <= item.size and await self._has_same_start(source, descriptor, size):
            return size
        os.ftruncate(descriptor, 0)
        return 0


def _size_and_time(path: str) -> tuple[int, float] | None:
    """The size and time of a regular file of this machine; None if there is none."""
    try:
        info = os.lstat(path)
    except OSError:
        return None
    return (info.st_size, info.st_mtime) if stat.S_ISREG(info.st_mode) else None


def _is_own_directory(path: str) -> bool:
    """Whether it is a directory of this machine, and no link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _set_time(path: str, modified_ns: int) -> None:
    """Set the modification time of an entry that was copied, and not of a link's target."""
    follow = os.utime not in os.supports_follow_symlinks
    os.utime(path, ns=(time.time_ns(), modified_ns), follow_symlinks=follow)
