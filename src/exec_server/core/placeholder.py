"""An empty directory that stands, for a while, where a name must stay missing.

It is ours if it has our date, and in use, by this server or by another, as long as somebody
holds a shared lock on it; the last one to let go removes it. The kernel releases the locks of
a dead server, so the next one that meets its leftovers takes them over.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from typing import Final

# A date that no file has by chance: 2001-09-09 and this many nanoseconds.
MARK_NS: Final = 1_000_000_000 * 1_000_000_000 + 653_284_901
_MODE: Final = 0o555
_ATTEMPTS: Final = 16
# The command has no more rights than this server: where we cannot make it, it cannot either.
_NOBODY_COULD: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def is_placeholder(info: os.stat_result) -> bool:
    """Whether this is the status of a placeholder, of whatever server."""
    return stat.S_ISDIR(info.st_mode) and info.st_mtime_ns == MARK_NS


def make(directory: int, name: str) -> int | None:
    """Make a placeholder or share one; None where nobody could make anything anyway."""
    for _ in range(_ATTEMPTS):
        try:
            os.mkdir(name, _MODE, dir_fd=directory)
            os.utime(name, ns=(MARK_NS, MARK_NS), dir_fd=directory, follow_symlinks=False)
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno in _NOBODY_COULD:
                return None
            raise
        try:
            descriptor = os.open(name, _OPEN, dir_fd=directory)
        except FileNotFoundError:
            continue  # its last user has just removed it
        info = os.fstat(descriptor)
        if not is_placeholder(info):
            os.close(descriptor)
            raise FileExistsError(f"{name} has come into being")
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        try:
            if os.path.samestat(os.lstat(name, dir_fd=directory), info):
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)  # removed between our looking and our locking
    raise FileExistsError(f"{name} keeps changing")


def remove(path: str | bytes, descriptor: int) -> bool:
    """Remove a placeholder that is open, if it is empty and in its place.

    False if others use it: the last of them will remove it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        info = os.fstat(descriptor)
        if is_placeholder(info) and os.path.samestat(os.lstat(path), info):
            os.rmdir(path)
    except BlockingIOError:
        return False
    except OSError:
        pass  # somebody put something in, or it is gone
    return True


def remove_left_behind(path: bytes) -> None:
    """Remove a placeholder whose server was killed."""
    try:
        descriptor = os.open(path, _OPEN)
    except OSError:
        return
    remove(path, descriptor)
    os.close(descriptor)
