"""fs/glob and fs/diskUsage.

A pattern has names separated by `/`. In a name, `*` and `?` match any characters, `[…]` one of
several, `{a,b}` alternatives; the name `**` matches any number of directories. Hidden names match
like others. Links to directories are listed but not entered.
"""

from __future__ import annotations

import fnmatch
import os
import re
import time
from collections.abc import Iterable, Iterator
from typing import Final

from exec_server.errors import InvalidParams
from exec_server.filesystem.path_guard import GUARD
from exec_server.protocol import file_changes as wire

# Results of one search: the answer stays far below the limit of a message.
MAX_RESULTS: Final = 10_000
# Entries that one search looks at, within about a second of processor time.
MAX_ENTRIES: Final = 200_000
# A search with many alternatives, or on a slow disk, ends after this time as truncated.
MAX_SECONDS: Final = 5.0
# Alternatives of all `{a,b}` of a pattern, and names between its slashes. Each alternative is
# searched for in one and the same walk, so the work grows with their number.
MAX_ALTERNATIVES: Final = 64
MAX_NAMES: Final = 64
MAX_PATTERN: Final = 4096

_OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK | os.O_CLOEXEC
_ANY_DEPTH: Final = "**"
_BRACES: Final = re.compile(r"\{([^{}]*)\}")

Names = tuple[re.Pattern[str] | None, ...]  # None: any depth
# Positions in the patterns that the path so far has reached: (pattern, name).
State = frozenset[tuple[int, int]]


def glob(params: wire.GlobParams) -> wire.GlobResult:
    """The paths below a directory that match a pattern; unreadable directories are skipped."""
    limit = min(params.limit, MAX_RESULTS)
    if limit < 1:
        raise InvalidParams("limit must be at least 1")
    patterns = _Patterns(params.pattern)
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


class _Patterns:
    """The alternatives of a pattern as an automaton over names."""

    def __init__(self, pattern: str) -> None:
        if not pattern or len(pattern) > MAX_PATTERN or "\0" in pattern:
            raise InvalidParams(f"pattern must have 1 to {MAX_PATTERN} characters")
        if pattern.startswith("/"):
            raise InvalidParams("pattern must be relative to the path that is searched")
        self._patterns = [self._names(each) for each in _alternatives(pattern)]

    def _names(self, pattern: str) -> Names:
        names = [name for name in pattern.split("/") if name not in ("", ".")]
        if ".." in names:
            raise InvalidParams("pattern must not contain '..'")
        if not names or len(names) > MAX_NAMES:
            raise InvalidParams(f"pattern must have 1 to {MAX_NAMES} names")
        return tuple(
            None if name == _ANY_DEPTH else re.compile(fnmatch.translate(name)) for name in names
        )

    def start(self) -> State:
        return frozenset(self._closure((index, 0) for index in range(len(self._patterns))))

    def step(self, state: State, name: str) -> State:
        """The state below a directory in `state`, after this name."""
        reached = []
        for index, position in state:
            names = self._patterns[index]
            if position == len(names):
                continue
            wanted = names[position]
            if wanted is None:
                reached.append((index, position))
            elif wanted.match(name):
                reached.append((index, position + 1))
        return frozenset(self._closure(reached))

    def _closure(self, positions: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Positions with those that follow a `**` which matches no directory."""
        for index, reached in positions:
            names = self._patterns[index]
            yield index, reached
            for position in range(reached, len(names)):
                if names[position] is not None:
                    break
                yield index, position + 1

    def is_match(self, state: State) -> bool:
        return any(position == len(self._patterns[index]) for index, position in state)

    def may_continue(self, state: State) -> bool:
        return any(position < len(self._patterns[index]) for index, position in state)


def _alternatives(pattern: str) -> list[str]:
    """A pattern for each combination of the alternatives in braces."""
    pending, done = [pattern], []
    while pending:
        text = pending.pop()
        match = _BRACES.search(text)
        if match is None:
            done.append(text)
        else:
            words = match[1].split(",")
            pending += [f"{text[: match.start()]}{word}{text[match.end() :]}" for word in words]
        if len(pending) + len(done) > MAX_ALTERNATIVES:
            raise InvalidParams(f"pattern must have at most {MAX_ALTERNATIVES} alternatives")
    return done


class _Search:
    def __init__(self, patterns: _Patterns, limit: int) -> None:
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
