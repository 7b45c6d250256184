"""fs/walk: the tree below a directory, breadth first, as the JSON text of the response.

Entries with plain names become text together (`_add_all`), several times faster than `_visit`.
"""

from __future__ import annotations

import heapq
import os
import re
import stat
from collections import deque
from collections.abc import Iterable
from itertools import chain, islice
from operator import itemgetter
from typing import Final, NamedTuple

import msgspec

from exec_server.errors import InvalidRequest, lossy, os_error_text
from exec_server.filesystem.safe_write import GUARD
from exec_server.protocol import files
from exec_server.protocol.paths import PLAIN_IN_NAME, child_uri, path_to_uri

# The reference's limits of fs/walk. The last one bounds the estimated size of the
# response; a walk that reaches it ends as truncated.
WALK_MAX_DEPTH: Final = 64
WALK_MAX_DIRECTORIES: Final = 10_000
WALK_MAX_ENTRIES: Final = 50_000
WALK_REPLY_BUDGET: Final = 4 * 1024 * 1024
_WALK_ITEM_COST: Final = 64

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(files.WalkResult).decode
# Names joined by slashes, which no name contains.
_plain_names = re.compile(rf"[{PLAIN_IN_NAME}/]*").fullmatch
# The text of an entry after its URI.
_FILE: Final = '","kind":"file"}'
_DIRECTORY: Final = '","kind":"directory"}'
# A name in a directory and its entry, None if the name is not UTF-8 and had to be changed.
_NamedEntry = tuple[str, os.DirEntry[str] | None]
_name = itemgetter(0)


def walk(params: files.WalkParams) -> files.WalkResult:
    """The tree below a directory, breadth first, names in order of their code points."""
    return _decode(walk_text(params))


def walk_text(params: files.WalkParams) -> bytes:
    """The JSON text of the result of `walk`."""
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
        return _encode(files.WalkResult([], [], False))
    walker = _Walker(options)
    uri = params.path.uri.rstrip("/") if root != "/" else "file://"
    walker.run(_Directory(root, uri, 0))
    return walker.text()


class _Directory(NamedTuple):
    path: str
    uri: str
    depth: int


class _BudgetSpentError(Exception):
    """The walk reached a limit and ends."""


class _Walker:
    def __init__(self, options: files.WalkOptions) -> None:
        self._entries: list[str] = []  # JSON text of one or more entries each
        self._errors: list[files.WalkError] = []
        self._is_truncated = False
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
            self._is_truncated = True

    def text(self) -> bytes:
        entries = ",".join(self._entries).encode()
        is_truncated = b"true" if self._is_truncated else b"false"
        errors = _encode(self._errors)
        return b'{"entries":[%b],"errors":%b,"truncated":%b}' % (entries, errors, is_truncated)

    def _list(self, directory: _Directory) -> None:
        try:
            GUARD.check_readable(directory.path)
            with os.scandir(directory.path) as scan:
                listed = list(islice(scan, self._names_left))
                if self._add_all(directory, listed):
                    listed.clear()
                names = self._names(chain(listed, scan))
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

    def _add_all(self, directory: _Directory, listed: list[os.DirEntry[str]]) -> bool:
        """Add all entries at once; False, and nothing added, if one is special or at a limit."""
        kinds = _plain_kinds(listed)
        if kinds is None or len(kinds) >= self._names_left or not _has_plain_children(directory):
            return False
        names = sorted(kinds)
        subdirectories = [name for name in names if kinds[name] is _DIRECTORY]
        if subdirectories and self._options.follow_directory_symlinks:
            return False  # each of them has to be looked up
        cost = sum(map(len, names)) + (len(directory.uri) + 1 + _WALK_ITEM_COST) * len(names)
        if cost > self._budget:
            return False
        self._budget -= cost
        self._names_left -= len(names)
        if names:
            before = f'{{"path":"{directory.uri}/'
            if subdirectories:
                text = ",".join([f"{before}{name}{kinds[name]}" for name in names])
            else:
                text = f"{before}{f'{_FILE},{before}'.join(names)}{_FILE}"
            self._entries.append(text)
        for name in subdirectories:
            self._enter_below(directory, name, f"{directory.uri}/{name}")
        return True

    def _names(self, scan: Iterable[os.DirEntry[str]]) -> list[_NamedEntry]:
        """The sorted names; of a huge directory only as many as the limit still allows."""
        limit = self._names_left + 1
        names: list[_NamedEntry] = []
        for entry in scan:
            if entry.is_symlink() and not os.path.exists(entry.path):
                continue
            name = lossy(entry.name)
            names.append((name, entry if name == entry.name else None))
            if len(names) >= 2 * limit + 1000:
                names = heapq.nsmallest(limit, names, key=_name)
        names.sort(key=_name)
        return names

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
            self._enter_below(directory, name, uri)
        elif is_file:
            self._add(uri, "file")

    def _enter_below(self, directory: _Directory, name: str, uri: str) -> None:
        hidden = self._options.prune_hidden_directories and name[0] == "."
        if directory.depth < self._options.max_depth and not hidden:
            self._enter(
                _Directory(f"{directory.path.rstrip('/')}/{name}", uri, directory.depth + 1)
            )

    def _enter(self, directory: _Directory) -> None:
        inode = None
        if self._options.follow_directory_symlinks:
            info = os.stat(directory.path)
            inode = info.st_dev, info.st_ino
            if inode in self._seen:
                return
        if self._directories_left == 0:
            self._is_truncated = True
            return
        if inode is not None:
            self._seen.add(inode)
        self._directories_left -= 1
        self._queue.append(directory)

    def _add(self, uri: str, kind: files.EntryKind) -> None:
        self._spend(len(uri))
        self._entries.append(_encode(files.WalkEntry(uri, kind)).decode())

    def _fail(self, uri: str, message: str) -> None:
        self._spend(len(uri) + len(message.encode()))
        self._errors.append(files.WalkError(uri, message))

    def _spend(self, length: int) -> None:
        cost = length + _WALK_ITEM_COST
        if cost > self._budget:
            raise _BudgetSpentError
        self._budget -= cost


def _has_plain_children(directory: _Directory) -> bool:
    """Whether the URI of a child is that of the directory with the name after it."""
    # Below `/`, or below an opaque URI, a plain child could mean a path of another platform.
    return directory.uri != "file://" and "%00" not in directory.uri


def _plain_kinds(listed: list[os.DirEntry[str]]) -> dict[str, str] | None:
    """The end of the text of each entry by name, None if one of them is special."""
    kinds: dict[str, str] = {}
    try:
        for entry in listed:
            if entry.is_file(follow_symlinks=False):
                kinds[entry.name] = _FILE
            elif entry.is_dir(follow_symlinks=False):
                kinds[entry.name] = _DIRECTORY
            else:
                return None
    except OSError:
        return None  # the walk reports this entry
    return kinds if _plain_names("/".join(kinds)) else None


def _walk_uri(directory: _Directory, name: str) -> str:
    if not _has_plain_children(directory):
        return path_to_uri(f"{directory.path.rstrip('/')}/{name}")
    return child_uri(directory.uri, name)
