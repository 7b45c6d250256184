r"""TreeFilter: which entries of a tree are left out, by patterns of gitignore(5). Pure.

A tree is asked about from the top down: what is below an excluded directory is never seen. Matching
takes linear time, since patterns may come from another machine: one name at a time, with regular
expressions that do not backtrack. It is that of git in every case, byte by byte; the `pathspec`
package differs in ranges, classes, escapes and `**` beside other letters, and matches whole paths.
"""

from __future__ import annotations

import posixpath
import re
import string
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from exec_server.client.arguments import encoded
from exec_server.errors import InvalidRequest

# Of an ignore file: the largest ones that people publish have some 20 KB.
IGNORE_FILE_BYTES: Final = 262_144
# Patterns of one list or file: each costs up to a microsecond for every entry of the tree.
MAX_PATTERNS: Final = 4_096
# Of one pattern: as long as a path may be on Linux.
PATTERN_BYTES: Final = 4_096
# Patterns of all different ignore files of a tree together, which stay in memory until its end.
ALL_PATTERNS: Final = 65_536
# The same for their texts.
ALL_BYTES: Final = 8 * 1_048_576
# Names of one pattern with slashes: an entry is compared with each of them at most.
PATTERN_NAMES: Final = 64
# Comparisons for one entry, with patterns of all ignore files above it: some ten milliseconds. An
# ignore file in each of a hundred directories above one another has 160 of them.
ENTRY_WORK: Final = 16_384
# Positions in patterns with slashes that are remembered, each once for all directories where they
# are the same: 100 MB.
ALL_POSITIONS: Final = 1_000_000

IGNORE_FILE: Final = ".gitignore"
# What version control keeps beside the files of a project. `.git` is a file in a worktree.
VCS_PATTERNS: Final = (".git", ".hg/", ".svn/", ".jj/", "_darcs/", "CVS/", ".bzr/")

_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_UNESCAPED_BLANKS: Final = re.compile(rb"((?:[^\\]|\\.)*?) +", re.DOTALL)
_SPECIAL: Final = re.compile(rb"[*?\[\\]")
# Git compares the text before the first wildcard apart, so `**` behind a letter counts as a name.
_GLUED: Final = re.compile(rb"([^*?\[\\]*[^*?\[\\/])\*\*+(/|\\/|\Z)(.*)", re.DOTALL)
_STAR: Final = b"*"
_SLASHES: Final = (b"/", rb"\/")
_NOTHING: Final = b"(?!)"

# The classes of bytes in `[[:name:]]`; git's blanks are these four.
_SPACE: Final = b"\t\n\r "
_CLASSES: Final[dict[bytes, bytes]] = {
    b"alnum": (string.ascii_letters + string.digits).encode(),
    b"alpha": string.ascii_letters.encode(),
    b"blank": b"\t ",
    b"cntrl": bytes([*range(32), 127]),
    b"digit": string.digits.encode(),
    b"graph": bytes(range(33, 127)),
    b"lower": string.ascii_lowercase.encode(),
    b"print": bytes(range(32, 127)),
    b"punct": string.punctuation.encode(),
    b"space": _SPACE,
    b"upper": string.ascii_uppercase.encode(),
    b"xdigit": string.hexdigits.encode(),
}

Name = re.Pattern[bytes] | None  # None: any number of directories
# Positions in patterns with slashes that the path so far has reached: (pattern, position).
State = frozenset[tuple[int, int]]


class Patterns:
    """The lines of an ignore file or list; the last one that matches an entry decides."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        """Raises InvalidRequest for more than a copy can take."""
        self._is_negated: list[bool] = []
        self._needs_directory: list[bool] = []
        self._literals: dict[bytes, list[int]] = {}
        self._globs: list[tuple[int, re.Pattern[bytes]]] = []
        self._paths: list[tuple[int, tuple[Name, ...]]] = []
        for line in lines:
            self._add(_trimmed(line))
        self._globs.reverse()

    def __len__(self) -> int:
        return len(self._is_negated)

    def _add(self, pattern: bytes) -> None:
        if not pattern or pattern.startswith(b"#"):
            return
        if len(pattern) > PATTERN_BYTES or len(self) >= MAX_PATTERNS:
            raise InvalidRequest(
                f"more than {MAX_PATTERNS} exclude patterns, or one of {PATTERN_BYTES} bytes"
            )
        is_negated = pattern.startswith(b"!")
        pattern = pattern[is_negated:]
        needs_directory = pattern.endswith(b"/")
        pattern = pattern[: len(pattern) - needs_directory]
        index = len(self)
        self._is_negated.append(is_negated)
        self._needs_directory.append(needs_directory)
        if b"/" in pattern:
            for names in _path_patterns(pattern.removeprefix(b"/")):
                self._paths.append((index, names))
        elif _SPECIAL.search(pattern):
            self._globs.append((index, _glob(_tokens(pattern))))
        else:
            self._literals.setdefault(pattern, []).append(index)

    def start(self) -> State:
        """The state of the directory that the patterns belong to."""
        return frozenset(self._reached((number, 0) for number in range(len(self._paths))))

    def step(self, state: State, name: bytes) -> State:
        """The state of the entry of this name in a directory."""
        return frozenset(self._reached(self._steps(state, name))) if state else state

    def _steps(self, state: State, name: bytes) -> Iterator[tuple[int, int]]:
        for number, position in state:
            names = self._paths[number][1]
            if position == len(names):
                continue
            wanted = names[position]
            if wanted is None:
                yield number, position
            elif wanted.fullmatch(name):
                yield number, position + 1

    def _reached(self, positions: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Positions with those that follow a `**` which matches no directory."""
        for number, position in positions:
            names = self._paths[number][1]
            yield number, position
            for following in range(position + 1, len(names) + 1):
                if names[following - 1] is not None:
                    break
                yield number, following

    def work(self, state: State) -> int:
        """How many comparisons an entry of a directory in this state takes."""
        return 1 + len(self._globs) + len(state)

    def matters_below(self, state: State) -> bool:
        """Whether any pattern may match an entry of a directory in this state, or below it."""
        return bool(state or self._literals or self._globs)

    def verdict(self, state: State, name: bytes, *, is_directory: bool) -> bool | None:
        """Whether the entry of this name in a directory is excluded; None if nothing matches."""
        last = -1
        for index in self._literals.get(name, ()):
            last = max(last, index) if self._applies(index, is_directory) else last
        for number, position in self.step(state, name):
            index, names = self._paths[number]
            if position == len(names) and index > last and self._applies(index, is_directory):
                last = index
        for index, glob in self._globs:
            if index < last:
                break
            if self._applies(index, is_directory) and glob.fullmatch(name):
                last = index
                break
        return None if last < 0 else not self._is_negated[last]

    def _applies(self, index: int, is_directory: bool) -> bool:
        return is_directory or not self._needs_directory[index]


class _Layer(NamedTuple):
    patterns: Patterns
    state: State


class TreeFilter:
    """The patterns of a copy, and with `gitignore` the ignore files of its source.

    Those of the copy come first, then the ignore files from the innermost to the outermost one; the
    first of them that has a matching pattern decides.
    """

    def __init__(self, patterns: Sequence[str], *, gitignore: bool) -> None:
        """Raises InvalidRequest for too many or too long patterns."""
        self.excluded: list[str] | None = None  # entries that were excluded, if it is a list
        self._first = Patterns(map(encoded, patterns))
        self._gitignore = gitignore
        self._directories: dict[str, tuple[_Layer, ...]] = {}
        self._parsed: dict[bytes, Patterns] = {}  # many ignore files of a tree are equal
        self._parsed_patterns = 0
        self._parsed_bytes = 0
        # What many directories have in common, each a key and its own value.
        self._layers: dict[_Layer, _Layer] = {}
        self._lists: dict[tuple[_Layer, ...], tuple[_Layer, ...]] = {}
        self._positions = 0  # in both of them

    def reads_ignore_file(self, directory: str) -> bool:
        """Whether `enter` needs the ignore file of a directory."""
        return self._gitignore and directory not in self._directories

    def enter(self, directory: str, ignore_file: bytes = b"") -> None:
        """Take the ignore file of a directory, unless it is known, before its entries are asked.

        Raises InvalidRequest for more patterns than a copy can take; no entry can be asked then.
        """
        if directory in self._directories:
            return
        if directory:
            parent, _, name = directory.rpartition("/")
            layers = [
                _Layer(each.patterns, each.patterns.step(each.state, encoded(name)))
                for each in self._directories[parent]
            ]
        else:
            layers = [_Layer(self._first, self._first.start())]
        if own := self._patterns(ignore_file):
            layers.insert(1 if layers and layers[0].patterns is self._first else 0, own)
        layers = [each for each in layers if each.patterns.matters_below(each.state)]
        if sum(each.patterns.work(each.state) for each in layers) > ENTRY_WORK:
            raise InvalidRequest(f"more than {ENTRY_WORK} patterns apply to each entry")
        self._directories[directory] = self._shared(layers)

    def _shared(self, layers: list[_Layer]) -> tuple[_Layer, ...]:
        """The layers of a directory, those of another one if they are equal."""
        for layer in layers:
            if layer not in self._layers:
                self._layers[layer] = layer
                self._positions += len(layer.state)
        shared = tuple(self._layers[layer] for layer in layers)
        if shared not in self._lists:
            self._lists[shared] = shared
            self._positions += len(shared)
        if self._positions > ALL_POSITIONS:
            raise InvalidRequest(f"more than {ALL_POSITIONS} matches of patterns with directories")
        return self._lists[shared]

    def _patterns(self, ignore_file: bytes) -> _Layer | None:
        if len(ignore_file) > IGNORE_FILE_BYTES:
            raise InvalidRequest(f"{IGNORE_FILE} has more than {IGNORE_FILE_BYTES} bytes")
        patterns = self._parsed.get(ignore_file)
        if patterns is None:
            lines = ignore_file.removeprefix(_BYTE_ORDER_MARK).split(b"\n")
            patterns = Patterns(line.removesuffix(b"\r") for line in lines)
            self._parsed_patterns += len(patterns)
            self._parsed_bytes += len(ignore_file)
            if self._parsed_patterns > ALL_PATTERNS or self._parsed_bytes > ALL_BYTES:
                raise InvalidRequest(
                    f"more than {ALL_PATTERNS} patterns or {ALL_BYTES} bytes in {IGNORE_FILE} files"
                )
            self._parsed[ignore_file] = patterns
        return _Layer(patterns, patterns.start()) if len(patterns) else None

    def excludes(self, path: str, *, is_directory: bool) -> bool:
        """Whether an entry of a directory that was entered is excluded."""
        directory, _, name = path.rpartition("/")
        whole = encoded(name)
        for layer in self._directories[directory]:
            verdict = layer.patterns.verdict(layer.state, whole, is_directory=is_directory)
            if verdict is not None:
                if verdict and self.excluded is not None:
                    self.excluded.append(path)
                return verdict
        return False


def ancestors(paths: Iterable[str]) -> set[str]:
    """The directories above paths, without the top."""
    above: set[str] = set()
    for path in paths:
        parent = posixpath.dirname(path)
        while parent and parent not in above:
            above.add(parent)
            parent = posixpath.dirname(parent)
    return above


def _trimmed(line: bytes) -> bytes:
    """A line without its trailing blanks, unless they are escaped, and what follows a NUL."""
    text, _, _ = line.partition(b"\0")
    match = _UNESCAPED_BLANKS.fullmatch(text) if text.endswith(b" ") else None
    return match[1] if match else text


def _path_patterns(pattern: bytes) -> Iterator[tuple[Name, ...]]:
    """The names of a pattern with slashes; more than one alternative if `**` is behind a letter."""
    glued = _GLUED.match(pattern)
    if glued is None:
        yield _names(pattern)
        return
    literal, slash, rest = glued.groups()
    if slash == b"/":
        follows = _path_patterns if rest.startswith(b"**") else _one_path_pattern
        yield from follows(literal + rest)
    yield (*_names(literal + _STAR), None, *(_names(rest) if slash else ()))


def _one_path_pattern(pattern: bytes) -> Iterator[tuple[Name, ...]]:
    yield _names(pattern)


def _names(pattern: bytes) -> tuple[Name, ...]:
    """Raises InvalidRequest for too many names."""
    names: list[Name] = []
    name: list[bytes] = []
    tokens = _tokens(pattern)
    for token in [*tokens, b""]:
        if token and token not in _SLASHES:
            name.append(token)
            continue
        if len(name) > 1 and all(each == _STAR for each in name):
            # The slash after it is one of those that it matches, unless it is escaped.
            if token != b"/":
                names += [_glob([_STAR]), None]
            elif not names or names[-1] is not None:  # several of them are as one
                names.append(None)
        else:
            names.append(_glob(name))
        name = []
    if len(names) > PATTERN_NAMES:
        raise InvalidRequest(f"an exclude pattern has more than {PATTERN_NAMES} names")
    return tuple(names)


def _tokens(pattern: bytes) -> list[bytes]:
    """The parts of a pattern: `*`, a slash (perhaps escaped), or an expression for one byte."""
    tokens: list[bytes] = []
    position = 0
    while position < len(pattern):
        letter = pattern[position : position + 1]
        position += 1
        if letter == b"?":
            tokens.append(b".")
        elif letter == b"[":
            members, position = _read_set(pattern, position)
            tokens.append(_one_of(members))
        elif letter == b"\\":
            escaped = pattern[position : position + 1]
            position += 1
            tokens.append(rb"\/" if escaped == b"/" else re.escape(escaped) or _NOTHING)
        else:
            tokens.append(letter if letter in (_STAR, b"/") else re.escape(letter))
    return tokens


def _glob(tokens: list[bytes]) -> re.Pattern[bytes]:
    """An expression for one name, in linear time: each `*` matches as little as it can, for good.

    That is enough, since every other token is exactly one byte.
    """
    pieces = [b""]
    for token in tokens:
        if token == _STAR:
            pieces.append(b"")
        else:
            pieces[-1] += token
    first, *others = pieces
    if not others:
        return re.compile(first, re.DOTALL)
    middle = b"".join(b"(?>.*?%b)" % piece for piece in others[:-1] if piece)
    return re.compile(first + middle + b".*" + others[-1], re.DOTALL)


def _one_of(members: frozenset[int]) -> bytes:
    ranges: list[list[int]] = []  # compiling these takes a tenth of the time for all members
    for each in sorted(members):
        if ranges and ranges[-1][1] == each - 1:
            ranges[-1][1] = each
        else:
            ranges.append([each, each])
    text = b"".join(b"\\x%02x-\\x%02x" % (first, last) for first, last in ranges)
    return b"[%b]" % text if members else _NOTHING


def _read_set(pattern: bytes, position: int) -> tuple[frozenset[int], int]:
    """The bytes of a set and the position after it, as git's wildmatch reads it.

    Nothing matches a set that is not closed, or names no class.
    """
    text = pattern + b"\0\0"
    nothing = frozenset[int](), len(pattern)
    is_negated = text[position] in b"!^"
    position += is_negated
    members: set[int] = set()
    previous = 0
    while True:
        byte = text[position]
        if byte == 0:
            return nothing
        if byte == ord("\\"):
            position += 1
            byte = text[position]
            members.add(byte)
        elif byte == ord("-") and previous and text[position + 1] not in b"\0]":
            position += 1 + (text[position + 1] == ord("\\"))
            members.update(range(previous, text[position] + 1))
            byte = 0
        elif text.startswith(b"[:", position) and (end := _class_end(text, position)):
            name = text[position + 2 : end - 1]
            if end < 0 or name not in _CLASSES:
                return nothing
            members.update(_CLASSES[name])
            position, byte = end, 0
        else:
            members.add(byte)
        previous = byte
        position += 1
        if text[position] == ord("]"):
            everything = frozenset(range(256)) if is_negated else frozenset()
            return everything.symmetric_difference(members), position + 1


def _class_end(text: bytes, position: int) -> int:
    """The position of the `]` that ends a class; 0 if it is none, negative without any `]`."""
    end = text.find(b"]", position + 2)
    if end < 0:
        return end
    return end if end > position + 2 and text[end - 1 : end] == b":" else 0
