"""What a confined file worker refuses itself, because no mount can refuse it for it.

Mounts cannot keep a name missing, nor deny files by pattern as they come and go. So the
functions of this package that create, remove or open entries ask here right before, with
the descriptor they are going to use: no link or rename put in the way in between changes
what was asked about. In the server itself nothing is armed and every check passes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Set once, in a worker that serves one policy and then ends with it.
_missing: set[tuple[int, int, str]] = set()
_denials: list[Callable[[str], bool]] = []


def keep_missing(device: int, inode: int, name: str) -> None:
    """From now on this name must not come into being in that directory."""
    _missing.add((device, inode, name))


def deny(is_denied: Callable[[str], bool]) -> None:
    """From now on files with such paths may be neither opened nor created nor removed."""
    _denials.append(is_denied)


def is_armed() -> bool:
    return bool(_missing or _denials)


def check_entry(directory: int, name: str) -> None:
    """Raise OSError if the entry of an open directory may be neither created nor removed."""
    if _missing:
        info = os.fstat(directory)
        if (info.st_dev, info.st_ino, name) in _missing:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    if _denials:
        _check_path(f"{_path_of(directory).rstrip('/')}/{name}")


def check_opened(descriptor: int) -> None:
    """Raise PermissionError if an open file is one of the denied."""
    if _denials:
        _check_path(_path_of(descriptor))


def _check_path(path: str) -> None:
    if any(is_denied(path) for is_denied in _denials):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _path_of(descriptor: int) -> str:
    # Without /proc this fails, and with it the operation: better than not to know.
    return os.readlink(f"/proc/self/fd/{descriptor}")


@contextmanager
def parent_of(path: str) -> Iterator[tuple[int, str]]:
    """The open directory of the path's last component, and that component, both checked."""
    parent, name = os.path.split(path)
    directory = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        check_entry(directory, name)
        yield directory, name
    finally:
        os.close(directory)
