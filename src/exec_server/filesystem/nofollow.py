"""File operations with `followSymlinks: false`: no component of the path may be a link.

Paths are opened component by component, each relative to the one before, so a link that is put
in the way meanwhile is refused as well. A link before the last component is ENOTDIR.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from exec_server.errors import InternalError, InvalidRequest
from exec_server.filesystem import safe_write, syscalls
from exec_server.filesystem.path_guard import GUARD
from exec_server.protocol.files import GetMetadataResult

_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_regular_nofollow(path: str) -> tuple[int, os.stat_result]:
    """Open a regular file for reading; the caller closes it."""
    with _parent(path) as (directory, name):
        fd = os.open(name, _OPEN_READ, dir_fd=directory)
    try:
        GUARD.check_opened(fd, writing=False)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise InvalidRequest("path is not a regular file")
    except BaseException:
        os.close(fd)
        raise
    return fd, info


def write_nofollow(path: str, data: safe_write.Content) -> None:
    """Create a file or replace its content."""
    with _parent(path) as (directory, name):
        safe_write.write_entry(directory, name, data)


def create_directory_nofollow(path: str, *, recursive: bool) -> None:
    """Create a directory, with its parents if `recursive`."""
    components = _components(path)
    if not recursive:
        if not components:
            raise InternalError("directory already exists")
        with _parent(path) as (directory, name):
            GUARD.check_creation(directory, name)
            os.mkdir(name, dir_fd=directory)
        return
    directory = os.open("/", _DIRECTORY)
    try:
        for name in components:
            try:
                child = os.open(name, _DIRECTORY, dir_fd=directory)
            except FileNotFoundError:
                _make_directory(directory, name)
                child = os.open(name, _DIRECTORY, dir_fd=directory)
            os.close(directory)
            directory = child
    finally:
        os.close(directory)


def metadata_nofollow(path: str) -> GetMetadataResult:
    """Type, size and times, with the birth time where the file system keeps it."""
    if path == "/":
        directory = os.open("/", _DIRECTORY)
        try:
            found = syscalls.statx(directory, "")
        finally:
            os.close(directory)
    else:
        with _parent(path) as (directory, name):
            GUARD.check_opened(directory, writing=False)
            found = syscalls.statx(directory, name)
    if stat.S_ISLNK(found.mode):
        raise InvalidRequest("path contains a symbolic link")
    return GetMetadataResult(
        stat.S_ISDIR(found.mode),
        stat.S_ISREG(found.mode),
        False,
        found.size,
        found.created_ms,
        found.modified_ms,
    )


def remove_nofollow(path: str, *, recursive: bool) -> None:
    """Remove a file or an empty directory."""
    if recursive:
        raise InternalError("recursive no-follow removal is unsupported")
    with _parent(path) as (directory, name):
        GUARD.check_removal(directory, name)
        mode = os.lstat(name, dir_fd=directory).st_mode
        if stat.S_ISLNK(mode):
            raise InvalidRequest("path contains a symbolic link")
        if stat.S_ISDIR(mode):
            os.rmdir(name, dir_fd=directory)
        else:
            os.unlink(name, dir_fd=directory)


@contextmanager
def _parent(path: str) -> Iterator[tuple[int, str]]:
    """The open directory of the path's last component, and that component."""
    components = _components(path)
    if not components:
        raise InvalidRequest("path must name an entry")
    directory = os.open("/", _DIRECTORY)
    try:
        for name in components[:-1]:
            child = os.open(name, _DIRECTORY, dir_fd=directory)
            os.close(directory)
            directory = child
        yield directory, components[-1]
    finally:
        os.close(directory)


def _components(path: str) -> list[str]:
    return path.split("/")[1:] if path != "/" else []


def _make_directory(directory: int, name: str) -> None:
    GUARD.check_creation(directory, name)
    try:
        os.mkdir(name, dir_fd=directory)
    except FileExistsError:
        pass  # created meanwhile: opening it tells whether it is a directory
