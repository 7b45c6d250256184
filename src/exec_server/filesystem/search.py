"""fs/glob and fs/diskUsage, and TreeScan: the walk of every search.

`glob_patterns` has the dialect of patterns. Links to directories are listed but not entered.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

from exec_server.errors import InvalidParams
from exec_server.filesystem.glob_patterns import GlobPatterns
from exec_server.filesystem.path_guard import GUARD
from exec_server.printable import lossy
from exec_server.protocol import files as wire

# Results of one search: the answer stays far below the limit of a message.
MAX_RESULTS: Final = 10_000
# Entries that one search looks at, within about a second of processor time.
MAX_ENTRIES: Final = 200_000
# A search with many alternatives, or on a slow disk, ends after this time as truncated.
MAX_SECONDS: Final = 5.0

_OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK | os.O_CLOEXEC


def glob(params: wire.GlobParams) -> wire.GlobResult:
    """The paths below a directory that match a pattern; unreadable directories are skipped."""
    limit = min(params.limit, MAX_RESULTS)
    if limit < 1:
        raise InvalidParams("limit must be at least 1")
    patterns = GlobPatterns(params.pattern)
    root = params.path.native()
    GUARD.check_readable(root)
    os.close(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))  # raises if it cannot be
    matches: list[str] = []
    is_truncated = False
    try:
        for path in _matches(patterns, TreeScan(root)):
            if len(matches) == limit:
                raise EnoughError
            matches.append(path)
    except EnoughError:
        is_truncated = True
    paths = [lossy(path) for path in sorted(matches)]
    return wire.GlobResult(paths, is_truncated)


def _matches(patterns: GlobPatterns, scan: TreeScan) -> Iterator[str]:
    pending = [("", patterns.start())]
    while pending:
        relative, state = pending.pop()
        below = []
        for entry in scan.entries(relative):
            reached = patterns.step(state, entry.name)
            path = f"{relative}{entry.name}"
            if patterns.is_match(reached):
                yield path
            if entry.is_directory and patterns.may_continue(reached):
                below.append((f"{path}/", reached))
        pending += sorted(below, reverse=True, key=lambda item: item[0])


def disk_usage(params: wire.DiskUsageParams) -> wire.DiskUsageResult:
    """The size and free space of the file system of a path."""
    path = params.path.native()
    GUARD.check_readable(path)
    found = os.statvfs(path)
    return wire.DiskUsageResult(
        found.f_blocks * found.f_frsize,
        found.f_bfree * found.f_frsize,
        found.f_bavail * found.f_frsize,
    )


class EnoughError(Exception):
    """A search has reached a limit and ends as truncated."""


class ScannedEntry(NamedTuple):
    """An entry of a directory; a link is neither a file nor a directory."""

    name: str
    is_directory: bool
    is_file: bool


class TreeScan:
    """The directories below a root, for one search within its limits."""

    def __init__(self, root: str) -> None:
        self.deadline = time.monotonic() + MAX_SECONDS
        self._root = root.rstrip("/")
        self._seen = 0

    def path(self, relative: str) -> str:
        return f"{self._root}/{relative}"

    def entries(self, relative: str) -> Iterator[ScannedEntry]:
        """The entries of a directory, as far as they can be read; raises EnoughError."""
        try:
            directory = os.open(self.path(relative), _OPEN_DIRECTORY)
        except OSError:
            return
        try:
            GUARD.check_opened(directory, writing=False)
            with os.scandir(directory) as scan:
                for entry in scan:
                    self._count()
                    yield ScannedEntry(
                        entry.name,
                        entry.is_dir(follow_symlinks=False),
                        entry.is_file(follow_symlinks=False),
                    )
        except OSError:
            pass
        finally:
            os.close(directory)

    def _count(self) -> None:
        self._seen += 1
        if self._seen > MAX_ENTRIES or (self._seen % 256 == 0 and time.monotonic() > self.deadline):
            raise EnoughError
