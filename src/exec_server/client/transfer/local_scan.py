"""The scan of a local tree: the source of an upload, or what the target of a download has."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from typing import Final

from exec_server.client.transfer.exclusion import IGNORE_FILE, IGNORE_FILE_BYTES, TreeFilter
from exec_server.client.transfer.local_directory import file_mode, link_target
from exec_server.client.transfer.mirror import Item
from exec_server.client.transfer.plan import MAX_ENTRIES, join
from exec_server.errors import InvalidRequest

_KINDS: Final = {stat.S_IFREG: "f", stat.S_IFDIR: "d", stat.S_IFLNK: "l"}


def scan(
    top: str, fail: Callable[[str, OSError], None], tree_filter: TreeFilter | None = None
) -> list[Item]:
    """The tree, each directory before its entries; a symlink at the top counts as its target.

    `fail` is called for an unreadable entry, and raises if that is the top.
    """
    items = []
    for path, metadata in _walk(top, fail, tree_filter):
        kind = _KINDS.get(stat.S_IFMT(metadata.st_mode), "?")
        try:
            target = link_target(join(top, path)) if kind == "l" else ""
        except OSError as error:
            fail(path, error)
            continue
        items.append(
            Item(path, kind, file_mode(metadata), metadata.st_size, version(metadata), target)
        )
        if len(items) > MAX_ENTRIES:
            raise InvalidRequest(f"{top}: more than {MAX_ENTRIES} entries")
    return items


def _walk(
    top: str, fail: Callable[[str, OSError], None], tree_filter: TreeFilter | None
) -> Iterator[tuple[str, os.stat_result]]:
    metadata = os.stat(top)
    yield "", metadata
    unvisited = [""] if stat.S_ISDIR(metadata.st_mode) else []
    while unvisited:
        directory = unvisited.pop()
        try:
            with os.scandir(join(top, directory)) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
            if tree_filter is not None:
                _enter(tree_filter, top, directory, entries)
        except OSError as error:
            fail(directory, error)
            continue
        for entry in entries:
            path = f"{directory}/{entry.name}" if directory else entry.name
            is_directory = entry.is_dir(follow_symlinks=False)
            if tree_filter is not None and tree_filter.excludes(path, is_directory=is_directory):
                continue
            try:
                metadata = entry.stat(follow_symlinks=False)
            except OSError as error:
                fail(path, error)
                continue
            yield path, metadata
            if is_directory:
                unvisited.append(path)


def _enter(
    tree_filter: TreeFilter, top: str, directory: str, entries: list[os.DirEntry[str]]
) -> None:
    """Read the ignore file of a directory; raises OSError, also for one with hostile patterns."""
    content = b""
    for entry in entries:
        is_wanted = entry.name == IGNORE_FILE and entry.is_file(follow_symlinks=False)
        if is_wanted and tree_filter.reads_ignore_file(directory):
            with open(entry.path, "rb", buffering=0, opener=_open_plain) as file:
                content = file.read(IGNORE_FILE_BYTES + 1)
    try:
        tree_filter.enter(directory, content)
    except InvalidRequest as error:
        raise OSError(errno.EINVAL, str(error), join(top, directory)) from None


def _open_plain(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def version(metadata: os.stat_result) -> str:
    """A text that changes with the content of a file."""
    return f"{metadata.st_size} {metadata.st_mtime_ns}"
