"""Directory: an open local directory, in which nothing follows a symlink. POSIX; blocking."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import Final, Self

IS_SYMLINK: Final = "it is a symlink, and nothing is written through a symlink"
FOREIGN_PART: Final = "it is not a file of this user; remove it and try again"

# O_PATH needs no permission to read the directory; other systems than Linux lack it.
_DIRECTORY: Final = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_NEW_PART: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

pread = os.pread
pwrite = os.pwrite


class Directory:
    """A descriptor of a directory; must be closed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def open(cls, path: str) -> Self:
        """Open a directory by its path; the caller has named it, so symlinks are followed."""
        return cls(os.open(path, _DIRECTORY))

    def duplicate(self) -> Self:
        """The same directory, to be closed on its own."""
        return type(self)(os.dup(self._descriptor))

    def close(self) -> None:
        os.close(self._descriptor)

    def child(self, name: str) -> Self:
        """Open a directory in this one; raises OSError for a symlink."""
        try:
            descriptor = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=self._descriptor)
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP) and self._is_symlink(name):
                raise OSError(errno.ELOOP, IS_SYMLINK) from None
            raise
        return type(self)(descriptor)

    def _is_symlink(self, name: str) -> bool:
        try:
            return stat.S_ISLNK(self.lstat(name).st_mode)
        except OSError:
            return False

    def lstat(self, name: str) -> os.stat_result:
        return os.lstat(name, dir_fd=self._descriptor)

    def stat(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self._descriptor)

    def make_directory(self, name: str) -> None:
        os.mkdir(name, dir_fd=self._descriptor)

    def make_symlink(self, target: str, name: str) -> None:
        os.symlink(target, name, dir_fd=self._descriptor)

    def replace(self, source: str, target: str) -> None:
        """Rename an entry, over another one if there is one."""
        os.replace(source, target, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def remove(self, name: str) -> None:
        """Remove an entry that is no directory, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)

    def remove_directory(self, name: str) -> None:
        """Remove an empty directory, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(name, dir_fd=self._descriptor)

    def set_mode(self, name: str, mode: int) -> None:
        """Set the mode of a directory in this one."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=self._descriptor)
        try:
            os.fchmod(descriptor, mode)
        finally:
            os.close(descriptor)

    def create_part(self, part: str, mode: int | None) -> int:
        """Create a temporary file, as `open_part` does; raises FileExistsError if there is one."""
        permissions = 0o666 if mode is None else 0o600
        return os.open(part, _NEW_PART, permissions, dir_fd=self._descriptor)

    def open_part(self, part: str, mode: int | None) -> int:
        """Open a temporary file; private, if it will get a mode of its own."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        permissions = 0o666 if mode is None else 0o600
        descriptor = os.open(part, flags, permissions, dir_fd=self._descriptor)
        metadata = os.fstat(descriptor)
        is_own = metadata.st_uid == os.geteuid() and metadata.st_nlink == 1
        if not stat.S_ISREG(metadata.st_mode) or not is_own:
            os.close(descriptor)
            raise FileExistsError(errno.EEXIST, f"{part}: {FOREIGN_PART}")
        return descriptor


def set_file_mode(descriptor: int, mode: int) -> None:
    """Set the mode of an open file."""
    os.fchmod(descriptor, mode)


def file_mode(metadata: os.stat_result) -> int | None:
    """The permissions that a copy of a local file or directory gets."""
    return stat.S_IMODE(metadata.st_mode) & 0o777


def link_target(path: str) -> str:
    """The target of a local symlink."""
    return os.readlink(path)
