"""The kernel calls that `os` lacks, against the kernel."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from pathlib import Path

import pytest

from exec_server.filesystem import syscalls
from exec_server.filesystem.syscalls import RESOLVE_NO_MAGIC_LINKS, RESOLVE_NO_SYMLINKS, OpenHow


def _opened(how: OpenHow, path: str) -> int:
    """Zero if the path can be opened, else the negated error number."""
    descriptor = how.open(os.fsencode(path))
    if descriptor < 0:
        return descriptor
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
    return 0


def test_openat2_resolves_as_far_as_its_flags_allow(home: Path) -> None:
    anything = OpenHow(os.O_PATH, 0)
    no_links = OpenHow(os.O_PATH, RESOLVE_NO_SYMLINKS)
    no_magic = OpenHow(os.O_PATH, RESOLVE_NO_MAGIC_LINKS)
    results = {
        path: (_opened(anything, path), _opened(no_links, path), _opened(no_magic, path))
        for path in ("file", "flink", "dangling", "/proc/self/exe")
    }
    assert results == {
        "file": (0, 0, 0),
        "flink": (0, -errno.ELOOP, 0),
        "dangling": (-errno.ENOENT, -errno.ELOOP, -errno.ENOENT),
        "/proc/self/exe": (0, -errno.ELOOP, -errno.ELOOP),
    }


def test_openat2_is_relative_to_a_directory(home: Path) -> None:
    Path("dir/inner").touch()
    directory = os.open("dir", os.O_PATH)
    how = OpenHow(os.O_PATH, 0)
    descriptor = how.open(b"inner", ctypes.c_long(directory))
    assert os.path.samestat(os.fstat(descriptor), os.stat("dir/inner"))
    os.close(descriptor)
    assert how.open(b"missing", ctypes.c_long(directory)) == -errno.ENOENT
    os.close(directory)


def test_statx_does_not_follow_links(home: Path) -> None:
    os.utime("file", ns=(0, 1_700_000_000_123_999_999))
    directory = os.open(".", os.O_PATH)
    file = syscalls.statx(directory, "file")
    assert (stat.S_ISREG(file.mode), file.size) == (True, 3)
    assert file.modified_ms == 1_700_000_000_123
    assert stat.S_ISLNK(syscalls.statx(directory, "flink").mode)
    assert stat.S_ISDIR(syscalls.statx(directory, "").mode)
    with pytest.raises(FileNotFoundError):
        syscalls.statx(directory, "missing")
    os.close(directory)


def test_allocate_gives_a_sparse_file_its_blocks_but_not_another_size(home: Path) -> None:
    with open("sparse", "wb") as file:
        file.truncate(1_000_000)
        syscalls.allocate(file.fileno(), 100_000)
        info = os.fstat(file.fileno())
    assert info.st_size == 1_000_000
    # A file system that cannot allocate is left alone.
    assert info.st_blocks == 0 or info.st_blocks * 512 >= 100_000


def test_allocate_raises_other_errors(home: Path) -> None:
    with open("file", "rb") as file, pytest.raises(OSError) as failed:
        syscalls.allocate(file.fileno(), 100)
    assert failed.value.errno == errno.EBADF


def test_inotify_reports_a_created_file(home: Path) -> None:
    instance = syscalls.inotify_init()
    assert not os.get_inheritable(instance)
    with pytest.raises(BlockingIOError):
        os.read(instance, 1000)
    watch = syscalls.inotify_add_watch(instance, str(home), 0x100)  # IN_CREATE
    Path("new").touch()
    event = os.read(instance, 1000)
    assert int.from_bytes(event[:4], "little") == watch
    assert event[16:].rstrip(b"\0") == b"new"
    with pytest.raises(FileNotFoundError):
        syscalls.inotify_add_watch(instance, "missing", 0x100)
    os.close(instance)
