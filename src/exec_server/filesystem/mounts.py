"""MountTable: which paths lie on file systems that may block, and which devices are procfs."""

from __future__ import annotations

import os
import time
from typing import Final, NamedTuple

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


class MountTable:
    """A copy of /proc/self/mountinfo, read again when it is older than a second."""

    def __init__(self) -> None:
        self._slow: tuple[str, ...] = ()
        self._proc_devices: frozenset[int] | None = None  # None: the table cannot be read
        self._storage_devices: frozenset[int] = frozenset()
        self._expires = 0.0

    def slow_mounts(self) -> tuple[str, ...]:
        """The mount points, each with a final slash, of file systems that may block."""
        if time.monotonic() > self._expires:
            self._refresh()
        return self._slow

    def is_proc(self, device: int) -> bool:
        """Whether this is the device number of a procfs; true for all if they are not known."""
        if time.monotonic() > self._expires:
            self._refresh()
        return self._proc_devices is None or device in self._proc_devices

    def is_storage(self, device: int) -> bool:
        """Whether files with this device number are kept by this machine, not made by a driver."""
        if time.monotonic() > self._expires:
            self._refresh()
        return device in self._storage_devices

    def _refresh(self) -> None:
        self._expires = time.monotonic() + _MAX_AGE_SECONDS
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
