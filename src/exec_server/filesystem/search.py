"""fs/glob and fs/diskUsage.

`glob_patterns` has the dialect of patterns. Links to directories are listed but not entered.
"""

from __future__ import annotations

import os
import time
from typing import Final

from exec_server.errors import InvalidParams
from exec_server.filesystem.glob_patterns import GlobPatterns, State
from exec_server.filesystem.path_guard import GUARD
from exec_server.protocol import file_changes as wire

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
    search = _Search(patterns, limit)
    search.run(root)
    paths = [os.fsencode(path).decode("utf-8", "replace") for path in sorted(search.found)]
    return wire.GlobResult(paths, search.is_truncated)


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


class _Search:
    def __init__(self, patterns: GlobPatterns, limit: int) -> None:
        self._patterns = patterns
        self._limit = limit
        self._seen = 0
        self._deadline = time.monotonic() + MAX_SECONDS
        self.found: list[str] = []
        self.is_truncated = False

    def run(self, root: str) -> None:
        pending = [("", self._patterns.start())]
        while pending and not self.is_truncated:
            relative, state = pending.pop()
            pending += self._scan(root, relative, state)

    def _scan(self, root: str, relative: str, state: State) -> list[tuple[str, State]]:
        """Look at the entries of one directory; returns the directories to look at next."""
        try:
            directory = os.open(f"{root.rstrip('/')}/{relative}", _OPEN_DIRECTORY)
        except OSError:
            return []
        try:
            GUARD.check_opened(directory, writing=False)
            return self._scan_open(directory, relative, state)
        except OSError:
            return []
        finally:
            os.close(directory)

    def _scan_open(self, directory: int, relative: str, state: State) -> list[tuple[str, State]]:
        below = []
        with os.scandir(directory) as scan:
            for entry in scan:
                self._seen += 1
                if self._seen > MAX_ENTRIES or (
                    self._seen % 256 == 0 and time.monotonic() > self._deadline
                ):
                    self.is_truncated = True
                    return []
                reached = self._patterns.step(state, entry.name)
                if not reached:
                    continue
                name = f"{relative}{entry.name}"
                if self._patterns.is_match(reached) and not self._add(name):
                    return []
                if self._patterns.may_continue(reached) and entry.is_dir(follow_symlinks=False):
                    below.append((f"{name}/", reached))
        return sorted(below, reverse=True, key=lambda item: item[0])

    def _add(self, path: str) -> bool:
        if len(self.found) >= self._limit:
            self.is_truncated = True
            return False
        self.found.append(path)
        return True
