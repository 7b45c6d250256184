"""File operations the event loop does itself, because the kernel has the answer at hand.

Each function gives the result, or None when finding it might block: then a thread does the
same with `core.files`. A path is looked up in the kernel's cache only (RESOLVE_CACHED) and
content is read from the page cache only (RWF_NOWAIT). Opening a file on a network or
userspace file system may wait for its server in any case, so those are left alone.

A `confined` operation is one that a sandbox allows because it allows all reads. It must not
see the server's own files in procfs, nor pass through them: None then, too.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import time
from contextlib import suppress
from typing import Final, NamedTuple

from exec_server.core import content
from exec_server.core.filecalls import (
    RESOLVE_CACHED,
    RESOLVE_NO_MAGIC_LINKS,
    RESOLVE_NO_SYMLINKS,
    OpenHow,
)
from exec_server.core.files import listing, metadata_result, path_of
from exec_server.protocol import files
from exec_server.protocol.paths import path_to_uri

# File systems whose calls end in this machine's kernel, without another process or network.
_LOCAL_NAMES: Final = """
    binfmt_misc bpf btrfs cgroup cgroup2 configfs cramfs debugfs devpts devtmpfs efivarfs erofs
    exfat ext2 ext3 ext4 f2fs fusectl hugetlbfs iso9660 jfs mqueue nsfs ntfs3 overlay proc pstore
    ramfs rootfs securityfs selinuxfs squashfs sysfs tmpfs tracefs udf vfat xfs
"""
_LOCAL_TYPES: Final = frozenset(_LOCAL_NAMES.split())
# A directory of more entries takes longer to list than to hand to a thread.
INLINE_ENTRIES: Final = 100
# Directories that one client looks at within seconds; the one listed longest ago is forgotten.
MAX_RECENT_DIRECTORIES: Final = 256
# Memory is not taken away from what was used this recently, as long as there is any left.
_RECENT_SECONDS: Final = 5.0
# How long a change of the mount table may go unnoticed.
_MOUNTS_MAX_AGE: Final = 1.0

# The lookup may need the disk, or the flag may not be possible here.
_MIGHT_BLOCK: Final = frozenset({-errno.EAGAIN, -errno.EINTR})
_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY


class _Ways:
    """The ways of opening a path, for one set of flags that restrict the lookup."""

    def __init__(self, resolve: int) -> None:
        self.read = OpenHow(_READ, resolve)
        self.entry = OpenHow(os.O_PATH | os.O_NOFOLLOW, resolve)
        self.target = OpenHow(os.O_PATH, resolve)
        self.directory = OpenHow(os.O_RDONLY | os.O_DIRECTORY, resolve)


class _Mounts:
    """Which directories lead to file systems that may make us wait, or to procfs."""

    def __init__(self) -> None:
        self._slow: tuple[str, ...] = ()
        self._proc: frozenset[int] = frozenset()
        self._expires = 0.0
        self._anywhere = _Ways(RESOLVE_CACHED)
        # With a slow file system around, a link could lead into it from anywhere.
        self._literally = _Ways(RESOLVE_CACHED | RESOLVE_NO_SYMLINKS)
        self._ways = self._anywhere
        self._confined_anywhere = _Ways(RESOLVE_CACHED | RESOLVE_NO_MAGIC_LINKS)
        self._confined_ways = self._confined_anywhere

    def ways_to(self, path: str, *, confined: bool) -> _Ways | None:
        """How to open the path without waiting, None if it lies on a slow file system."""
        self._refresh_in_time()
        if self._slow and f"{path}/".startswith(self._slow):
            return None
        return self._confined_ways if confined else self._ways

    def is_proc(self, device: int) -> bool:
        """Whether this is the device number of a procfs."""
        self._refresh_in_time()
        return device in self._proc

    def _refresh_in_time(self) -> None:
        now = time.monotonic()
        if now > self._expires:
            self._refresh()
            self._expires = now + _MOUNTS_MAX_AGE

    def _refresh(self) -> None:
        try:
            with open("/proc/self/mountinfo", "rb") as table:
                mounts = _parse_mounts(table.read())
        except OSError:
            mounts = [_Mount("/", "unknown", 0)]
        self._slow = _slow_mounts(mounts)
        self._proc = frozenset(mount.device for mount in mounts if mount.kind == "proc")
        self._ways = self._literally if self._slow else self._anywhere
        self._confined_ways = self._literally if self._slow else self._confined_anywhere

    @property
    def follows_links(self) -> bool:
        return self._ways is self._anywhere


class _Mount(NamedTuple):
    point: str
    kind: str
    device: int


def _parse_mounts(table: bytes) -> list[_Mount]:
    """The lines of /proc/self/mountinfo."""
    mounts = []
    for line in table.splitlines():
        mount, _, system = line.partition(b" - ")
        fields = mount.split(b" ")
        major, minor = fields[2].split(b":")
        # The table writes blanks in paths as octal escapes.
        point = fields[4].decode("unicode_escape").encode("latin-1")
        kind = os.fsdecode(system.split(b" ", 1)[0])
        mounts.append(_Mount(os.fsdecode(point), kind, os.makedev(int(major), int(minor))))
    return mounts


def _slow_mounts(mounts: list[_Mount]) -> tuple[str, ...]:
    """The mount points, with a final slash, of all that is not known to be local."""
    slow = [mount.point for mount in mounts if mount.kind not in _LOCAL_TYPES]
    return tuple(point.rstrip("/") + "/" for point in slow)


def is_proc(device: int) -> bool:
    """Whether a device number is that of a procfs, as far as the mount table says."""
    return _MOUNTS.is_proc(device)


def _is_supported() -> bool:
    """Whether this kernel, and whatever filters its calls, knows cached lookups."""
    fd = OpenHow(os.O_PATH, RESOLVE_CACHED).open(b"/")
    if fd >= 0:
        os.close(fd)
    return (fd >= 0 or fd in _MIGHT_BLOCK) and hasattr(os, "RWF_NOWAIT")


_SUPPORTED: Final = _is_supported()
_MOUNTS: Final = _Mounts()


def try_read_file(
    params: files.ReadFileParams, limit: int, *, confined: bool = False
) -> files.ReadFileResult | None:
    """The content of a regular file of at most `limit` bytes that is all in the page cache."""
    if not _SUPPORTED or params.follow_symlinks is False:
        return None
    path = params.path.native()
    ways = _MOUNTS.ways_to(path, confined=confined)
    # A driver may do anything when its device is opened, even wait.
    if ways is None or path.startswith("/dev/"):
        return None
    fd = ways.read.open(path.encode("utf-8", "surrogateescape"))
    if fd < 0:
        _raise_if_certain(-fd, confined=confined)
        return None
    try:
        info = os.fstat(fd)
        size = info.st_size
        # An empty file may be one of procfs; the rest is for `core.files` to refuse or to read.
        if not stat.S_ISREG(info.st_mode) or not 0 < size <= limit:
            return None
        turns = content.TURNS
        taken = turns.taken
        if turns.is_taken(info):
            return None
        buffer = bytearray(size + 1)
        if os.preadv(fd, [buffer], 0, os.RWF_NOWAIT) != size or turns.taken != taken:
            return None
    except OSError:
        return None  # not in the cache, or a file system that cannot tell
    finally:
        os.close(fd)
    return files.ReadFileResult(bytes(memoryview(buffer)[:size]))


def try_metadata(
    params: files.GetMetadataParams, *, confined: bool = False
) -> files.GetMetadataResult | None:
    """What `core.files.get_metadata` says, if the kernel has the path in its cache."""
    if not _SUPPORTED or params.follow_symlinks is False:
        return None
    path = params.path.native()
    ways = _MOUNTS.ways_to(path, confined=confined)
    if ways is None:
        return None
    name = path.encode("utf-8", "surrogateescape")
    fd = ways.entry.open(name)
    if fd < 0:
        _raise_if_certain(-fd, confined=confined)
        return None
    info = os.fstat(fd)
    os.close(fd)
    is_symlink = stat.S_ISLNK(info.st_mode)
    if is_symlink:
        fd = ways.target.open(name)
        if fd < 0:
            _raise_if_certain(-fd, confined=confined)
            return None
        info = os.fstat(fd)
        os.close(fd)
    if confined and _MOUNTS.is_proc(info.st_dev):
        return None
    return metadata_result(info, is_symlink=is_symlink)


def try_canonicalize(
    params: files.CanonicalizeParams, *, confined: bool = False
) -> files.CanonicalizeResult | None:
    """What `core.files.canonicalize` says, if the kernel has the path in its cache."""
    if not _SUPPORTED:
        return None
    path = params.path.native()
    ways = _MOUNTS.ways_to(path, confined=confined)
    if ways is None:
        return None
    fd = ways.target.open(path.encode("utf-8", "surrogateescape"))
    if fd < 0:
        _raise_if_certain(-fd, confined=confined)
        return None
    resolved = None if confined and _MOUNTS.is_proc(os.fstat(fd).st_dev) else path_of(fd)
    os.close(fd)
    return None if resolved is None else files.CanonicalizeResult(path_to_uri(resolved))


class _RecentDirectories:
    """Directories that were listed a moment ago, so that their entries are in memory.

    There is no call that lists only what is in memory; this is the next best thing to knowing.
    """

    def __init__(self) -> None:
        # Device, inode and time of change: when it expires. The oldest come first.
        self._expiries: dict[tuple[int, int, int], float] = {}

    def add(self, info: os.stat_result) -> None:
        key = (info.st_dev, info.st_ino, info.st_mtime_ns)
        self._expiries.pop(key, None)
        self._expiries[key] = time.monotonic() + _RECENT_SECONDS
        if len(self._expiries) > MAX_RECENT_DIRECTORIES:
            self._expiries.pop(next(iter(self._expiries)), None)

    def has(self, info: os.stat_result) -> bool:
        key = (info.st_dev, info.st_ino, info.st_mtime_ns)
        return self._expiries.get(key, 0.0) > time.monotonic()


_RECENT: Final = _RecentDirectories()


class _MightBlockError(Exception):
    """An answer is not at hand after all."""


def directory_was_listed(path: str, entries: int) -> None:
    """Tell that a thread has just listed a directory. Blocking."""
    if entries <= INLINE_ENTRIES:
        with suppress(OSError):
            _RECENT.add(os.stat(path))


def try_read_directory(
    params: files.ReadDirectoryParams, *, confined: bool = False
) -> files.ReadDirectoryResult | None:
    """What `core.files.read_directory` says, for a small directory that was listed just before."""
    if not _SUPPORTED:
        return None
    path = params.path.native()
    ways = _MOUNTS.ways_to(path, confined=confined)
    if ways is None:
        return None
    fd = ways.directory.open(path.encode("utf-8", "surrogateescape"))
    if fd < 0:
        _raise_if_certain(-fd, confined=confined)
        return None

    def target_mode(entry: os.DirEntry[str]) -> int | None:
        target = ways.target.open(os.fsencode(entry.name), ctypes.c_long(fd))
        if target == -errno.ENOENT:
            return None
        if target < 0:
            raise _MightBlockError
        info = os.fstat(target)
        os.close(target)
        if confined and _MOUNTS.is_proc(info.st_dev):
            raise _MightBlockError
        return info.st_mode

    try:
        info = os.fstat(fd)
        if not _RECENT.has(info) or (confined and _MOUNTS.is_proc(info.st_dev)):
            return None
        with os.scandir(fd) as scan:
            return listing(scan, target_mode)
    except _MightBlockError:
        return None
    finally:
        os.close(fd)


def _raise_if_certain(number: int, *, confined: bool) -> None:
    """Raise what is certain; return if a thread should try again without restrictions."""
    follows_links = _MOUNTS.follows_links and not confined
    if -number in _MIGHT_BLOCK or (number == errno.ELOOP and not follows_links):
        return
    raise OSError(number, os.strerror(number))
