"""Searches: fs/glob, fs/grep and fs/diskUsage. `TreeScan` lists links but does not enter them."""

from __future__ import annotations

import fnmatch
import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec
import regex

from exec_server.errors import InvalidParams, lossy
from exec_server.filesystem.line_patterns import LinePattern
from exec_server.filesystem.safe_write import GUARD
from exec_server.filesystem.syscalls import opened
from exec_server.protocol import files as wire

# Alternatives of all `{a,b}` of a pattern, and names between its slashes. Each alternative is
# searched for in one and the same walk, so the work grows with their number.
MAX_ALTERNATIVES: Final = 64
MAX_NAMES: Final = 64
MAX_PATTERN: Final = 4096

# Results of one search: the answer stays far below the limit of a message.
MAX_RESULTS: Final = 10_000
# Entries that one search looks at, within about a second of processor time.
MAX_ENTRIES: Final = 200_000
# A search with many alternatives, or on a slow disk, ends after this time as truncated.
MAX_SECONDS: Final = 5.0

# Matching and context lines of one answer together, and the characters in them: the answer stays
# far below the limit of a message.
MAX_LINES: Final = 50_000
MAX_CHARACTERS: Final = 4 * 1_048_576
# Characters of a line that are returned. Lines of generated files have megabytes.
SHOWN_CHARACTERS: Final = 1000
# The memory of a search does not depend on the size of a file. A line that is longer than a block
# is searched in pieces: the memory of a match grows with its text, by up to 150 bytes for each.
BLOCK_BYTES: Final = 131_072
# Matches of one search: the answer stays far below the limit of a message.
MAX_MATCHES: Final = 10_000
# Context lines on each side: enough to understand a match, and not the whole file.
MAX_CONTEXT: Final = 20
# A message of ripgrep with the path of a file, which has at most 4096 bytes. A longer message has
# the matching line of a file in it, and is skipped.
MESSAGE_BYTES: Final = 65_536

_ANY_DEPTH: Final = "**"
_BRACES: Final = re.compile(r"\{([^{}]*)\}")
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK
_FILE: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY

Names = tuple[re.Pattern[str] | None, ...]  # None: any depth
# Positions in the patterns that the path so far has reached: (pattern, name).
State = frozenset[tuple[int, int]]
FilterState = tuple[State, State]  # of the included and the excluded paths
# Visits the files below a root that may have a match, in the order of paths, for so many seconds.
# Returns whether it has visited them all.
Preselect = Callable[[str, LinePattern, float, Callable[[str], None]], bool]
# Runs a program with these words for at most so many seconds, and passes its output on.
RunProgram = Callable[[Sequence[str], float, Callable[[bytes], None]], None]


class GlobPatterns:
    """The alternatives of a pattern as an automaton over names.

    A pattern has names separated by `/`. In a name, `*` and `?` match any characters, `[…]` one of
    several, `{a,b}` alternatives; the name `**` matches any number of directories. Hidden names
    match like others.

    fnmatch translates the names. Libraries (wcmatch, pathspec) match whole paths; a walk has to
    know which directories cannot lead to a match, so that it does not enter them.
    """

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
    pending, expanded = [pattern], []
    while pending:
        text = pending.pop()
        match = _BRACES.search(text)
        if match is None:
            expanded.append(text)
        else:
            words = match[1].split(",")
            pending += [f"{text[: match.start()]}{word}{text[match.end() :]}" for word in words]
        if len(pending) + len(expanded) > MAX_ALTERNATIVES:
            raise InvalidParams(f"pattern must have at most {MAX_ALTERNATIVES} alternatives")
    return expanded


def glob(params: wire.GlobParams) -> wire.GlobResult:
    """The paths below a directory that match a pattern; unreadable directories are skipped."""
    limit = _checked_limit(params.limit, MAX_RESULTS)
    patterns = GlobPatterns(params.pattern)
    root = params.path.native()
    GUARD.check_readable(root)
    os.close(os.open(root, _DIRECTORY | os.O_CLOEXEC))  # raises if it cannot be
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


def _checked_limit(limit: int, maximum: int) -> int:
    if limit < 1:
        raise InvalidParams("limit must be at least 1")
    return min(limit, maximum)


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
    disk = os.statvfs(path)
    size = disk.f_frsize
    return wire.DiskUsageResult(disk.f_blocks * size, disk.f_bfree * size, disk.f_bavail * size)


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
        with suppress(OSError), opened(self.path(relative), _DIRECTORY) as directory:
            GUARD.check_opened(directory, writing=False)
            with os.scandir(directory) as scan:
                for entry in scan:
                    self._count()
                    yield ScannedEntry(
                        entry.name,
                        entry.is_dir(follow_symlinks=False),
                        entry.is_file(follow_symlinks=False),
                    )

    def _count(self) -> None:
        self._seen += 1
        if self._seen > MAX_ENTRIES or (self._seen % 256 == 0 and time.monotonic() > self.deadline):
            raise EnoughError


@dataclass(slots=True)
class MatchedLine:
    """A line of a file; `column` is that of its match, counted from 1, and 0 for context."""

    path: str
    number: int
    column: int
    text: str


@dataclass(slots=True)
class SearchResult:
    """The matching lines and their context in order; a context line occurs once."""

    lines: list[MatchedLine] = field(default_factory=list)
    counts: list[wire.GrepCount] = field(default_factory=list)
    truncated: bool = False


class PathFilter:
    """Which paths below a root are searched."""

    def __init__(self, glob: str | None, exclude: str | None) -> None:
        self._included = _any_depth(glob)
        self._excluded = _any_depth(exclude)

    def start(self) -> FilterState:
        patterns = (self._included, self._excluded)
        included, excluded = (each.start() if each else frozenset() for each in patterns)
        return included, excluded

    def step(self, state: FilterState, name: str) -> FilterState | None:
        """The state of an entry of a directory; None if the entry is excluded."""
        included, excluded = state
        if self._included is not None:
            included = self._included.step(included, name)
        if self._excluded is not None:
            excluded = self._excluded.step(excluded, name)
            if self._excluded.is_match(excluded):
                return None
        return included, excluded

    def is_searched(self, state: FilterState) -> bool:
        """Whether a file in this state is searched."""
        return self._included is None or self._included.is_match(state[0])

    def is_path_searched(self, path: str) -> bool:
        """Whether the file at this path below the root is searched."""
        state: FilterState | None = self.start()
        for name in path.split("/"):
            state = state and self.step(state, name)
        return state is not None and self.is_searched(state)


def _any_depth(pattern: str | None) -> GlobPatterns | None:
    """The patterns of a filter; one without a slash matches names at any depth."""
    if pattern is None:
        return None
    return GlobPatterns(pattern if "/" in pattern else f"**/{pattern}")


class LineSearch:
    """Finds lines in the order of paths and lines; `run` is called once. Blocking.

    A regular expression of a client may take exponential time. The module `regex` stops at a time
    limit and matches without the interpreter lock, so a search runs in a thread of the server, or
    in a confined worker.
    """

    def __init__(
        self, params: wire.GrepParams, *, is_cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        if max(params.before, params.after) > MAX_CONTEXT:
            raise InvalidParams(f"before and after must be at most {MAX_CONTEXT}")
        self._params = params
        self._limit = _checked_limit(params.limit, MAX_MATCHES)
        self._root = params.path.native()
        self._pattern = LinePattern(
            params.pattern, literal=params.literal, ignore_case=params.ignore_case
        )
        self._is_cancelled = is_cancelled
        self._filter = PathFilter(params.glob, params.exclude)
        self._scan = TreeScan(self._root)
        self._regex = _compile(self._pattern)
        self._reset()

    def _reset(self) -> None:
        self._result = SearchResult()
        self._matches = 0
        self._characters = 0

    def run(self, preselect: Preselect | None = None) -> SearchResult:
        """Search all files, or only those that `preselect` visits; raises OSError for the root."""
        try:
            self._search_root(preselect)
        except EnoughError:
            self._result.truncated = True
        return self._result

    def _search_root(self, preselect: Preselect | None) -> None:
        with opened(self._root, _FILE) as descriptor:
            GUARD.check_opened(descriptor, writing=False)
            if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                self._search_file(descriptor, os.path.basename(self._root))
                return
        if preselect is not None and not self._params.invert:
            remaining = self._remaining()
            if preselect(self._root, self._pattern, remaining, self._visit):
                return
        self._reset()
        self._search_tree()

    def _remaining(self) -> float:
        seconds = self._scan.deadline - time.monotonic()
        if seconds <= 0 or self._is_cancelled():
            raise EnoughError
        return seconds

    def _search_tree(self) -> None:
        pending = self._entries_of("", self._filter.start())
        while pending:
            relative, state, is_directory = pending.pop()
            if is_directory:
                pending += self._entries_of(f"{relative}/", state)
            else:
                self._search_below(relative)

    def _entries_of(self, relative: str, state: FilterState) -> list[tuple[str, FilterState, bool]]:
        """The entries of a directory to search, the first one last; links are skipped."""
        entries = []
        for entry in self._scan.entries(relative):
            reached = self._filter.step(state, entry.name)
            if reached is not None and (
                entry.is_directory or (entry.is_file and self._filter.is_searched(reached))
            ):
                entries.append((f"{relative}{entry.name}", reached, entry.is_directory))
        return sorted(entries, key=lambda entry: os.fsencode(entry[0]), reverse=True)

    def _visit(self, relative: str) -> None:
        """Search a file below the root, unless the filters leave it out."""
        if self._filter.is_path_searched(relative):
            self._search_below(relative)

    def _search_below(self, relative: str) -> None:
        with (
            suppress(OSError),  # unreadable, or hidden by the policy
            opened(self._scan.path(relative), _FILE | os.O_NOFOLLOW) as descriptor,
        ):
            GUARD.check_opened(descriptor, writing=False)
            self._search_file(descriptor, relative)

    def _search_file(self, descriptor: int, path: str) -> None:
        """Search a regular file; one with a null byte is binary and has no lines."""
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            return
        first, matches, characters = len(self._result.lines), self._matches, self._characters
        context = _Context(self._params.before, self._params.after)
        for block in _blocks(descriptor, info.st_size):
            if block is None:
                del self._result.lines[first:]
                self._matches, self._characters = matches, characters
                return
            columns = self._found(block, context)
            if self._params.count_only:
                context.count(columns)
                self._remaining()
            else:
                self._search_block(lossy(path), block, columns, context)
        if context.matched_lines:
            self._add_count(lossy(path), context.matched_lines)

    def _add_count(self, path: str, count: int) -> None:
        self._characters += len(path)
        if len(self._result.counts) >= self._limit or self._characters > MAX_CHARACTERS:
            raise EnoughError
        self._result.counts.append(wire.GrepCount(path, count))

    def _found(self, block: _Block, context: _Context) -> dict[int, int]:
        """The lines of a block that are searched for, and a column in each."""
        columns = self._columns(block)
        if not self._params.invert:
            return columns
        self._remaining()  # all matches are known
        if block.offset or block.is_open:
            context.has_piece |= bool(columns)
            if block.is_open:
                return {}
            has_match, context.has_piece = context.has_piece, False
            return {} if has_match else {block.number: 1}
        end = block.number + block.text.count("\n") + 1
        return {number: 1 for number in range(block.number, end) if number not in columns}

    def _search_block(
        self, path: str, block: _Block, columns: dict[int, int], context: _Context
    ) -> None:
        if block.offset:
            if columns and context.matched_line != block.number:
                self._add_match(path, block.number, columns[block.number], block.text, context)
        elif columns or context.is_open or (self._params.before and not block.is_last):
            lines = block.text.split("\n")
            passed = 0
            for number, column in columns.items():
                index = number - block.number
                self._pass(path, block.number + passed, lines[passed:index], context)
                self._add_match(path, number, column, lines[index], context)
                passed = index + 1
            self._pass(path, block.number + passed, lines[passed:], context)
        self._remaining()

    def _pass(self, path: str, first: int, lines: list[str], context: _Context) -> None:
        """Add those of some lines without a match that follow one closely."""
        for number, text in enumerate(context.passed(first, lines), first):
            self._add(MatchedLine(path, number, 0, text))

    def _add_match(self, path: str, number: int, column: int, text: str, context: _Context) -> None:
        for before, earlier in context.matched(number):
            self._add(MatchedLine(path, before, 0, earlier))
        self._matches += 1
        is_enough = self._matches > self._limit
        self._add(MatchedLine(path, number, 0 if is_enough else column, text))
        if is_enough:  # the line may be context of the last match
            raise EnoughError

    def _columns(self, block: _Block) -> dict[int, int]:
        """The column of the first match in each line, up to the limit or processor time limit."""
        text, number = block.text, block.number
        has_limit = not (self._params.invert or self._params.count_only)
        columns: dict[int, int] = {}
        position = counted = 0
        try:
            while position <= len(text):
                if has_limit and self._matches + len(columns) > self._limit:
                    break
                seconds = self._remaining()
                match = self._regex.search(text, position, concurrent=True, timeout=seconds)
                if match is None:
                    break
                start = text.rfind("\n", 0, match.start()) + 1
                number += text.count("\n", counted, start)
                counted = start
                columns[number] = match.start() - start + 1 + (0 if start else block.offset)
                position = (text.find("\n", match.start()) + 1) or len(text) + 1
        except (TimeoutError, MemoryError, EnoughError):
            self._scan.deadline = 0.0  # the next look at the time ends the search
        return columns

    def _add(self, line: MatchedLine) -> None:
        # Bytes that are not UTF-8 were surrogates for the search.
        line.text = lossy(line.text[:SHOWN_CHARACTERS].rstrip("\r"))
        self._characters += len(line.text) + len(line.path)
        if len(self._result.lines) >= MAX_LINES or self._characters > MAX_CHARACTERS:
            raise EnoughError
        self._result.lines.append(line)


def _compile(pattern: LinePattern) -> regex.Pattern[str]:
    flags = regex.V0 | regex.MULTILINE | (regex.IGNORECASE if pattern.ignore_case else 0)
    try:
        return regex.compile(pattern.exact, flags, cache_pattern=False)
    except (regex.error, OverflowError, RecursionError) as error:
        text = str(error).partition(" at position")[0]  # of the translated pattern
        raise InvalidParams(f"pattern is not a regular expression: {text}") from None


class _Context:
    """Which lines around matches are part of the result."""

    def __init__(self, before: int, after: int) -> None:
        self._recent: deque[tuple[int, str]] = deque(maxlen=before)
        self._after = after
        self._remaining = 0
        self.matched_line = 0
        self.matched_lines = 0  # if they are only counted
        self.has_piece = False  # of a long line, which matches

    def count(self, columns: Iterable[int]) -> None:
        """Count the matching lines of a block, each line once."""
        for number in columns:
            self.matched_lines += number != self.matched_line
            self.matched_line = number

    @property
    def is_open(self) -> bool:
        """Whether the next line is part of the result."""
        return self._remaining > 0

    def matched(self, number: int) -> list[tuple[int, str]]:
        """The lines before a match that are not part of the result yet."""
        lines = list(self._recent)
        self._recent.clear()
        self._remaining = self._after
        self.matched_line = number
        return lines

    def passed(self, first: int, lines: list[str]) -> list[str]:
        """Those of some lines without a match that follow one closely; others are remembered."""
        after = lines[: self._remaining]
        self._remaining -= len(after)
        start = max(len(after), len(lines) - (self._recent.maxlen or 0))
        self._recent += enumerate(lines[start:], first + start)
        return after


class _Block(NamedTuple):
    """Some lines of a file, or a piece of one after `offset` characters in earlier pieces."""

    text: str
    number: int  # of the first line
    offset: int
    is_last: bool
    is_open: bool = False  # the next block goes on with its line


def _blocks(descriptor: int, size: int) -> Iterator[_Block | None]:
    """The lines of a file in blocks without the last line break; None once it is binary."""
    number, offset = 1, 0
    partial = b""
    while data := os.read(descriptor, min(size, BLOCK_BYTES - 1) + 1):
        if b"\0" in data:
            yield None
            return
        if len(data) == size < BLOCK_BYTES:  # most files end with their first block
            yield _Block(_decode(data.removesuffix(b"\n")), 1, 0, True)
            return
        size = BLOCK_BYTES
        data = partial + data
        if offset and b"\n" in data:
            piece, _, data = data.partition(b"\n")
            yield _Block(_decode(piece), number, offset, False)
            number, offset = number + 1, 0
        end = data.rfind(b"\n") + 1
        lines, partial = data[:end], data[end:]
        if lines:
            yield _Block(_decode(lines[:-1]), number, 0, False)
            number += lines.count(b"\n")
        elif len(partial) >= BLOCK_BYTES:
            yield _Block(piece_text := _decode(partial), number, offset, False, True)
            offset, partial = offset + len(piece_text), b""
    if partial:
        yield _Block(_decode(partial), number, offset, True)


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


# On large trees ripgrep finds the files that may have a match several times as fast as they are all
# read here. It only selects files by a wider pattern: every line of an answer is one that
# `LineSearch` has found, with or without ripgrep.
def grep(
    params: wire.GrepParams,
    preselect: Preselect | None = None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> wire.GrepResult:
    """The matching lines of a file, or of the files below a directory. Blocking."""
    result = LineSearch(params, is_cancelled=is_cancelled).run(preselect)
    lines = result.lines
    matches = []
    for index, line in enumerate(lines):
        if line.column:
            first, last = line.number - params.before, line.number + params.after
            nearby = lines[max(0, index - params.before) : index + 1 + params.after]
            context = [each for each in nearby if each.path == line.path]
            before = [each.text for each in context if first <= each.number < line.number]
            after = [each.text for each in context if line.number < each.number <= last]
            matches.append(
                wire.GrepMatch(line.path, line.number, line.column, line.text, before, after)
            )
    return wire.GrepResult(matches, result.truncated, result.counts if params.count_only else None)


class Ripgrep:
    """Selects the files that may have a match, by a program at this path."""

    def __init__(self, program: str, run: RunProgram) -> None:
        self._program = program
        self._run = run

    def __call__(
        self, root: str, pattern: LinePattern, seconds: float, visit: Callable[[str], None]
    ) -> bool:
        """Visit the files in the order of paths; False if ripgrep has failed or was too slow."""
        reader = _RipgrepReader(f"{root.rstrip('/')}/", visit)
        try:
            self._run([self._program, *_ripgrep_words(root, pattern)], seconds, reader.feed)
        except OSError:
            return False  # for another kind of processor
        return reader.has_ended


def _ripgrep_words(root: str, pattern: LinePattern) -> list[str]:
    # Files with a null byte are not searched here, and ripgrep leaves them at the first one.
    words = ["--no-config", "--json", "--max-count=1", "--no-ignore", "--hidden", "--no-messages"]
    words += ["--no-follow", "--sort=path", "--encoding=none", "--engine=default", "--no-unicode"]
    words += ["--ignore-case" if pattern.wide_ignores_case else "--case-sensitive"]
    return [*words, f"--regexp={pattern.wide}", "--", root]


class _Path(msgspec.Struct, frozen=True):
    """A path, or base64 of one that is not UTF-8."""

    text: str | None = None
    data: bytes | None = msgspec.field(name="bytes", default=None)

    def get(self) -> bytes:
        return self.data or b"" if self.text is None else self.text.encode()


class _Data(msgspec.Struct, frozen=True):
    path: _Path = _Path()


class _Message(msgspec.Struct, frozen=True):
    type: str
    data: _Data


class _RipgrepReader:
    """Reads the messages of `rg --json`: one at the beginning of each file, and a summary."""

    def __init__(self, prefix: str, visit: Callable[[str], None]) -> None:
        self.has_ended = False  # with its summary
        self._prefix = os.fsencode(prefix)
        self._visit = visit
        self._partial = b""  # the beginning of a message

    def feed(self, data: bytes) -> None:
        *messages, self._partial = (self._partial + data).split(b"\n")
        # The end of a longer message is none that can be decoded.
        self._partial = self._partial if len(self._partial) <= MESSAGE_BYTES else b"..."
        for message in messages:
            self._read(message)

    def _read(self, text: bytes) -> None:
        try:
            message = msgspec.json.decode(text, type=_Message)
        except msgspec.MsgspecError:
            return
        if message.type == "begin":
            self._visit(os.fsdecode(message.data.path.get().removeprefix(self._prefix)))
        self.has_ended |= message.type == "summary"
