"""Directory: a local directory, in which nothing follows a symlink. Windows; blocking.

Entries are checked by path before use, as no calls are relative to an open directory; nothing that
a server sends runs here in between. Copies get the modes of new files. Names with another meaning
are refused: `a:b` (a stream), `con.txt` (a device), `a.` (`a`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from typing import Final, Self

IS_SYMLINK: Final = "it is a symlink, and nothing is written through a symlink"
FOREIGN_PART: Final = "it is not a plain file; remove it and try again"
NOT_A_NAME: Final = "Windows cannot have a file of this name"

_SPECIAL: Final = re.compile(
    r'.*[<>:"|?*\\/\x00-\x1f].*'
    r"|.*[. ]"
    r"|(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9\xb9\xb2\xb3])[ ]*([.:].*)?",
    re.IGNORECASE | re.DOTALL,
)
_REPARSE_POINT: Final = 0x400  # a symlink, a junction or a mount point
_SYMLINK_PREFIX: Final = "\\\\?\\"
_BINARY: Final = getattr(os, "O_BINARY", 0) | getattr(os, "O_NOINHERIT", 0)


def pread(descriptor: int, count: int, offset: int) -> bytes:
    """Read at an offset; one thread at a time uses a descriptor."""
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.read(descriptor, count)


def pwrite(descriptor: int, data: bytes | memoryview, offset: int) -> int:
    """Write at an offset; one thread at a time uses a descriptor."""
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.write(descriptor, data)


class Directory:
    """The path of a directory that was found not to be a symlink."""

    def __init__(self, path: str) -> None:
        self._path = path

    @classmethod
    def open(cls, path: str) -> Self:
        """Open a directory by its path; the caller has named it, so symlinks are followed."""
        whole = os.path.realpath(path)
        if not stat.S_ISDIR(os.stat(whole).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return cls(whole)

    def duplicate(self) -> Self:
        """The same directory, to be closed on its own."""
        return type(self)(self._path)

    def close(self) -> None:
        """Nothing is open."""

    def _entry(self, name: str) -> str:
        if name != "." and _SPECIAL.fullmatch(name):
            raise OSError(errno.EINVAL, NOT_A_NAME)
        return os.path.join(self._path, name)

    def child(self, name: str) -> Self:
        """Open a directory in this one; raises OSError for a symlink."""
        metadata = self.lstat(name)
        if _is_link(metadata):
            raise OSError(errno.ELOOP, IS_SYMLINK)
        if not stat.S_ISDIR(metadata.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return type(self)(self._entry(name))

    def lstat(self, name: str) -> os.stat_result:
        return os.lstat(self._entry(name))

    def stat(self, name: str) -> os.stat_result:
        return os.stat(self._entry(name))

    def make_directory(self, name: str) -> None:
        os.mkdir(self._entry(name))

    def make_symlink(self, target: str, name: str) -> None:
        os.symlink(target, self._entry(name))

    def replace(self, source: str, target: str) -> None:
        """Rename an entry, over another one if there is one."""
        os.replace(self._entry(source), self._entry(target))

    def remove(self, name: str) -> None:
        """Remove an entry that is no directory, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._entry(name))

    def remove_directory(self, name: str) -> None:
        """Remove an empty directory, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(self._entry(name))

    def set_mode(self, name: str, mode: int) -> None:
        """Modes do not exist here."""

    def create_part(self, part: str, mode: int | None) -> int:
        """Create a temporary file; raises FileExistsError if there is one."""
        return os.open(self._entry(part), os.O_RDWR | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)

    def open_part(self, part: str, mode: int | None) -> int:
        """Open a temporary file."""
        path = self._entry(part)
        with contextlib.suppress(FileNotFoundError):
            metadata = os.lstat(path)
            if _is_link(metadata) or not stat.S_ISREG(metadata.st_mode) or metadata.st_nlink > 1:
                raise FileExistsError(errno.EEXIST, f"{part}: {FOREIGN_PART}")
        return os.open(path, os.O_RDWR | os.O_CREAT | _BINARY, 0o666)


def set_file_mode(descriptor: int, mode: int) -> None:
    """Modes do not exist here."""


def file_mode(metadata: os.stat_result) -> int | None:
    """None: a copy of a local file gets the mode of a new file."""
    return None


def link_target(path: str) -> str:
    """The target of a local symlink, with the slashes of a server's machine."""
    return os.readlink(path).removeprefix(_SYMLINK_PREFIX).replace("\\", "/")


def _is_link(metadata: os.stat_result) -> bool:
    attributes: int = getattr(metadata, "st_file_attributes", 0)
    return stat.S_ISLNK(metadata.st_mode) or bool(attributes & _REPARSE_POINT)
