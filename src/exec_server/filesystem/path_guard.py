"""PathGuard: the checks of a confined file worker that its mounts cannot make.

Mounts cannot keep a name missing, nor deny files by pattern as they come and go, and replacing a
directory on the host detaches the mounts on it. So the functions of this package that create,
remove or open entries ask the guard right before they act, with the descriptor that they are
going to use: a link or rename in between does not change the file that was checked. In the
server itself the guard has no rules and every check passes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

# The error number that an operation on a path gets, 0 for none; `writing` is any change.
PathCheck = Callable[[str, bool], int]
# The error number for renaming a directory, 0 for none.
TreeCheck = Callable[[str], int]
# The kernel appends this to the path of a removed file.
_DELETED: Final = " (deleted)"


class PathGuard:
    """Rules for paths. Each `check_` method raises OSError if a rule denies the operation."""

    def __init__(self) -> None:
        self._forbidden_names: set[tuple[int, int, str]] = set()
        self._path_checks: list[PathCheck] = []
        self._tree_checks: list[TreeCheck] = []

    def forbid_name(self, device: int, inode: int, name: str) -> None:
        """Deny the creation and removal of this name in that directory."""
        self._forbidden_names.add((device, inode, name))

    def add_path_check(self, check: PathCheck) -> None:
        """Call this check for every path that is opened, created or removed; needs /proc."""
        self._path_checks.append(check)

    def add_tree_check(self, check: TreeCheck) -> None:
        """Call this check for every directory that is renamed, with its path."""
        self._tree_checks.append(check)

    def check_tree_rename(self, directory: int, name: str) -> None:
        """Check a directory that is to be renamed together with everything below it."""
        if self._tree_checks:
            path = f"{_path_of(directory).rstrip('/')}/{name}"
            for check in self._tree_checks:
                if number := check(path):
                    raise OSError(number, os.strerror(number))

    @property
    def has_rules(self) -> bool:
        return bool(self._forbidden_names or self._path_checks)

    def check_creation(self, directory: int, name: str) -> None:
        """Check an entry that is to be created in an open directory.

        The error for an existing entry is the kernel's, but it is raised here: the entry may be
        removed before the kernel looks.
        """
        try:
            self.check_removal(directory, name)
        except OSError as refusal:
            try:
                os.lstat(name, dir_fd=directory)
            except FileNotFoundError:
                raise refusal from None
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None

    def check_removal(self, directory: int, name: str) -> None:
        """Check an entry that is to be removed from an open directory."""
        if self._forbidden_names:
            info = os.fstat(directory)
            if (info.st_dev, info.st_ino, name) in self._forbidden_names:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        if self._path_checks:
            self._check_path(f"{_path_of(directory).rstrip('/')}/{name}", writing=True)

    def check_opened(self, descriptor: int, *, writing: bool) -> None:
        """Check an open file or directory."""
        if self._path_checks:
            path = _path_of(descriptor)
            self._check_path(path, writing=writing)
            if path.endswith(_DELETED):
                self._check_path(path.removesuffix(_DELETED), writing=writing)

    def check_named(self, path: str) -> None:
        """Check a path as the client spelt it, before any link is followed.

        A file that is moved while it is being opened has another path afterwards.
        """
        if self._path_checks:
            self._check_path(path, writing=False)

    def check_readable(self, path: str) -> None:
        """Check the file or directory that a path leads to."""
        if self._path_checks:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                self.check_opened(descriptor, writing=False)
            finally:
                os.close(descriptor)

    def _check_path(self, path: str, *, writing: bool) -> None:
        for check in self._path_checks:
            number = check(path, writing)
            if number:
                raise OSError(number, os.strerror(number))

    @contextmanager
    def creating(self, path: str) -> Iterator[tuple[int, str]]:
        """The open parent directory and the name of an entry to create, after its check."""
        with _parent_of(path) as (directory, name):
            self.check_creation(directory, name)
            yield directory, name

    @contextmanager
    def removing(self, path: str) -> Iterator[tuple[int, str]]:
        """The open parent directory and the name of an entry to remove, after its check."""
        with _parent_of(path) as (directory, name):
            self.check_removal(directory, name)
            yield directory, name


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


@contextmanager
def _parent_of(path: str) -> Iterator[tuple[int, str]]:
    parent, name = os.path.split(path)
    directory = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield directory, name
    finally:
        os.close(directory)


# The guard of this process. A worker serves one policy, adds its rules once, and ends with it.
GUARD: Final = PathGuard()
