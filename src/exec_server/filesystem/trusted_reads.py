"""Reads that the server performs itself for a sandbox which allows all reads. Blocking.

A path in procfs, or through procfs, shows the reading process: here the server's own memory,
environment and descriptors. Each function checks the file that it has opened and returns None
where procfs is involved; a confined worker then performs the read.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from typing import Final

from exec_server.filesystem import safe_write
from exec_server.filesystem.operations import listing, not_a_file
from exec_server.filesystem.syscalls import MOUNTS, RESOLVE_NO_MAGIC_LINKS, OpenHow
from exec_server.protocol import files

_FILE: Final = OpenHow(os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY, RESOLVE_NO_MAGIC_LINKS)
_DIRECTORY: Final = OpenHow(os.O_RDONLY | os.O_DIRECTORY, RESOLVE_NO_MAGIC_LINKS)
_TARGET: Final = OpenHow(os.O_PATH, RESOLVE_NO_MAGIC_LINKS)
# ELOOP: a magic link of procfs, or too many links. The others: a kernel without openat2.
_NEEDS_WORKER: Final = frozenset({errno.ELOOP, errno.ENOSYS, errno.EPERM, errno.EINVAL})


class _InProcError(Exception):
    """A link leads into procfs."""


def open_for_read(params: files.ReadFileParams | files.OpenParams) -> int | None:
    """A descriptor of a regular file, which the caller closes."""
    if getattr(params, "follow_symlinks", None) is False:
        return None
    path = params.path.native()
    descriptor = _open(_FILE, path)
    if descriptor is None:
        return None
    info = os.fstat(descriptor)
    if MOUNTS.is_proc(info.st_dev):
        os.close(descriptor)
        return None
    if not stat.S_ISREG(info.st_mode):
        os.close(descriptor)
        raise not_a_file(path)
    if info.st_size > safe_write.READ_LIMIT and isinstance(params, files.ReadFileParams):
        os.close(descriptor)
        raise safe_write.too_large_error()
    return descriptor


def read_directory(params: files.ReadDirectoryParams) -> files.ReadDirectoryResult | None:
    """The result of `operations.read_directory`."""
    descriptor = _open(_DIRECTORY, params.path.native())
    if descriptor is None:
        return None

    def target_mode(entry: os.DirEntry[str]) -> int | None:
        return _target_mode(descriptor, entry.name)

    try:
        if MOUNTS.is_proc(os.fstat(descriptor).st_dev):
            return None
        with os.scandir(descriptor) as scan:
            return listing(scan, target_mode)
    except _InProcError:
        return None
    finally:
        os.close(descriptor)


def _open(how: OpenHow, path: str) -> int | None:
    descriptor = how.open(os.fsencode(path))
    if -descriptor in _NEEDS_WORKER:
        return None
    if descriptor < 0:
        raise OSError(-descriptor, os.strerror(-descriptor))
    return descriptor


def _target_mode(directory: int, name: str) -> int | None:
    descriptor = _TARGET.open(os.fsencode(name), ctypes.c_long(directory))
    if -descriptor in _NEEDS_WORKER:
        raise _InProcError
    if descriptor < 0:
        return None
    info = os.fstat(descriptor)
    os.close(descriptor)
    if MOUNTS.is_proc(info.st_dev):
        raise _InProcError
    return info.st_mode
