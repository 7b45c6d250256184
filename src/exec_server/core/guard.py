"""What a confined file worker refuses itself, besides what its mounts refuse.

Mounts cannot keep a name missing, nor deny files by pattern as they come and go, and whoever
replaces a directory on the host detaches what was mounted on it. So the functions of this
package that create, remove or open entries ask here right before they act, with the descriptor
they are going to use: no link or rename put in the way in between changes what was asked about.
In the server itself nothing is armed and every check passes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Which error an operation on a path meets, 0 for none; `writing` is any change.
Judge = Callable[[str, bool], int]

# Set once, in a worker that serves one policy and then ends with it.
_missing: set[tuple[int, int, str]] = set()
_judges: list[Judge] = []


def keep_missing(device: int, inode: int, name: str) -> None:
    """From now on this name must not come into being in that directory."""
    _missing.add((device, inode, name))


def judge_by(judge: Judge) -> None:
    """From now on ask this about every path that is touched; needs /proc."""
    _judges.append(judge)


def is_armed() -> bool:
    return bool(_missing or _judges)


def check_creation(directory: int, name: str) -> None:
    """Raise OSError if an open directory may not get this entry.

    One that is there already is left to the kernel, whose error is then another.
    """
    try:
        check_removal(directory, name)
    except OSError:
        try:
            os.lstat(name, dir_fd=directory)
        except FileNotFoundError:
            pass
        else:
            return
        raise


def check_removal(directory: int, name: str) -> None:
    """Raise OSError if an entry of an open directory may not be removed."""
    if _missing:
        info = os.fstat(directory)
        if (info.st_dev, info.st_ino, name) in _missing:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    if _judges:
        _check_path(f"{_path_of(directory).rstrip('/')}/{name}", writing=True)


def check_opened(descriptor: int, *, writing: bool) -> None:
    """Raise OSError if an open file or directory may not be used this way."""
    if _judges:
        _check_path(_path_of(descriptor), writing=writing)


def check_named(path: str) -> None:
    """Raise OSError if the path, as it is spelt, leads where nothing may be looked at.

    What is moved away while it is being opened has another path afterwards.
    """
    if _judges:
        _check_path(path, writing=False)


def check_readable(path: str) -> None:
    """Raise OSError if what the path leads to may not be looked at."""
    if _judges:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            check_opened(descriptor, writing=False)
        finally:
            os.close(descriptor)


def _check_path(path: str, *, writing: bool) -> None:
    for judge in _judges:
        number = judge(path, writing)
        if number:
            raise OSError(number, os.strerror(number))


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


@contextmanager
def creating(path: str) -> Iterator[tuple[int, str]]:
    """The open directory and the name of an entry to be created, which is checked."""
    with _parent_of(path) as (directory, name):
        check_creation(directory, name)
        yield directory, name


@contextmanager
def removing(path: str) -> Iterator[tuple[int, str]]:
    """The open directory and the name of an entry to be removed, which is checked."""
    with _parent_of(path) as (directory, name):
        check_removal(directory, name)
        yield directory, name


@contextmanager
def _parent_of(path: str) -> Iterator[tuple[int, str]]:
    parent, name = os.path.split(path)
    directory = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield directory, name
    finally:
        os.close(directory)
