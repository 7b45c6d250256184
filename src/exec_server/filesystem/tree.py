"""Operations on directory trees: walk, copy, remove. None of them recurses.

Other programs may change a tree during an operation. Removing never follows a link, not even
one that is put in its way meanwhile; copying and walking accept the tree as they find it.
"""

from __future__ import annotations

import errno
import heapq
import os
import stat
from collections import deque
from typing import Final, NamedTuple

from exec_server.errors import InternalError, InvalidRequest, os_error_text
from exec_server.filesystem import safe_write
from exec_server.filesystem.path_guard import GUARD
from exec_server.protocol import files
from exec_server.protocol.paths import child_uri, path_to_uri

# The reference's limits of fs/walk. The last one bounds the estimated size of the
# response; a walk that reaches it ends as truncated.
WALK_MAX_DEPTH: Final = 64
WALK_MAX_DIRECTORIES: Final = 10_000
WALK_MAX_ENTRIES: Final = 50_000
WALK_REPLY_BUDGET: Final = 4 * 1024 * 1024
_WALK_ITEM_COST: Final = 64

_OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_SOURCE: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC


def walk(params: files.WalkParams) -> files.WalkResult:
    """The tree below a directory, breadth first, names in order of their code points."""
    options = params.options
    if options.max_directories == 0 or options.max_entries == 0:
        raise InvalidRequest("filesystem walk limits must be greater than zero")
    if (
        options.max_depth > WALK_MAX_DEPTH
        or options.max_directories > WALK_MAX_DIRECTORIES
        or options.max_entries > WALK_MAX_ENTRIES
    ):
        raise InvalidRequest(
            f"filesystem walk limits exceed maximums: depth={WALK_MAX_DEPTH}, "
            f"directories={WALK_MAX_DIRECTORIES}, entries={WALK_MAX_ENTRIES}"
        )
    root = params.path.native()
    info = os.stat(root)
    linked = not options.follow_directory_symlinks and os.path.islink(root)
    if linked or not stat.S_ISDIR(info.st_mode):
        return files.WalkResult([], [], False)
    walker = _Walker(options)
    uri = params.path.uri.rstrip("/") if root != "/" else "file://"
    walker.run(_Directory(root, uri, 0))
    return files.WalkResult(walker.entries, walker.errors, walker.truncated)


class _Directory(NamedTuple):
    path: str
    uri: str
    depth: int


class _Found(NamedTuple):
    """A name in a directory; `entry` is None if the name is not UTF-8 and had to be changed."""

    name: str
    entry: os.DirEntry[str] | None


class _BudgetSpentError(Exception):
    """The walk reached a limit and ends."""


class _Walker:
    def __init__(self, options: files.WalkOptions) -> None:
        self.entries: list[files.WalkEntry] = []
        self.errors: list[files.WalkError] = []
        self.truncated = False
        self._options = options
        self._budget = WALK_REPLY_BUDGET
        self._names_left = options.max_entries
        self._directories_left = options.max_directories
        self._queue: deque[_Directory] = deque()
        self._seen: set[tuple[int, int]] = set()

    def run(self, root: _Directory) -> None:
        self._enter(root)
        try:
            while self._queue:
                self._list(self._queue.popleft())
        except _BudgetSpentError:
            self.truncated = True

    def _list(self, directory: _Directory) -> None:
        try:
            names = self._names(directory.path)
        except OSError as error:
            self._fail(directory.uri, os_error_text(error))
            return
        for name, entry in names:
            if self._names_left == 0:
                raise _BudgetSpentError
            self._names_left -= 1
            uri = _walk_uri(directory, name)
            try:
                self._visit(directory, name, uri, entry)
            except OSError as error:
                self._fail(uri, os_error_text(error))

    def _names(self, path: str) -> list[_Found]:
        """The sorted names; of a huge directory only as many as the limit still allows."""
        wanted = self._names_left + 1
        found: list[_Found] = []
        GUARD.check_readable(path)
        with os.scandir(path) as scan:
            for entry in scan:
                if entry.is_symlink() and not _has_target(entry):
                    continue
                if entry.name.isascii():
                    found.append(_Found(entry.name, entry))
                else:
                    name = os.fsencode(entry.name).decode("utf-8", "replace")
                    found.append(_Found(name, entry if name == entry.name else None))
                if len(found) >= 2 * wanted + 1000:
                    found = heapq.nsmallest(wanted, found, key=_found_name)
        found.sort(key=_found_name)
        return found

    def _visit(
        self, directory: _Directory, name: str, uri: str, entry: os.DirEntry[str] | None
    ) -> None:
        path = f"{directory.path.rstrip('/')}/{name}"
        if entry is None:
            # Like the reference, look up the changed name: it usually does not exist, and the
            # walk reports that error.
            mode = os.lstat(path).st_mode
            is_link, is_directory, is_file = False, stat.S_ISDIR(mode), stat.S_ISREG(mode)
        else:
            is_link = entry.is_symlink()
            is_directory = entry.is_dir()
            is_file = not is_directory and not is_link and entry.is_file()
        if is_directory and (not is_link or self._options.follow_directory_symlinks):
            self._add(uri, "directory")
            hidden = self._options.prune_hidden_directories and name[0] == "."
            if directory.depth < self._options.max_depth and not hidden:
                self._enter(_Directory(path, uri, directory.depth + 1))
        elif is_file:
            self._add(uri, "file")

    def _enter(self, directory: _Directory) -> None:
        if self._options.follow_directory_symlinks:
            info = os.stat(directory.path)
            if (info.st_dev, info.st_ino) in self._seen:
                return
        if self._directories_left == 0:
            self.truncated = True
            return
        if self._options.follow_directory_symlinks:
            self._seen.add((info.st_dev, info.st_ino))
        self._directories_left -= 1
        self._queue.append(directory)

    def _add(self, uri: str, kind: files.EntryKind) -> None:
        self._spend(len(uri))
        self.entries.append(files.WalkEntry(uri, kind))

    def _fail(self, uri: str, message: str) -> None:
        self._spend(len(uri) + len(message.encode()))
        self.errors.append(files.WalkError(uri, message))

    def _spend(self, length: int) -> None:
        cost = length + _WALK_ITEM_COST
        if cost > self._budget:
            raise _BudgetSpentError
        self._budget -= cost


def _found_name(found: _Found) -> str:
    return found.name


def _has_target(entry: os.DirEntry[str]) -> bool:
    try:
        entry.stat()
    except OSError:
        return False
    return True


def _walk_uri(directory: _Directory, name: str) -> str:
    # Below `/`, or below an opaque URI, a plain child could mean a path of another platform.
    if directory.uri == "file://" or "%00" in directory.uri:
        return path_to_uri(f"{directory.path.rstrip('/')}/{name}")
    return child_uri(directory.uri, name)


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
    """Remove all entries but directories; returns the names of the directories."""
    directories = []
    with os.scandir(directory) as scan:
        for entry in scan:
            if entry.is_dir(follow_symlinks=False):
                directories.append(entry.name)
            else:
                GUARD.check_removal(directory, entry.name)
                try:
                    os.unlink(entry.name, dir_fd=directory)
                except FileNotFoundError:
                    pass
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
        _refuse_copy_into_itself(source, destination)
        _copy_tree(source, destination)
    elif not _copy_entry(source, destination, mode):
        raise InvalidRequest("fs/copy only supports regular files, directories, and symlinks")
    return files.Done()


def _refuse_copy_into_itself(source: str, destination: str) -> None:
    real_source = os.path.realpath(source)
    real_destination = os.path.realpath(destination)
    if f"{real_destination}/".startswith(f"{real_source.rstrip('/')}/"):
        raise InvalidRequest("fs/copy cannot copy a directory to itself or one of its descendants")


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
    """Copy a regular file or a link; False if it is neither."""
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
    fd = os.open(source, _OPEN_SOURCE)
    try:
        GUARD.check_opened(fd, writing=False)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise InvalidRequest("path is not a regular file")
        try:
            if os.path.samestat(info, os.stat(destination)):
                return
        except FileNotFoundError:
            pass
        data: safe_write.Content = safe_write.FileContent(fd, info.st_size)
        if info.st_size == 0:
            data = safe_write.BytesContent(safe_write.read_all(fd, 0))
        safe_write.write(destination, data, mode=stat.S_IMODE(info.st_mode))
    finally:
        os.close(fd)
