"""File operations that the event loop performs itself, because the kernel answers from memory.

Each function returns the result, or None if it might block: a thread then does the same with
`filesystem.operations`. Paths are looked up in the kernel's cache only (RESOLVE_CACHED) and
content is read from the page cache only (RWF_NOWAIT). Opening a file on a network or userspace
file system may wait for its server in any case, so those are always left to a thread.

A `confined` operation is one that a sandbox allows because it allows all reads. It must not
see the server's own files in procfs, nor pass through them: the result is None then, too.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import time
from contextlib import suppress
from typing import Final

from exec_server.filesystem import safe_write
from exec_server.filesystem.mounts import MOUNTS
from exec_server.filesystem.operations import listing, metadata_result, path_of
from exec_server.filesystem.syscalls import (
    RESOLVE_CACHED,
    RESOLVE_NO_MAGIC_LINKS,
    RESOLVE_NO_SYMLINKS,
    OpenHow,
)
from exec_server.protocol import files
from exec_server.protocol.paths import path_to_uri

# Listing a directory of more entries takes longer than the hand-over to a thread.
INLINE_ENTRIES: Final = 100
# Directories that one client looks at within seconds; the one listed longest ago is forgotten.
MAX_RECENT_DIRECTORIES: Final = 256
# The kernel does not reclaim memory used this recently as long as other memory is free.
_RECENT_SECONDS: Final = 5.0

# The lookup may need the disk, or RESOLVE_CACHED is not possible for this path.
_MIGHT_BLOCK: Final = frozenset({-errno.EAGAIN, -errno.EINTR})
_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY


class _OpenModes:
    """The ways to open a path under one set of RESOLVE flags."""

    def __init__(self, resolve: int) -> None:
        self.read = OpenHow(_READ, resolve)
        self.entry = OpenHow(os.O_PATH | os.O_NOFOLLOW, resolve)
        self.target = OpenHow(os.O_PATH, resolve)
        self.directory = OpenHow(os.O_RDONLY | os.O_DIRECTORY, resolve)
        self.follows_all_links = not resolve & (RESOLVE_NO_MAGIC_LINKS | RESOLVE_NO_SYMLINKS)


_UNCONFINED: Final = _OpenModes(RESOLVE_CACHED)
_CONFINED: Final = _OpenModes(RESOLVE_CACHED | RESOLVE_NO_MAGIC_LINKS)
_NO_SYMLINKS: Final = _OpenModes(RESOLVE_CACHED | RESOLVE_NO_SYMLINKS)


def _is_supported() -> bool:
    """Whether the kernel, and every filter of its calls, supports cached lookups."""
    fd = OpenHow(os.O_PATH, RESOLVE_CACHED).open(b"/")
    if fd >= 0:
        os.close(fd)
    return (fd >= 0 or fd in _MIGHT_BLOCK) and hasattr(os, "RWF_NOWAIT")


_SUPPORTED: Final = _is_supported()


def _open_modes(path: str, confined: bool) -> _OpenModes | None:
    """The ways to open this path without blocking, None if there are none."""
    if not _SUPPORTED:
        return None
    slow = MOUNTS.slow_mounts()
    if slow:
        # With a slow file system mounted, a link could lead into it from anywhere.
        return None if f"{path}/".startswith(slow) else _NO_SYMLINKS
    return _CONFINED if confined else _UNCONFINED


def _raise_if_certain(number: int, modes: _OpenModes) -> None:
    """Raise the error of an open; return if a thread may succeed without restrictions."""
    if number in _MIGHT_BLOCK or (number == -errno.ELOOP and not modes.follows_all_links):
        return
    raise OSError(-number, os.strerror(-number))


def try_read_file(
    params: files.ReadFileParams, limit: int, *, confined: bool = False
) -> files.ReadFileResult | None:
    """The content of a regular file of at most `limit` bytes that is all in the page cache."""
    path = params.path.native()
    # A driver may do anything when its device is opened, even block.
    if params.follow_symlinks is False or path.startswith("/dev/"):
        return None
    modes = _open_modes(path, confined)
    if modes is None:
        return None
    fd = modes.read.open(path.encode("utf-8", "surrogateescape"))
    if fd < 0:
        _raise_if_certain(fd, modes)
        return None
    try:
        info = os.fstat(fd)
        size = info.st_size
        # An empty file may be one of procfs; `filesystem.operations` refuses or reads the rest.
        if not stat.S_ISREG(info.st_mode) or not 0 < size <= limit:
            return None
        locks = safe_write.INODE_LOCKS
        acquisitions = locks.acquisitions
        if locks.is_held(info):
            return None
        buffer = bytearray(size + 1)
        if os.preadv(fd, [buffer], 0, os.RWF_NOWAIT) != size or locks.acquisitions != acquisitions:
            return None
    except OSError:
        return None  # not in the page cache, or the file system does not support RWF_NOWAIT
    finally:
        os.close(fd)
    return files.ReadFileResult(bytes(memoryview(buffer)[:size]))


def try_metadata(
    params: files.GetMetadataParams, *, confined: bool = False
) -> files.GetMetadataResult | None:
    """The result of `operations.get_metadata` if the kernel has the path in its cache."""
    path = params.path.native()
    modes = None if params.follow_symlinks is False else _open_modes(path, confined)
    if modes is None:
        return None
    name = path.encode("utf-8", "surrogateescape")
    fd = modes.entry.open(name)
    if fd < 0:
        _raise_if_certain(fd, modes)
        return None
    info = os.fstat(fd)
    os.close(fd)
    is_symlink = stat.S_ISLNK(info.st_mode)
    if is_symlink:
        fd = modes.target.open(name)
        if fd < 0:
            _raise_if_certain(fd, modes)
            return None
        info = os.fstat(fd)
        os.close(fd)
    if confined and MOUNTS.is_proc(info.st_dev):
        return None
    return metadata_result(info, is_symlink=is_symlink)


def try_canonicalize(
    params: files.CanonicalizeParams, *, confined: bool = False
) -> files.CanonicalizeResult | None:
    """The result of `operations.canonicalize` if the kernel has the path in its cache."""
    path = params.path.native()
    modes = _open_modes(path, confined)
    if modes is None:
        return None
    fd = modes.target.open(path.encode("utf-8", "surrogateescape"))
    if fd < 0:
        _raise_if_certain(fd, modes)
        return None
    resolved = None if confined and MOUNTS.is_proc(os.fstat(fd).st_dev) else path_of(fd)
    os.close(fd)
    return None if resolved is None else files.CanonicalizeResult(path_to_uri(resolved))


class RecentDirectories:
    """Directories that were listed a moment ago, so that their entries are in memory.

    The kernel has no call that lists a directory only if it is in memory.
    """

    def __init__(self) -> None:
        # Device, inode and modification time to expiry time. The oldest come first.
        self._expiries: dict[tuple[int, int, int], float] = {}

    def add(self, info: os.stat_result) -> None:
        key = (info.st_dev, info.st_ino, info.st_mtime_ns)
        self._expiries.pop(key, None)
        self._expiries[key] = time.monotonic() + _RECENT_SECONDS
        if len(self._expiries) > MAX_RECENT_DIRECTORIES:
            self._expiries.pop(next(iter(self._expiries)), None)

    def __contains__(self, info: os.stat_result) -> bool:
        key = (info.st_dev, info.st_ino, info.st_mtime_ns)
        return self._expiries.get(key, 0.0) > time.monotonic()


# The directories that any thread of this process has listed.
_RECENT: Final = RecentDirectories()


class _MightBlockError(Exception):
    """The target of a link is not in the kernel's cache."""


def directory_was_listed(path: str, entries: int) -> None:
    """Record that a thread has just listed a directory. Blocking."""
    if entries <= INLINE_ENTRIES:
        with suppress(OSError):
            _RECENT.add(os.stat(path))


def try_read_directory(
    params: files.ReadDirectoryParams, *, confined: bool = False
) -> files.ReadDirectoryResult | None:
    """The result of `operations.read_directory` for a small directory that was just listed."""
    path = params.path.native()
    modes = _open_modes(path, confined)
    if modes is None:
        return None
    fd = modes.directory.open(path.encode("utf-8", "surrogateescape"))
    if fd < 0:
        _raise_if_certain(fd, modes)
        return None
    open_target = modes.target.open

    def target_mode(entry: os.DirEntry[str]) -> int | None:
        target = open_target(os.fsencode(entry.name), ctypes.c_long(fd))
        if target == -errno.ENOENT:
            return None
        if target < 0:
            raise _MightBlockError
        info = os.fstat(target)
        os.close(target)
        if confined and MOUNTS.is_proc(info.st_dev):
            raise _MightBlockError
        return info.st_mode

    try:
        info = os.fstat(fd)
        if info not in _RECENT or (confined and MOUNTS.is_proc(info.st_dev)):
            return None
        with os.scandir(fd) as scan:
            return listing(scan, target_mode)
    except _MightBlockError:
        return None
    finally:
        os.close(fd)
