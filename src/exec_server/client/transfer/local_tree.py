"""LocalTree: the local side of a download. Blocking, so it runs in threads.

The names below the top come from a server, and an earlier download may have left symlinks that the
server has chosen. So every entry is reached from a descriptor of the directory that the caller has
named, component by component and without following a symlink: a link that is in the way, or is put
there at any moment, is an error or is replaced, and never written through. `posix_directory` and
`windows_directory` have the calls for that.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Final

from exec_server.client.transfer.local_directory import Directory, pwrite, set_file_mode
from exec_server.client.transfer.plan import SPECIAL, Item, join, part_path

# Directories that are known to have no entries but those of this download: some megabytes. In
# others, an entry is looked up before it is replaced.
NEW_DIRECTORIES: Final = 65_536

_SAME_NAME: Final = "another entry of the tree has the same name on this file system"


class LocalTree:
    """A file or directory to create; paths of items are relative to it, and "" is the top."""

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

    # ---- entries ----------------------------------------------------------------------

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
        """Write a file; `is_new` if nothing but this download has put entries into the directory.

        That takes five system calls, each of which releases the interpreter and waits for it.
        """
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

    def make_symlinks(self, items: Iterator[Item], fail: Callable[[str, OSError], None]) -> None:
        """Make symlinks, which replace files and other symlinks; `fail` is called for errors."""
        for item in items:
            try:
                self._make_symlink(item)
            except OSError as error:
                fail(item.path, error)

    def _make_symlink(self, item: Item) -> None:
        with self._named(item.path), self._parent(item.path) as (directory, name):
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # symlink(2) reports it
                _check_replaceable(name, directory)
                directory.remove(name)
            directory.make_symlink(item.target, name)

    def set_modes(self, items: Iterator[Item]) -> list[str]:
        """Set the modes of directories; returns the errors."""
        errors = []
        for item in items:
            try:
                self._set_mode(item)
            except OSError as error:
                errors.append(f"modes: {error.filename}: {error.strerror}")
        return errors

    def _set_mode(self, item: Item) -> None:
        if item.mode is None:
            return
        with self._named(item.path), self._parent(item.path) as (directory, name):
            directory.set_mode(name, item.mode)

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
            found = _check_replaceable(name, directory)
        except FileNotFoundError:
            return
        if (found.st_dev, found.st_ino) in self._ambiguous:
            raise FileExistsError(errno.EEXIST, _SAME_NAME)

    # ---- directories ------------------------------------------------------------------

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
    found = directory.lstat(name)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    kind = found.st_mode
    if stat.S_ISLNK(kind):
        with contextlib.suppress(OSError):
            kind = directory.stat(name).st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISLNK(kind) or stat.S_ISDIR(kind)):
        raise OSError(errno.EINVAL, SPECIAL)
    return found


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
