"""PatchWriter: writes the files of a patch, and undoes all of it if one cannot be written.

Confined commands may rename directories and put links in their place at any moment. So new entries
are made and removed through descriptors of their directories, and an entry is removed only if it
is still the one that was made. The guard is asked like before every other change.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Self

from exec_server.filesystem import safe_write
from exec_server.filesystem.path_guard import GUARD
from exec_server.patching.model import PatchFailed
from exec_server.patching.patch import FileChange

# New directories of one patch: a descriptor for each one stays open until the end, and descriptors
# are shared by all clients of the server.
PATCH_DIRECTORIES: Final = 256

_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_ENTRY: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


class PatchWriter:
    """The changes of one patch, for `with`; leaving without `keep` undoes them."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._descriptors: list[int] = []
        self._modes: dict[str, int] = {}  # of the files that were removed
        self._new_directories = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for undo in reversed(self._undo):
            with suppress(OSError):
                undo()
        for descriptor in self._descriptors:
            os.close(descriptor)

    def keep(self) -> None:
        """Keep all changes."""
        self._undo.clear()

    def write(self, change: FileChange) -> None:
        """Change one file."""
        if change.new is None:
            self._remove(change)
            return
        mode = change.mode
        if mode is None and change.renamed_from is not None:
            mode = self._mode_of(change.renamed_from)
        if change.old is None:
            self._add(change.path, change.new, mode)
        else:
            self._overwrite(change.path, change.old, change.new, mode)

    def _mode_of(self, path: str) -> int:
        """The permission bits of a file before it was renamed."""
        mode = self._modes.get(path)
        return _permissions(path) if mode is None else mode

    def _overwrite(self, path: str, old: bytes, new: bytes, mode: int | None) -> None:
        old_mode = stat.S_IMODE(os.stat(path).st_mode)
        content = safe_write.BytesContent(old)
        self._undo.append(lambda: safe_write.write(path, content, mode=old_mode))
        safe_write.write(path, safe_write.BytesContent(new), mode=mode)

    def _remove(self, change: FileChange) -> None:
        path, old = change.path, change.old
        assert old is not None
        info = os.lstat(path)
        target = os.readlink(path) if stat.S_ISLNK(info.st_mode) else None
        self._modes[path] = _permissions(path)
        with GUARD.removing(path) as (directory, name):
            os.unlink(name, dir_fd=directory)
        mode = stat.S_IMODE(info.st_mode)
        if target is None:
            content = safe_write.BytesContent(old)
            self._undo.append(lambda: safe_write.write(path, content, mode=mode))
        else:
            self._undo.append(lambda: _make_link(path, target))

    def _add(self, path: str, new: bytes, mode: int | None) -> None:
        parent, name = os.path.split(path)
        self._make_directories(parent)
        directory = self._open(parent)
        if _status(directory, name) is not None:
            raise PatchFailed(f"{path} is a link that leads nowhere, or was created meanwhile")
        safe_write.write_entry(directory, name, safe_write.BytesContent(new))
        made = _status(directory, name)
        if made is not None:
            self._undo.append(lambda: _remove_made(directory, name, made))
        if mode is not None:
            _set_mode(directory, name, mode)

    def _make_directories(self, path: str) -> None:
        """Create a directory and its missing parents."""
        missing: list[str] = []
        while not os.path.lexists(path):
            missing.append(path)
            self._new_directories += 1
            if self._new_directories > PATCH_DIRECTORIES:
                raise PatchFailed(
                    f"a patch may create at most {PATCH_DIRECTORIES} directories: "
                    "create them first, or split the patch"
                )
            path = os.path.dirname(path)
        for each in reversed(missing):
            parent, name = os.path.split(each)
            directory = self._open(parent)
            GUARD.check_creation(directory, name)
            os.mkdir(name, dir_fd=directory)
            made = _status(directory, name)
            if made is not None:
                self._undo.append(_remover(directory, name, made))

    def _open(self, path: str) -> int:
        descriptor = os.open(path, _DIRECTORY)
        self._descriptors.append(descriptor)
        return descriptor


def _permissions(path: str) -> int:
    """The bits that a renamed file keeps: its owner may be another one, so not set-user-ID."""
    return stat.S_IMODE(os.stat(path).st_mode) & 0o777


def _status(directory: int, name: str) -> os.stat_result | None:
    try:
        return os.lstat(name, dir_fd=directory)
    except FileNotFoundError:
        return None


def _remover(directory: int, name: str, made: os.stat_result) -> Callable[[], None]:
    return lambda: _remove_made(directory, name, made)


def _remove_made(directory: int, name: str, made: os.stat_result) -> None:
    """Remove an entry, if it is still the one that was made."""
    found = _status(directory, name)
    if found is None or not os.path.samestat(found, made):
        return
    GUARD.check_removal(directory, name)
    if stat.S_ISDIR(found.st_mode):
        os.rmdir(name, dir_fd=directory)
    else:
        os.unlink(name, dir_fd=directory)


def _make_link(path: str, target: str) -> None:
    with GUARD.creating(path) as (directory, name):
        os.symlink(target, name, dir_fd=directory)


def _set_mode(directory: int, name: str, mode: int) -> None:
    descriptor = os.open(name, _ENTRY, dir_fd=directory)
    try:
        GUARD.check_opened(descriptor, writing=True)
        os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)
