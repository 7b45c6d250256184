"""Copies and removes directory trees, without recursion.

Removing never follows a link, not even a new one; copying accepts the tree as it finds it.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import Final

from exec_server.errors import InternalError, InvalidRequest
from exec_server.filesystem import safe_write
from exec_server.filesystem.safe_write import GUARD
from exec_server.filesystem.syscalls import opened
from exec_server.protocol import files

_OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_SOURCE: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC


def make_directories(path: str) -> None:
    """Create a directory and its missing parents; an existing directory is fine."""
    missing: list[str] = []
    while not _make_directory(path):
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        if not _make_directory(directory):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def make_directory(path: str) -> None:
    """Create one directory, which must not exist."""
    if path == "/":
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    with GUARD.creating(path) as (directory, name):
        os.mkdir(name, dir_fd=directory)


def _make_directory(path: str) -> bool:
    """Create one directory if it is missing; False if its parent is missing."""
    try:
        make_directory(path)
    except FileNotFoundError:
        if path == "/":
            raise
        return False
    except OSError:
        if not os.path.isdir(path):
            raise
    return True


def remove_tree(path: str) -> None:
    """Remove a directory and everything in it, however deep, following no link.

    Only one directory is open at a time, and going up is checked: if a directory is moved out of
    the tree meanwhile, the removal stops instead of deleting elsewhere.
    """
    parent, name = os.path.split(path)
    current = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        above: list[tuple[str, os.stat_result, list[str]]] = []
        pending = [name]
        while True:
            if pending:
                name = pending.pop()
                try:
                    below = os.open(name, _OPEN_DIRECTORY, dir_fd=current)
                except FileNotFoundError:
                    if not above:
                        raise
                    continue
                above.append((name, os.fstat(current), pending))
                os.close(current)
                current = below
                pending = _remove_files(current)
            else:
                name, info, pending = above.pop()
                current = _go_up(current, info)
                GUARD.check_removal(current, name)
                os.rmdir(name, dir_fd=current)
                if not above:
                    return
    finally:
        os.close(current)


def _remove_files(directory: int) -> list[str]:
    directories = []
    with os.scandir(directory) as scan:
        for entry in scan:
            if entry.is_dir(follow_symlinks=False):
                directories.append(entry.name)
            else:
                GUARD.check_removal(directory, entry.name)
                with suppress(FileNotFoundError):
                    os.unlink(entry.name, dir_fd=directory)
    return directories


def _go_up(directory: int, expected: os.stat_result) -> int:
    """Replace the descriptor by that of its parent, if that is still the expected directory."""
    parent = os.open("..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    if not os.path.samestat(os.fstat(parent), expected):
        os.close(parent)
        raise InternalError("directory was moved while it was being removed")
    os.close(directory)
    return parent


def copy(params: files.CopyParams) -> files.Done:
    """Copy a file, a link or a directory tree."""
    source = params.source_path.native()
    destination = params.destination_path.native()
    mode = os.lstat(source).st_mode
    if stat.S_ISDIR(mode):
        if not params.recursive:
            raise InvalidRequest("fs/copy requires recursive: true when sourcePath is a directory")
        root = os.path.realpath(source).rstrip("/")
        if f"{os.path.realpath(destination)}/".startswith(f"{root}/"):
            raise InvalidRequest(
                "fs/copy cannot copy a directory to itself or one of its descendants"
            )
        _copy_tree(source, destination)
    elif not _copy_entry(source, destination, mode):
        raise InvalidRequest("fs/copy only supports regular files, directories, and symlinks")
    return files.Done()


def _copy_tree(source: str, destination: str) -> None:
    pending = [(source, destination)]
    while pending:
        source, destination = pending.pop()
        make_directories(destination)
        GUARD.check_readable(source)
        with os.scandir(source) as scan:
            for entry in scan:
                target = f"{destination.rstrip('/')}/{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    pending.append((entry.path, target))
                else:
                    # Special files are skipped, as by the reference.
                    _copy_entry(entry.path, target, entry.stat(follow_symlinks=False).st_mode)


def _copy_entry(source: str, destination: str, mode: int) -> bool:
    if stat.S_ISLNK(mode):
        target = os.readlink(source)
        with GUARD.creating(destination) as (directory, name):
            os.symlink(target, name, dir_fd=directory)
    elif stat.S_ISREG(mode):
        _copy_file(source, destination)
    else:
        return False
    return True


def _copy_file(source: str, destination: str) -> None:
    """Copy content and permissions; copying a file onto itself does nothing."""
    with opened(source, _OPEN_SOURCE) as fd:
        GUARD.check_opened(fd, writing=False)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise InvalidRequest("path is not a regular file")
        with suppress(FileNotFoundError):
            if os.path.samestat(info, os.stat(destination)):
                return
        data: safe_write.Content = safe_write.DescriptorContent(fd, info.st_size)
        if info.st_size == 0:
            data = safe_write.BytesContent(safe_write.read_all(fd, 0))
        safe_write.write(destination, data, mode=stat.S_IMODE(info.st_mode))
