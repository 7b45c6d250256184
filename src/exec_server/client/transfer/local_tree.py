"""LocalTree: the local side of a download. Blocking, so it runs in threads.

The names below the top come from a server, and an earlier download may have left symlinks that the
server has chosen. So every entry is reached from a descriptor of the directory that the caller has
named, component by component and without following a symlink: a link that is in the way, or is put
there at any moment, is an error or is replaced, and never written through.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from exec_server.client.transfer.plan import SPECIAL, Item, join, part_path

IS_SYMLINK: Final = "it is a symlink, and nothing is written through a symlink"
_FOREIGN_PART: Final = "it is not a file of this user; remove it and try again"
_SAME_NAME: Final = "another entry of the tree has the same name on this file system"

# O_PATH needs no permission to read the directory; other systems than Linux lack it.
_DIRECTORY: Final = (
    getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
)


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
        self._root = -1
        self._is_closed = False
        self._name = ""
        self._ambiguous: set[tuple[int, int]] = set()  # device and inode of placed files

    def open(self) -> None:
        """Open the directory of the top, which is created for a tree; raises OSError."""
        directory, self._name = _split(self._top)
        with self._named(""), self._lock:
            if self._is_closed:
                return
            if self._is_directory:
                os.makedirs(directory, exist_ok=True)
            flags = _DIRECTORY & ~os.O_NOFOLLOW  # the caller has named it
            self._root = os.open(directory, flags)

    def close(self) -> None:
        """Close the directory; a thread that is still at work gets ECANCELED."""
        with self._lock:
            self._is_closed = True
            if self._root >= 0:
                os.close(self._root)
            self._root = -1

    # ---- entries ----------------------------------------------------------------------

    def make_directories(self, items: Iterator[Item], fail: Callable[[str, OSError], None]) -> None:
        """Make directories from the top down; `fail` is called for errors, and may raise them."""
        failed: set[str] = set()
        for item in items:
            if item.path and os.path.dirname(item.path) in failed:
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
                os.mkdir(name, dir_fd=directory)
            except FileExistsError as exists:
                try:
                    os.close(_open_directory(name, directory))
                except NotADirectoryError:
                    raise exists from None

    def write_file(self, item: Item, data: bytes) -> None:
        """Write a small file; its temporary file is removed if that fails."""
        with self._named(item.path), self._parent(item.path) as (directory, name):
            descriptor = _open_part(part_path(name, item), directory, item.mode)
            try:
                os.ftruncate(descriptor, 0)
                _write_all(descriptor, data, 0)
                self._place(item, descriptor, directory, name)
            except OSError:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(part_path(name, item), dir_fd=directory)
                raise
            finally:
                os.close(descriptor)

    def open_part(self, item: Item) -> int:
        """A descriptor of the temporary file of a large file; the caller closes it."""
        with self._named(item.path), self._parent(item.path) as (directory, name):
            return _open_part(part_path(name, item), directory, item.mode)

    def place_part(self, item: Item) -> None:
        """Give a complete temporary file its mode and its name, or remove it."""
        with self._named(item.path), self._parent(item.path) as (directory, name):
            descriptor = _open_part(part_path(name, item), directory, item.mode)
            try:
                self._place(item, descriptor, directory, name)
            except OSError:
                os.unlink(part_path(name, item), dir_fd=directory)
                raise
            finally:
                os.close(descriptor)

    def remove_part(self, item: Item) -> None:
        """Remove a temporary file, if there is one."""
        with (
            self._named(item.path),
            self._parent(item.path) as (directory, name),
            contextlib.suppress(FileNotFoundError),
        ):
            os.unlink(part_path(name, item), dir_fd=directory)

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
                os.unlink(name, dir_fd=directory)
            os.symlink(item.target, name, dir_fd=directory)

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
            descriptor = os.open(
                name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory
            )
            try:
                os.fchmod(descriptor, item.mode)
            finally:
                os.close(descriptor)

    def _place(self, item: Item, descriptor: int, directory: int, name: str) -> None:
        if item.mode is not None:
            os.fchmod(descriptor, item.mode)
        with contextlib.suppress(FileNotFoundError):
            found = _check_replaceable(name, directory)
            if (found.st_dev, found.st_ino) in self._ambiguous:
                raise FileExistsError(errno.EEXIST, _SAME_NAME)
        part = part_path(name, item)
        os.replace(part, name, src_dir_fd=directory, dst_dir_fd=directory)
        if self._is_ambiguous(item.path):
            placed = os.fstat(descriptor)
            self._ambiguous.add((placed.st_dev, placed.st_ino))

    # ---- directories ------------------------------------------------------------------

    @contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        """A descriptor of the directory of an entry, and the entry's name in it."""
        with self._lock:
            if self._root < 0:
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
            directory = os.dup(self._root)
        try:
            names = [self._name, *path.split("/")] if path else [self._name]
            for name in names[:-1]:
                below = _open_directory(name, directory)
                os.close(directory)
                directory = below
            yield directory, names[-1]
        finally:
            os.close(directory)

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
        directory, name = os.path.split(top.rstrip("/"))
    if name in ("", ".", ".."):
        return top, "."
    return directory or ".", name


def _open_directory(name: str, directory: int) -> int:
    try:
        return os.open(name, _DIRECTORY, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP) and _is_symlink(name, directory):
            raise OSError(errno.ELOOP, IS_SYMLINK) from None
        raise


def _is_symlink(name: str, directory: int) -> bool:
    try:
        return stat.S_ISLNK(os.lstat(name, dir_fd=directory).st_mode)
    except OSError:
        return False


def _check_replaceable(name: str, directory: int) -> os.stat_result:
    """Refuse to replace a directory or a device, also one that a link leads to."""
    found = os.lstat(name, dir_fd=directory)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    kind = found.st_mode
    if stat.S_ISLNK(kind):
        with contextlib.suppress(OSError):
            kind = os.stat(name, dir_fd=directory).st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISLNK(kind) or stat.S_ISDIR(kind)):
        raise OSError(errno.EINVAL, SPECIAL)
    return found


def _open_part(part: str, directory: int, mode: int | None) -> int:
    """Open a temporary file; private, if it will get a mode of its own."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(part, flags, 0o666 if mode is None else 0o600, dir_fd=directory)
    found = os.fstat(descriptor)
    is_own = found.st_uid == os.geteuid() and found.st_nlink == 1
    if not stat.S_ISREG(found.st_mode) or not is_own:
        os.close(descriptor)
        raise FileExistsError(errno.EEXIST, f"{part}: {_FOREIGN_PART}")
    return descriptor


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written


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
