"""File operations that the event loop performs itself, because the kernel answers from memory.

A `try_` function returns None if it might block: a thread then uses `filesystem.operations`. Paths
come from the kernel's cache (RESOLVE_CACHED), content from the page cache (RWF_NOWAIT), never on
network or userspace file systems. Writing has no such flags: see `WriteGuard`.

A `confined` operation is allowed by a sandbox with all reads, and must not see the server's own
procfs files: None then, too. `trusted` functions do the same in a thread, without the cache flags.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from exec_server.filesystem import operations, safe_write
from exec_server.filesystem.syscalls import (
    MOUNTS,
    RESOLVE_CACHED,
    RESOLVE_NO_MAGIC_LINKS,
    RESOLVE_NO_SYMLINKS,
    OpenHow,
)
from exec_server.protocol import files
from exec_server.protocol.paths import path_to_uri

_DONE: Final = files.Done()
# Files read on the event loop: copying more takes longer than passing the request to a thread.
INLINE_BYTES: Final = 65_536
# Listing a directory of more entries takes longer than the hand-over to a thread.
INLINE_ENTRIES: Final = 100
# The kernel does not reclaim memory used this recently as long as other memory is free.
LISTED_SECONDS: Final = 5.0

# The longest base64 text of a file that is written on the event loop: one page, which the kernel
# writes at once.
INLINE_TEXT: Final = (safe_write.PAGE_BYTES + 2) // 3 * 4
# See `WriteGuard`.
SLOW_WRITE_SECONDS: Final = 0.001
PAUSE_FACTOR: Final = 20
MAX_PAUSE_FACTOR: Final = 64 * PAUSE_FACTOR
MAX_PAUSE_SECONDS: Final = 60.0
QUICK_WRITES: Final = 64

# Directories and files that clients use within a moment; with more of them, all are forgotten. The
# kernel limits their paths, so they are at most a few megabytes.
MAX_RECENT: Final = 256
# How long a directory is taken to be in memory after the kernel said so. Short, as for the table of
# mounts: another file system may be mounted on it.
PARENT_SECONDS: Final = 1.0
# How long a written file is taken to exist. A mistake costs one system call.
WRITTEN_SECONDS: Final = 60.0
_CREATE: Final = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
_OVERWRITE: Final = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC

# Error numbers of an open that a thread or a confined worker may not meet: the lookup needs the
# disk, or the kernel lacks openat2.
_NOT_CERTAIN: Final = frozenset(
    {errno.EAGAIN, errno.EINTR, errno.ENOSYS, errno.EPERM, errno.EINVAL}
)
_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY


class RecentUses:
    """What was used a moment ago, each until its expiry time. Threads may add, too.

    - A directory that was listed, by device, inode and modification time, has its entries in
      memory: the kernel has no call that lists a directory only if it is in memory.
    - A directory by its path with a slash at the end: the kernel had it in memory, and its files
      are kept by this machine.
    - A file by its path: it was written, so it probably exists.
    """

    def __init__(self) -> None:
        self._expiries: dict[str | tuple[int, int, int], float] = {}

    def add(self, key: str | tuple[int, int, int], expiry: float) -> None:
        if len(self._expiries) >= MAX_RECENT:
            self._expiries.clear()
        self._expiries[key] = expiry

    def forget(self, key: str) -> None:
        self._expiries.pop(key, None)

    def has(self, key: str | tuple[int, int, int], now: float) -> bool:
        return self._expiries.get(key, 0.0) > now


_RECENT: Final = RecentUses()


class _OpenModes:
    """The ways to open a path under one set of RESOLVE flags."""

    def __init__(self, resolve: int) -> None:
        self.read = OpenHow(_READ, resolve)
        self.entry = OpenHow(os.O_PATH | os.O_NOFOLLOW, resolve)
        self.target = OpenHow(os.O_PATH, resolve)
        self.parent = OpenHow(os.O_PATH | os.O_DIRECTORY, resolve)
        self.directory = OpenHow(os.O_RDONLY | os.O_DIRECTORY, resolve)
        self.follows_all_links = not resolve & (RESOLVE_NO_MAGIC_LINKS | RESOLVE_NO_SYMLINKS)

    def open(self, how: OpenHow, path: str) -> int | None:
        """A descriptor; None if a thread or worker may succeed without restrictions."""
        fd = how.open(path.encode("utf-8", "surrogateescape"))
        if fd >= 0:
            return fd
        if -fd in _NOT_CERTAIN or (fd == -errno.ELOOP and not self.follows_all_links):
            return None
        raise OSError(-fd, os.strerror(-fd))

    def status(self, how: OpenHow, path: str) -> os.stat_result | None:
        fd = self.open(how, path)
        if fd is None:
            return None
        info = os.fstat(fd)
        os.close(fd)
        return info


_UNCONFINED: Final = _OpenModes(RESOLVE_CACHED)
_CONFINED: Final = _OpenModes(RESOLVE_CACHED | RESOLVE_NO_MAGIC_LINKS)
_NO_SYMLINKS: Final = _OpenModes(RESOLVE_CACHED | RESOLVE_NO_SYMLINKS)
_TRUSTED: Final = _OpenModes(RESOLVE_NO_MAGIC_LINKS)


def _is_supported() -> bool:
    """Whether the kernel, and every filter of its calls, supports cached lookups."""
    fd = OpenHow(os.O_PATH, RESOLVE_CACHED).open(b"/")
    if fd >= 0:
        os.close(fd)
    return (fd >= 0 or fd in (-errno.EAGAIN, -errno.EINTR)) and hasattr(os, "RWF_NOWAIT")


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


def try_read_file(
    params: files.ReadFileParams, limit: int = INLINE_BYTES, *, confined: bool = False
) -> files.ReadFileResult | None:
    """The content of a regular file of at most `limit` bytes that is all in the page cache."""
    path = params.path.native()
    # A driver may do anything when its device is opened, even block.
    if params.follow_symlinks is False or path.startswith("/dev/"):
        return None
    modes = _open_modes(path, confined)
    fd = None if modes is None else modes.open(modes.read, path)
    if fd is None:
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
    info = modes.status(modes.entry, path)
    is_symlink = info is not None and stat.S_ISLNK(info.st_mode)
    if is_symlink:
        info = modes.status(modes.target, path)
    if info is None or (confined and MOUNTS.is_proc(info.st_dev)):
        return None
    return operations.metadata_result(info, is_symlink=is_symlink)


def try_canonicalize(
    params: files.CanonicalizeParams, *, confined: bool = False
) -> files.CanonicalizeResult | None:
    """The result of `operations.canonicalize` if the kernel has the path in its cache."""
    path = params.path.native()
    modes = _open_modes(path, confined)
    fd = None if modes is None else modes.open(modes.target, path)
    if fd is None:
        return None
    resolved = None if confined and MOUNTS.is_proc(os.fstat(fd).st_dev) else operations.path_of(fd)
    os.close(fd)
    return None if resolved is None else files.CanonicalizeResult(path_to_uri(resolved))


class _NotCertainError(Exception):
    """The target of a link is not in the kernel's cache, or leads into procfs."""


def open_trusted(params: files.ReadFileParams | files.OpenParams) -> int | None:
    """A descriptor of a regular file, which the caller closes. Blocking."""
    if getattr(params, "follow_symlinks", None) is False:
        return None
    path = params.path.native()
    fd = _TRUSTED.open(_TRUSTED.read, path)
    if fd is None:
        return None
    info = os.fstat(fd)
    is_large = info.st_size > safe_write.READ_LIMIT and isinstance(params, files.ReadFileParams)
    is_proc = MOUNTS.is_proc(info.st_dev)
    if stat.S_ISREG(info.st_mode) and not is_large and not is_proc:
        return fd
    os.close(fd)
    if is_proc:
        return None
    raise safe_write.too_large_error() if is_large else operations.not_a_file(path)


def read_directory_trusted(params: files.ReadDirectoryParams) -> files.ReadDirectoryResult | None:
    """The result of `operations.read_directory`. Blocking."""
    path = params.path.native()
    fd = _TRUSTED.open(_TRUSTED.directory, path)
    result = None if fd is None else _list(fd, _TRUSTED, confined=True)
    if result is not None:
        directory_was_listed(path, len(result.entries))
    return result


def directory_was_listed(path: str, entries: int) -> None:
    """Record that a thread has just listed a directory. Blocking."""
    if entries <= INLINE_ENTRIES:
        with suppress(OSError):
            _RECENT.add(_identity(os.stat(path)), time.monotonic() + LISTED_SECONDS)


def _identity(info: os.stat_result) -> tuple[int, int, int]:
    """The state of a directory; any change of its entries changes the modification time."""
    return info.st_dev, info.st_ino, info.st_mtime_ns


def try_read_directory(
    params: files.ReadDirectoryParams, *, confined: bool = False
) -> files.ReadDirectoryResult | None:
    """The result of `operations.read_directory` for a small directory that was just listed."""
    path = params.path.native()
    modes = _open_modes(path, confined)
    fd = None if modes is None else modes.open(modes.directory, path)
    if modes is None or fd is None:
        return None
    if _RECENT.has(_identity(os.fstat(fd)), time.monotonic()):
        return _list(fd, modes, confined=confined)
    os.close(fd)
    return None


def _list(fd: int, modes: _OpenModes, *, confined: bool) -> files.ReadDirectoryResult | None:
    """List and close a directory; None if it or the target of a link needs a thread or worker."""

    def target_mode(entry: os.DirEntry[str]) -> int | None:
        target = modes.target.open(os.fsencode(entry.name), ctypes.c_long(fd))
        if -target in _NOT_CERTAIN or target == -errno.ELOOP:
            raise _NotCertainError
        if target < 0:
            return None
        info = os.fstat(target)
        os.close(target)
        if confined and MOUNTS.is_proc(info.st_dev):
            raise _NotCertainError
        return info.st_mode

    try:
        if confined and MOUNTS.is_proc(os.fstat(fd).st_dev):
            return None
        with os.scandir(fd) as scan:
            return operations.listing(scan, target_mode)
    except _NotCertainError:
        return None
    finally:
        os.close(fd)


class WriteGuard:
    """Leaves writes to threads while the disk is slow: no flag makes a write fail instead of wait.

    After a write that waited longer than SLOW_WRITE_SECONDS, threads write for PAUSE_FACTOR times
    as long: waiting takes at most a twentieth of the loop's time. The factor doubles with each slow
    write, until QUICK_WRITES came in a row. A long write that did not wait is no slow one: another
    program had the processor.
    """

    def __init__(self) -> None:
        self._until = 0.0
        self._factor = PAUSE_FACTOR
        self._quick = 0  # writes since the last slow one

    def run(
        self,
        write: Callable[[files.WriteFileParams, float], files.Done | None],
        params: files.WriteFileParams,
    ) -> files.Done | None:
        """Call `write` with the params and the time, unless threads have to write now."""
        began = time.monotonic()
        if began < self._until:
            return None
        waits = _count_waits()
        result = write(params, began)
        ended = time.monotonic()
        took = ended - began
        if took > SLOW_WRITE_SECONDS and _count_waits() > waits:
            self._until = ended + min(took * self._factor, MAX_PAUSE_SECONDS)
            self._factor = min(2 * self._factor, MAX_PAUSE_FACTOR)
            self._quick = 0
        elif result is not None:
            self._quick += 1
            if self._quick == QUICK_WRITES:
                self._factor = PAUSE_FACTOR
        return result


def _count_waits() -> int:
    """How often this thread has waited, for a disk or a lock for example."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


# Disks belong to the machine, so all connections share this.
_WRITE_GUARD: Final = WriteGuard()


def try_write_file(params: files.WriteFileParams, *, confined: bool = False) -> files.Done | None:
    """Create or overwrite a file of at most a page, in a directory that the kernel has in memory.

    Every error but those of the write itself is left to `operations.write_file`.
    """
    if confined or params.follow_symlinks is False or len(params.data_base64) > INLINE_TEXT:
        return None
    return _WRITE_GUARD.run(_write_file, params)


def _write_file(params: files.WriteFileParams, now: float) -> files.Done | None:
    content = operations.content_to_write(params)
    path = params.path.native()
    parent, slash, name = path.rpartition("/")
    parent += slash
    is_short = content.size <= safe_write.PAGE_BYTES
    modes = _open_modes(path, confined=False) if name and is_short else None
    if modes is None:
        return None
    exists = _RECENT.has(path, now)
    if modes.follows_all_links and _RECENT.has(parent, now):
        is_written = _write_entry(None, path, content, exists=exists)
    else:
        directory = modes.parent.open(os.fsencode(parent))
        if directory < 0:
            return None
        try:
            if not MOUNTS.is_storage(os.fstat(directory).st_dev):
                return None
            _RECENT.add(parent, now + PARENT_SECONDS)
            is_written = _write_entry(directory, name, content, exists=exists)
        finally:
            os.close(directory)
    if not is_written:
        _RECENT.forget(path)
        return None
    _RECENT.add(path, now + WRITTEN_SECONDS)
    return _DONE


def _write_entry(
    directory: int | None, name: str, content: safe_write.BytesContent, *, exists: bool
) -> bool:
    """Write an entry unless that needs a thread; `exists` is a guess."""
    if not exists:
        acquisitions = safe_write.INODE_LOCKS.acquisitions
        try:
            fd = os.open(name, _CREATE, 0o666, dir_fd=directory)
        except FileExistsError:
            pass
        except OSError:
            return False
        else:
            safe_write.fill_new(fd, directory, name, content)
            # Otherwise another writer may be at it: a thread waits for it and writes once more.
            return acquisitions == safe_write.INODE_LOCKS.acquisitions
    return _overwrite(directory, name, content)


def _overwrite(directory: int | None, name: str, content: safe_write.BytesContent) -> bool:
    """Overwrite a file unless it is a link, a large file, or anything that needs a thread."""
    try:
        before = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    # Of a pipe or a device the open itself would have effects.
    if not stat.S_ISREG(before.st_mode) or not MOUNTS.is_storage(before.st_dev):
        return False
    if not _is_inline(before) or not safe_write.INODE_LOCKS.acquire_now(before):
        return False
    try:
        fd = os.open(name, _OVERWRITE, dir_fd=directory)
    except OSError:
        safe_write.INODE_LOCKS.release(before)
        return False
    try:
        info = os.fstat(fd)
        if not os.path.samestat(info, before) or not _is_inline(info):
            return False  # it was changed or replaced meanwhile
        safe_write.overwrite_locked(fd, content, info)
        return True
    finally:
        os.close(fd)
        safe_write.INODE_LOCKS.release(before)


def _is_inline(info: os.stat_result) -> bool:
    """Whether a file is short and without holes, so that overwriting it frees no blocks."""
    return info.st_size <= safe_write.PAGE_BYTES and info.st_blocks * 512 >= info.st_size
