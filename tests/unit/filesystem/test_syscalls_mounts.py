"""MountTable: which file systems may block, and which devices are procfs."""

from __future__ import annotations

import builtins
import errno
import os
import time
from pathlib import Path

import pytest

from exec_server.filesystem import syscalls
from exec_server.filesystem.syscalls import MountTable, parse_mounts, slow_mount_points


def test_slow_file_systems_are_found_in_the_mount_table() -> None:
    table = (
        b"21 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        b"22 21 0:4 / /proc rw shared:5 - proc proc rw\n"
        b"23 21 0:9 / /mnt/my\\040disk rw shared:7 master:2 - nfs4 host:/x rw\n"
        b"24 21 0:9 / /mnt/\xc3\xa9 rw - fuse.sshfs x rw\n"
    )
    found = parse_mounts(table)
    assert slow_mount_points(found) == ("/mnt/my disk/", "/mnt/é/")
    assert [mount.device for mount in found if mount.kind == "proc"] == [os.makedev(0, 4)]
    assert slow_mount_points(parse_mounts(b"1 0 0:9 / / rw - nfs x rw")) == ("/",)


def test_any_character_of_a_mount_point_is_kept() -> None:
    table = b"21 1 0:9 / /mnt/a\rb\x0bc\\011\\012\\134 rw - fuse x rw\n"
    assert slow_mount_points(parse_mounts(table)) == ("/mnt/a\rb\x0bc\t\n\\/",)


def test_the_device_of_procfs_is_known(tmp_path: Path) -> None:
    table = MountTable()
    assert table.is_proc(os.stat("/proc").st_dev)
    assert not table.is_proc(os.stat(tmp_path).st_dev)


def test_files_of_drivers_are_not_kept_by_a_file_system(tmp_path: Path) -> None:
    table = MountTable()
    assert not table.is_storage(os.stat("/proc").st_dev)
    assert not table.is_storage(os.stat("/sys").st_dev)
    devices = [os.makedev(int(major), int(minor)) for major, minor in [("8", "1"), ("0", "9")]]
    lines = b"21 1 8:1 / / rw - ext4 x rw\n22 1 0:9 / /mnt rw - fuse x rw\n"
    kinds = {mount.device: mount.kind for mount in parse_mounts(lines)}
    assert kinds == dict(zip(devices, ["ext4", "fuse"], strict=True))


def test_without_a_mount_table_every_path_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> object:
        raise PermissionError

    monkeypatch.setattr(builtins, "open", refuse)
    assert MountTable().slow_mounts() == ("/",)
    assert not MountTable().is_storage(os.stat(tmp_path).st_dev)


def test_without_a_mount_table_every_device_may_be_procfs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the last descriptor of the server was used for the file to be read."""
    table = MountTable()
    assert not table.is_proc(os.stat(tmp_path).st_dev)

    def refuse(*_: object) -> object:
        raise OSError(errno.EMFILE, "Too many open files")

    table._expires = 0.0
    with monkeypatch.context() as patched:
        patched.setattr(builtins, "open", refuse)
        assert table.is_proc(os.stat(tmp_path).st_dev)
    table._expires = 0.0
    assert not table.is_proc(os.stat(tmp_path).st_dev)


def test_the_table_is_read_again_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    points = ["/a/"]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(syscalls, "slow_mount_points", lambda _: tuple(points))
    table = MountTable()
    assert table.slow_mounts() == ("/a/",)
    points[0] = "/b/"
    clock[0] += 0.9
    assert table.slow_mounts() == ("/a/",)
    clock[0] += 0.2
    assert table.slow_mounts() == ("/b/",)
