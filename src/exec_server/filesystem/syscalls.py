"""Kernel calls on files that Python's `os` lacks, such as openat2 and statx; all raise OSError."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from exec_server.host.libc import LIBC

_SYS_OPENAT2: Final = 437  # the same on every architecture that has it
_AT_FDCWD: Final = -100
_AT_EMPTY_PATH: Final = 0x1000
_AT_SYMLINK_NOFOLLOW: Final = 0x100
_STATX_BASIC_STATS: Final = 0x7FF
_STATX_BTIME: Final = 0x800
_FALLOC_FL_KEEP_SIZE: Final = 1
_RENAME_NOREPLACE: Final = 1
_HAS_RENAMEAT2: Final = hasattr(LIBC, "renameat2")  # not in older versions of musl

RESOLVE_NO_MAGIC_LINKS: Final = 0x02
RESOLVE_NO_SYMLINKS: Final = 0x04
RESOLVE_CACHED: Final = 0x20

# File systems whose calls end in this machine's kernel, without another process or network.
_LOCAL_NAMES: Final = """
    binfmt_misc bpf btrfs cgroup cgroup2 configfs cramfs debugfs devpts devtmpfs efivarfs erofs
    exfat ext2 ext3 ext4 f2fs fusectl hugetlbfs iso9660 jfs mqueue nsfs ntfs3 overlay proc pstore
    ramfs rootfs securityfs selinuxfs squashfs sysfs tmpfs tracefs udf vfat xfs
"""
_LOCAL_TYPES: Final = frozenset(_LOCAL_NAMES.split())
# Those of them that keep files on a disk of this machine or in its memory.
_STORAGE_TYPES: Final = frozenset(
    ["btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "rootfs", "tmpfs", "xfs"]
)
# How long a change of the mount table may go unnoticed.
_MAX_AGE_SECONDS: Final = 1.0


class _OpenHow(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("flags", "mode", "resolve"))


class _StatxTime(ctypes.Structure):
    _fields_ = (
        ("seconds", ctypes.c_int64),
        ("nanoseconds", ctypes.c_uint32),
        ("_reserved", ctypes.c_int32),
    )


class _Statx(ctypes.Structure):
    _fields_ = (
        ("mask", ctypes.c_uint32),
        ("_block_size", ctypes.c_uint32),
        ("_attributes", ctypes.c_uint64),
        ("_links", ctypes.c_uint32),
        ("_owner", ctypes.c_uint32),
        ("_group", ctypes.c_uint32),
        ("mode", ctypes.c_uint16),
        ("_spare", ctypes.c_uint16),
        ("_inode", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("_blocks", ctypes.c_uint64),
        ("_attributes_mask", ctypes.c_uint64),
        ("_accessed", _StatxTime),
        ("created", _StatxTime),
        ("_changed", _StatxTime),
        ("modified", _StatxTime),
        ("_rest", ctypes.c_uint8 * 128),
    )


class FileStatus(NamedTuple):
    """The result of statx; `created_ms` is 0 where the file system keeps no birth time."""

    mode: int
    size: int
    created_ms: int
    modified_ms: int


# A lookup in the kernel's cache takes less time than handing the GIL to another thread, so this
# one call keeps the GIL.
_syscall = ctypes.PyDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_fallocate = LIBC.fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_get_errno = ctypes.get_errno
_AT_CWD: Final = ctypes.c_long(_AT_FDCWD)
_OPENAT2: Final = ctypes.c_long(_SYS_OPENAT2)
_HOW_SIZE: Final = ctypes.c_long(ctypes.sizeof(_OpenHow))


class OpenHow:
    """Flags for openat2, with the kernel structure built once instead of at every call."""

    __slots__ = ("_how", "_reference")

    def __init__(self, flags: int, resolve: int) -> None:
        self._how = _OpenHow(flags | os.O_CLOEXEC, 0, resolve)
        self._reference = ctypes.byref(self._how)

    def open(self, path: bytes, directory: ctypes.c_long = _AT_CWD) -> int:
        """A descriptor of the path, or the negated error number; keeps the GIL."""
        fd: int = _syscall(_OPENAT2, directory, path, self._reference, _HOW_SIZE)
        return fd if fd >= 0 else -_get_errno()


@contextmanager
def opened(path: str, flags: int, dir_fd: int | None = None) -> Iterator[int]:
    """A descriptor of the path, which the end of the block closes."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def statx(directory: int, name: str) -> FileStatus:
    """The status of an entry, not following a link; of `directory` itself if `name` is empty."""
    status = _Statx()
    path = os.fsencode(name)
    flags = _AT_SYMLINK_NOFOLLOW if path else _AT_EMPTY_PATH
    mask = _STATX_BASIC_STATS | _STATX_BTIME
    if LIBC.statx(directory, path, flags, mask, ctypes.byref(status)) != 0:
        raise _error()
    created = _milliseconds(status.created) if status.mask & _STATX_BTIME else 0
    return FileStatus(status.mode, status.size, created, _milliseconds(status.modified))


def _milliseconds(time: _StatxTime) -> int:
    return int(time.seconds) * 1000 + int(time.nanoseconds) // 1_000_000


def allocate(fd: int, length: int) -> None:
    """Allocate the first `length` bytes, where supported; raises OSError if the disk is full."""
    if _fallocate(fd, _FALLOC_FL_KEEP_SIZE, 0, length) != 0:
        error = _error()
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM):
            raise error


def rename_without_replacing(
    old_directory: int, old_name: str, new_directory: int, new_name: str
) -> None:
    """Rename an entry; raises FileExistsError if there is an entry with the new name."""
    result = -1
    if _HAS_RENAMEAT2:
        result = LIBC.renameat2(
            old_directory,
            os.fsencode(old_name),
            new_directory,
            os.fsencode(new_name),
            _RENAME_NOREPLACE,
        )
        if result != 0 and ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS):
            raise _error()
    if result != 0:  # some network file systems; a file that is created meanwhile is replaced
        try:
            os.lstat(new_name, dir_fd=new_directory)
        except FileNotFoundError:
            os.rename(old_name, new_name, src_dir_fd=old_directory, dst_dir_fd=new_directory)
        else:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))


def inotify_init() -> int:
    """A new inotify instance, non-blocking and closed on exec."""
    fd: int = LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        raise _error()
    return fd


def inotify_add_watch(fd: int, path: str, mask: int) -> int:
    """The watch descriptor of the path."""
    watch: int = LIBC.inotify_add_watch(fd, os.fsencode(path), ctypes.c_uint32(mask))
    if watch < 0:
        raise _error()
    return watch


def inotify_rm_watch(fd: int, watch: int) -> None:
    """Remove a watch; one that the kernel has removed is no error."""
    LIBC.inotify_rm_watch(fd, watch)


def _error() -> OSError:
    number = _get_errno()
    return OSError(number, os.strerror(number))


class MountTable:
    """A copy of /proc/self/mountinfo, read again when it is older than a second.

    Which paths lie on file systems that may block, and which devices are procfs.
    """

    def __init__(self) -> None:
        self._slow: tuple[str, ...] = ()
        self._proc_devices: frozenset[int] | None = None  # None: the table cannot be read
        self._storage_devices: frozenset[int] = frozenset()
        self._expires = 0.0

    def slow_mounts(self) -> tuple[str, ...]:
        """The mount points, each with a final slash, of file systems that may block."""
        self._refresh()
        return self._slow

    def is_proc(self, device: int) -> bool:
        """Whether this is the device number of a procfs; true for all if they are not known."""
        self._refresh()
        return self._proc_devices is None or device in self._proc_devices

    def is_storage(self, device: int) -> bool:
        """Whether files with this device number are kept by this machine, not made by a driver."""
        self._refresh()
        return device in self._storage_devices

    def _refresh(self) -> None:
        now = time.monotonic()
        if now <= self._expires:
            return
        self._expires = now + _MAX_AGE_SECONDS
        try:
            with open("/proc/self/mountinfo", "rb") as table:
                mounts = parse_mounts(table.read())
        except OSError:
            self._slow, self._proc_devices, self._storage_devices = ("/",), None, frozenset()
            return
        self._slow = slow_mount_points(mounts)
        self._proc_devices = frozenset(mount.device for mount in mounts if mount.kind == "proc")
        self._storage_devices = frozenset(
            mount.device for mount in mounts if mount.kind in _STORAGE_TYPES
        )


class Mount(NamedTuple):
    """One line of the mount table."""

    point: str
    kind: str
    device: int


def parse_mounts(table: bytes) -> list[Mount]:
    """Parse /proc/self/mountinfo."""
    mounts = []
    # Not splitlines: the kernel escapes a line feed in a path, but no carriage return.
    for line in table.removesuffix(b"\n").split(b"\n"):
        mount, _, system = line.partition(b" - ")
        fields = mount.split(b" ")
        major, minor = fields[2].split(b":")
        # The kernel writes blanks in paths as octal escapes.
        point = fields[4].decode("unicode_escape").encode("latin-1")
        kind = os.fsdecode(system.split(b" ", 1)[0])
        mounts.append(Mount(os.fsdecode(point), kind, os.makedev(int(major), int(minor))))
    return mounts


def slow_mount_points(mounts: list[Mount]) -> tuple[str, ...]:
    """The mount points, with a final slash, of all file systems not known to be local."""
    slow = [mount.point for mount in mounts if mount.kind not in _LOCAL_TYPES]
    return tuple(point.rstrip("/") + "/" for point in slow)


# The mounts of this process. One table serves all requests.
MOUNTS: Final = MountTable()
