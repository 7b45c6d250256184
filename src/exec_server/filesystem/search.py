"""fs/glob and fs/diskUsage, and TreeScan: the walk of every search.

`glob_patterns` has the dialect of patterns. Links to directories are listed but not entered.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec
import regex

from exec_server.errors import InvalidParams
from exec_server.filesystem.line_patterns import LinePattern
from exec_server.filesystem.safe_write import GUARD
from exec_server.printable import lossy
from exec_server.protocol import files as wire

# Alternatives of all `{a,b}` of a pattern, and names between its slashes. Each alternative is
# searched for in one and the same walk, so the work grows with their number.
MAX_ALTERNATIVES: Final = 64
MAX_NAMES: Final = 64
MAX_PATTERN: Final = 4096

_ANY_DEPTH: Final = "**"
_BRACES: Final = re.compile(r"\{([^{}]*)\}")

Names = tuple[re.Pattern[str] | None, ...]  # None: any depth
# Positions in the patterns that the path so far has reached: (pattern, name).
State = frozenset[tuple[int, int]]

# Results of one search: the answer stays far below the limit of a message.
MAX_RESULTS: Final = 10_000
# Entries that one search looks at, within about a second of processor time.
MAX_ENTRIES: Final = 200_000
# A search with many alternatives, or on a slow disk, ends after this time as truncated.
MAX_SECONDS: Final = 5.0

_OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK | os.O_CLOEXEC

# Matching and context lines of one answer together, and the characters in them: the answer stays
# far below the limit of a message.
MAX_LINES: Final = 50_000
MAX_CHARACTERS: Final = 4 * 1_048_576
# Characters of a line that are returned. Lines of generated files have megabytes.
SHOWN_CHARACTERS: Final = 1000
# The memory of a search does not depend on the size of a file. A line that is longer than a block
# is searched in pieces: the memory of a match grows with its text, by up to 150 bytes for each.
BLOCK_BYTES: Final = 131_072

_OPEN_FILE: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

# Matches of one search: the answer stays far below the limit of a message.
MAX_MATCHES: Final = 10_000
# Context lines on each side: enough to understand a match, and not the whole file.
MAX_CONTEXT: Final = 20
# A message of ripgrep with the path of a file, which has at most 4096 bytes. A longer message has
# the matching line of a file in it, and is skipped.
MESSAGE_BYTES: Final = 65_536

# Runs a program with these words for at most so many seconds, and passes its output on.
RunProgram = Callable[[Sequence[str], float, Callable[[bytes], None]], None]


# GlobPatterns: patterns of paths as an automaton over names. Pure.
#
# A pattern has names separated by `/`. In a name, `*` and `?` match any characters, `[…]` one of
# several, `{a,b}` alternatives; the name `**` matches any number of directories. Hidden names
# match like others.
#
# fnmatch translates the names. Libraries (wcmatch, pathspec) match whole paths; a walk has to know
# which directories cannot lead to a match, so that it does not enter them.
class GlobPatterns:
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


# LineSearch: lines of files that match a regular expression, in the order of paths and lines.
#
# A regular expression of a client may take exponential time. The module `regex` stops at a time
# limit and matches without the interpreter lock, so a search runs in a thread of the server, or in
# a confined worker.
@dataclass(frozen=True, slots=True)
class SearchOptions:
    """What to search for; `glob` and `exclude` are patterns of paths below the root."""

    root: str
    pattern: LinePattern
    glob: str | None
    exclude: str | None
    before: int
    after: int
    limit: int


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
    truncated: bool = False


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


# Visits the files below a root that may have a match, in the order of paths, for so many seconds.
# Returns whether it has visited them all.
Preselect = Callable[[SearchOptions, float, Callable[[str], None]], bool]


class LineSearch:
    """One search; `run` is called once. Blocking."""

    def __init__(
        self, options: SearchOptions, *, is_cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        self._options = options
        self._is_cancelled = is_cancelled
        self._filter = PathFilter(options.glob, options.exclude)
        self._scan = TreeScan(options.root)
        self._regex = _compile(options.pattern)
        self._reset()

    def _reset(self) -> None:
        self._found = SearchResult()
        self._matches = 0
        self._characters = 0

    def run(self, preselect: Preselect | None = None) -> SearchResult:
        """Search all files, or only those that `preselect` visits; raises OSError for the root."""
        try:
            self._search_root(preselect)
        except EnoughError:
            self._found.truncated = True
        return self._found

    def _search_root(self, preselect: Preselect | None) -> None:
        root = self._options.root
        descriptor = os.open(root, _OPEN_FILE)
        try:
            GUARD.check_opened(descriptor, writing=False)
            if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                self._search_file(descriptor, os.path.basename(root))
                return
        finally:
            os.close(descriptor)
        if preselect is None or not preselect(self._options, self._left(), self._visit):
            self._reset()
            self._search_tree()

    def _left(self) -> float:
        """The seconds that are left; raises EnoughError if there are none."""
        left = self._scan.deadline - time.monotonic()
        if left <= 0 or self._is_cancelled():
            raise EnoughError
        return left

    # ---- the tree ---------------------------------------------------------------------

    def _search_tree(self) -> None:
        """Search everything below the root in the order of names."""
        pending = self._entries_of("", self._filter.start())
        while pending:
            relative, state, is_directory = pending.pop()
            if is_directory:
                pending += self._entries_of(f"{relative}/", state)
            else:
                self._search_below(relative)

    def _entries_of(
        self, relative: str, state: _FilterState
    ) -> list[tuple[str, _FilterState, bool]]:
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
        try:
            descriptor = os.open(self._scan.path(relative), _OPEN_FILE | os.O_NOFOLLOW)
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
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            return
        shown = lossy(path)
        first, matches, characters = len(self._found.lines), self._matches, self._characters
        context = _Context(self._options.before, self._options.after)
        for block in _blocks(descriptor, info.st_size):
            if block is None:
                del self._found.lines[first:]
                self._matches, self._characters = matches, characters
                return
            self._search_block(shown, block, context)

    def _search_block(self, path: str, block: _Block, context: _Context) -> None:
        columns = self._columns(block)
        if block.offset:
            if columns and context.matched_line != block.number:
                self._add_match(path, block.number, columns[block.number], block.text, context)
        elif columns or context.is_open or (self._options.before and not block.is_last):
            lines = block.text.split("\n")
            passed = 0
            for number, column in columns.items():
                index = number - block.number
                self._pass(path, block.number + passed, lines[passed:index], context)
                self._add_match(path, number, column, lines[index], context)
                passed = index + 1
            self._pass(path, block.number + passed, lines[passed:], context)
        self._left()

    def _pass(self, path: str, first: int, lines: list[str], context: _Context) -> None:
        """Add those of some lines without a match that follow one closely."""
        for number, text in enumerate(context.passed(first, lines), first):
            self._add(MatchedLine(path, number, 0, text))

    def _add_match(self, path: str, number: int, column: int, text: str, context: _Context) -> None:
        for before, earlier in context.matched(number):
            self._add(MatchedLine(path, before, 0, earlier))
        self._matches += 1
        is_enough = self._matches > self._options.limit
        self._add(MatchedLine(path, number, 0 if is_enough else column, text))
        if is_enough:  # the line may be context of the last match
            raise EnoughError

    def _columns(self, block: _Block) -> dict[int, int]:
        """The column of the first match in each matching line, up to the limit or the time limit.

        The time limit of `regex` is one of processor time.
        """
        text, number = block.text, block.number
        columns: dict[int, int] = {}
        position = counted = 0
        try:
            while position <= len(text) and self._matches + len(columns) <= self._options.limit:
                left = self._left()
                match = self._regex.search(text, position, concurrent=True, timeout=left)
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
        if len(self._found.lines) >= MAX_LINES or self._characters > MAX_CHARACTERS:
            raise EnoughError
        self._found.lines.append(line)


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


def _blocks(descriptor: int, size: int) -> Iterator[_Block | None]:
    """The lines of a file in blocks without the last line break; None once it is binary."""
    number, offset = 1, 0
    rest = b""
    while data := os.read(descriptor, min(size, BLOCK_BYTES - 1) + 1):
        if b"\0" in data:
            yield None
            return
        if len(data) == size < BLOCK_BYTES:  # most files end with their first block
            yield _Block(_decode(data.removesuffix(b"\n")), 1, 0, True)
            return
        size = BLOCK_BYTES
        data = rest + data
        if offset and b"\n" in data:
            piece, _, data = data.partition(b"\n")
            yield _Block(_decode(piece), number, offset, False)
            number, offset = number + 1, 0
        end = data.rfind(b"\n") + 1
        lines, rest = data[:end], data[end:]
        if lines:
            yield _Block(_decode(lines[:-1]), number, 0, False)
            number += lines.count(b"\n")
        elif len(rest) >= BLOCK_BYTES:
            yield _Block(piece_text := _decode(rest), number, offset, False)
            offset, rest = offset + len(piece_text), b""
    if rest:
        yield _Block(_decode(rest), number, offset, True)


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


# fs/grep: the params and the result of a LineSearch, and ripgrep, which makes it faster.
#
# On a tree of 50,000 files, ripgrep needs 0.3 to 1 s for the files that may have a match; reading
# all of them here takes 1.5 to 5 s and more. It only selects files by a wider pattern: every line
# of an answer is one that `LineSearch` has found, with or without ripgrep.
def grep(
    params: wire.GrepParams,
    preselect: Preselect | None = None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> wire.GrepResult:
    """The matching lines of a file, or of the files below a directory. Blocking."""
    search = LineSearch(_options(params), is_cancelled=is_cancelled)
    return _result(params, search.run(preselect))


def _options(params: wire.GrepParams) -> SearchOptions:
    if max(params.before, params.after) > MAX_CONTEXT:
        raise InvalidParams(f"before and after must be at most {MAX_CONTEXT}")
    limit = min(params.limit, MAX_MATCHES)
    if limit < 1:
        raise InvalidParams("limit must be at least 1")
    return SearchOptions(
        params.path.native(),
        LinePattern(params.pattern, literal=params.literal, ignore_case=params.ignore_case),
        params.glob,
        params.exclude,
        params.before,
        params.after,
        limit,
    )


def _result(params: wire.GrepParams, found: SearchResult) -> wire.GrepResult:
    """The matches with their context, from all lines in order."""
    lines = found.lines
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
    return wire.GrepResult(matches, found.truncated)


# ---- ripgrep --------------------------------------------------------------------------


class Ripgrep:
    """Selects the files that may have a match, by a program at this path."""

    def __init__(self, program: str, run: RunProgram) -> None:
        self._program = program
        self._run = run

    def __call__(
        self, options: SearchOptions, seconds: float, visit: Callable[[str], None]
    ) -> bool:
        """Visit the files in the order of paths; False if ripgrep has failed or was too slow."""
        reader = _RipgrepReader(f"{options.root.rstrip('/')}/", visit)
        try:
            self._run([self._program, *_ripgrep_words(options)], seconds, reader.feed)
        except OSError:
            return False  # for another kind of processor
        return reader.has_ended


def _ripgrep_words(options: SearchOptions) -> list[str]:
    # Files with a null byte are not searched here, and ripgrep leaves them at the first one.
    words = ["--no-config", "--json", "--max-count=1", "--no-ignore", "--hidden", "--no-messages"]
    words += ["--no-follow", "--sort=path", "--encoding=none", "--engine=default", "--no-unicode"]
    words += ["--ignore-case" if options.pattern.wide_ignores_case else "--case-sensitive"]
    return [*words, f"--regexp={options.pattern.wide}", "--", options.root]


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
        self._rest = b""  # the beginning of a message

    def feed(self, data: bytes) -> None:
        *messages, self._rest = (self._rest + data).split(b"\n")
        # The end of a longer message is none that can be decoded.
        self._rest = self._rest if len(self._rest) <= MESSAGE_BYTES else b"..."
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
