"""LineSearch: lines of files that match a regular expression, found without other programs.

A regular expression of a client may take exponential time, and Python holds the interpreter's lock
meanwhile. So a search runs only in a process of its own (`main`, below) or in a confined worker,
in the main thread: a timer interrupts the match, and the search ends as truncated. This module
imports little, because such a process is started for each search.
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any, Final, TypeVar

from exec_server.errors import InvalidParams, RpcError
from exec_server.filesystem.glob_patterns import GlobPatterns, State
from exec_server.filesystem.path_guard import GUARD

T = TypeVar("T")

# A search ends after this time as truncated; a client waits for its answer.
MAX_SECONDS: Final = 5.0
# Entries that one search looks at, within about a second of processor time.
MAX_ENTRIES: Final = 200_000
# Matching and context lines of one answer together, and the characters in them: the answer stays
# far below the limit of a message.
MAX_LINES: Final = 50_000
MAX_CHARACTERS: Final = 4 * 1_048_576
# Characters of a line that are returned. Lines of generated files have megabytes.
SHOWN_CHARACTERS: Final = 1000
# A longer line is searched in pieces of this size: the memory of a match grows with its text.
LINE_BYTES: Final = 65_536
# The memory of a search does not depend on the size of a file.
BLOCK_BYTES: Final = 1_048_576

# The timer fires again, in case it first fired between two matches.
_INTERVAL_SECONDS: Final = 0.1
_OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK | os.O_CLOEXEC
_OPEN_FILE: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Options:
    """What to search for; `glob` and `exclude` are patterns of paths below the root."""

    root: str
    pattern: str
    literal: bool
    ignore_case: bool
    glob: str | None
    exclude: str | None
    before: int
    after: int
    limit: int


@dataclass(slots=True)
class Line:
    """A line of a file; `column` is that of its match, counted from 1, and 0 for context."""

    path: str
    number: int
    column: int
    text: str


@dataclass(slots=True)
class Found:
    """The matching lines and their context in order; a context line occurs once."""

    lines: list[Line] = field(default_factory=list)
    truncated: bool = False


class _TimeIsUp(Exception):
    """The timer has interrupted a match."""


class _Enough(Exception):
    """A limit of the answer is reached."""


class PathFilter:
    """Which paths below a root are searched."""

    def __init__(self, glob: str | None, exclude: str | None) -> None:
        self._included = _any_depth(glob)
        self._excluded = _any_depth(exclude)

    def start(self) -> _FilterState:
        return _FilterState(
            None if self._included is None else self._included.start(),
            None if self._excluded is None else self._excluded.start(),
        )

    def step(self, state: _FilterState, name: str) -> _FilterState | None:
        """The state of an entry of a directory; None if the entry is excluded."""
        included, excluded = state.included, state.excluded
        if self._included is not None and included is not None:
            included = self._included.step(included, name)
        if self._excluded is not None and excluded is not None:
            excluded = self._excluded.step(excluded, name)
            if self._excluded.is_match(excluded):
                return None
        return _FilterState(included, excluded)

    def is_searched(self, state: _FilterState) -> bool:
        """Whether a file in this state is searched."""
        if self._included is None or state.included is None:
            return True
        return self._included.is_match(state.included)

    def is_path_searched(self, path: str) -> bool:
        """Whether the file at this path below the root is searched."""
        state: _FilterState | None = self.start()
        for name in path.split("/"):
            state = state and self.step(state, name)
        return state is not None and self.is_searched(state)


@dataclass(frozen=True, slots=True)
class _FilterState:
    included: State | None
    excluded: State | None


def _any_depth(pattern: str | None) -> GlobPatterns | None:
    """The patterns of a filter; one without a slash matches names at any depth."""
    if pattern is None:
        return None
    return GlobPatterns(pattern if "/" in pattern else f"**/{pattern}")


class LineSearch:
    """One search; `run` is called once, in the main thread."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._filter = PathFilter(options.glob, options.exclude)
        self._found = Found()
        self._matches = 0
        self._characters = 0
        self._entries = 0
        self._is_late = False
        self._is_matching = False

    def run(self) -> Found:
        """Search all files; raises InvalidParams for the pattern and OSError for the root."""
        with self._timer():
            try:
                self._regex = self._matched(self._compile)
                self._search_tree()
            except (_TimeIsUp, _Enough):
                self._found.truncated = True
        return self._found

    # ---- time -------------------------------------------------------------------------

    @contextmanager
    def _timer(self) -> Iterator[None]:
        previous = signal.signal(signal.SIGALRM, self._on_alarm)
        timer = signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS, _INTERVAL_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, *timer)
            signal.signal(signal.SIGALRM, previous)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        self._is_late = True
        if self._is_matching:  # elsewhere an exception would leave descriptors open
            self._is_matching = False
            raise _TimeIsUp

    def _matched(self, function: Callable[..., T], *arguments: object) -> T:
        """Call a function of `re`, which the timer may interrupt."""
        self._is_matching = True
        try:
            return function(*arguments)
        finally:
            self._is_matching = False

    def _check_time(self) -> None:
        if self._is_late:
            raise _TimeIsUp

    # ---- the tree ---------------------------------------------------------------------

    def _compile(self) -> re.Pattern[str]:
        options = self._options
        pattern = re.escape(options.pattern) if options.literal else options.pattern
        try:
            return re.compile(pattern, re.IGNORECASE if options.ignore_case else 0)
        except (re.error, OverflowError, RecursionError) as error:
            raise InvalidParams(f"pattern is not a regular expression: {error}") from None

    def _search_tree(self) -> None:
        """Search the root, and everything below it in the order of names."""
        root = self._options.root
        descriptor = os.open(root, _OPEN_FILE)
        try:
            GUARD.check_opened(descriptor, writing=False)
            if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                self._search_file(descriptor, os.path.basename(root))
                return
        finally:
            os.close(descriptor)
        pending = self._entries_of("", self._filter.start())
        while pending:
            relative, state, is_directory = pending.pop()
            self._check_time()
            if is_directory:
                pending += self._entries_of(f"{relative}/", state)
            else:
                self._search_below(relative)

    def _entries_of(
        self, relative: str, state: _FilterState
    ) -> list[tuple[str, _FilterState, bool]]:
        """The entries of a directory to search, the first one last; none if it is unreadable."""
        entries = []
        for name, is_directory in self._list(relative):
            reached = self._filter.step(state, name)
            if reached is not None and (is_directory or self._filter.is_searched(reached)):
                entries.append((f"{relative}{name}", reached, is_directory))
        return sorted(entries, key=lambda entry: entry[0], reverse=True)

    def _list(self, relative: str) -> list[tuple[str, bool]]:
        try:
            directory = os.open(f"{self._options.root.rstrip('/')}/{relative}", _OPEN_DIRECTORY)
        except OSError:
            return []
        try:
            GUARD.check_opened(directory, writing=False)
            with os.scandir(directory) as scan:
                return [found for entry in scan if (found := self._kind(entry)) is not None]
        except OSError:
            return []
        finally:
            os.close(directory)

    def _kind(self, entry: os.DirEntry[str]) -> tuple[str, bool] | None:
        """The name of a file or directory, and whether it is a directory; links are skipped."""
        self._entries += 1
        if self._entries > MAX_ENTRIES:
            raise _Enough
        if entry.is_dir(follow_symlinks=False):
            return entry.name, True
        return (entry.name, False) if entry.is_file(follow_symlinks=False) else None

    def _search_below(self, relative: str) -> None:
        path = f"{self._options.root.rstrip('/')}/{relative}"
        try:
            descriptor = os.open(path, _OPEN_FILE | os.O_NOFOLLOW)
        except OSError:
            return
        try:
            GUARD.check_opened(descriptor, writing=False)
            self._search_file(descriptor, relative)
        except OSError:
            pass  # unreadable, or hidden by the policy
        finally:
            os.close(descriptor)

    # ---- one file ---------------------------------------------------------------------

    def _search_file(self, descriptor: int, path: str) -> None:
        """Search a regular file; one with a null byte is binary and has no lines."""
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return
        shown = os.fsencode(path).decode("utf-8", "replace")
        first, matches, characters = len(self._found.lines), self._matches, self._characters
        context = _Context(self._options.before, self._options.after)
        for number, text in _lines(descriptor):
            if text is None:
                del self._found.lines[first:]
                self._matches, self._characters = matches, characters
                return
            self._check_time()
            match = self._matched(self._regex.search, text)
            if match is not None:
                for before, earlier in context.matched():
                    self._add(Line(shown, before, 0, earlier))
                self._count_match(shown, number, text)
                self._add(Line(shown, number, match.start() + 1, text))
            elif context.passed(number, text):
                self._add(Line(shown, number, 0, text))

    def _count_match(self, path: str, number: int, text: str) -> None:
        self._matches += 1
        if self._matches > self._options.limit:
            self._add(Line(path, number, 0, text))  # perhaps the context of the last match
            raise _Enough

    def _add(self, line: Line) -> None:
        # Bytes that are not UTF-8 were surrogates for the search.
        shown = line.text[:SHOWN_CHARACTERS].rstrip("\r")
        line.text = shown.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        self._characters += len(line.text) + len(line.path)
        if len(self._found.lines) >= MAX_LINES or self._characters > MAX_CHARACTERS:
            raise _Enough
        self._found.lines.append(line)


class _Context:
    """Which lines around matches are part of the result."""

    def __init__(self, before: int, after: int) -> None:
        self._recent: deque[tuple[int, str]] = deque(maxlen=before)
        self._after = after
        self._remaining = 0

    def matched(self) -> list[tuple[int, str]]:
        """The lines before a match that are not part of the result yet."""
        lines = list(self._recent)
        self._recent.clear()
        self._remaining = self._after
        return lines

    def passed(self, number: int, text: str) -> bool:
        """Whether a line without a match follows one closely; it is remembered otherwise."""
        if self._remaining:
            self._remaining -= 1
            return True
        self._recent.append((number, text))
        return False


def _lines(descriptor: int) -> Iterator[tuple[int, str | None]]:
    """The numbered lines of a file, long ones in pieces; None as the text once it is binary."""
    number = 1
    rest = b""
    while data := os.read(descriptor, BLOCK_BYTES):
        if b"\0" in data:
            yield number, None
            return
        *complete, rest = (rest + data).split(b"\n")
        for line in complete:
            yield from ((number, piece) for piece in _pieces(line))
            number += 1
        while len(rest) > LINE_BYTES:
            piece, rest = rest[:LINE_BYTES], rest[LINE_BYTES:]
            yield number, piece.decode("utf-8", "surrogateescape")
    if rest:
        yield number, rest.decode("utf-8", "surrogateescape")


def _pieces(line: bytes) -> Iterator[str]:
    for start in range(0, max(len(line), 1), LINE_BYTES):
        yield line[start : start + LINE_BYTES].decode("utf-8", "surrogateescape")


# ---- a process for one search -----------------------------------------------------------


def perform(request: bytes) -> dict[str, Any]:
    """The answer to the options of a search as JSON."""
    options = json.loads(request)
    try:
        found = LineSearch(Options(**options)).run()
    except OSError as error:
        return {"errno": error.errno}
    except RpcError as error:
        return {"refusal": error.message}
    return asdict(found)


def main() -> None:
    """Read the options from stdin and write the answer to stdout."""
    from exec_server.host import libc  # not for searches in the server or in a worker

    libc.hide_memory()
    libc.name_process(b"exec-search")
    sys.stdout.write(json.dumps(perform(sys.stdin.buffer.read())))
