"""The files that deny globs mean: on disk, or whether one path is among them.

The dialect was asked of the reference. Case matters, and hidden names are names like any
other. `*` and `?` stay within one name; a character class may match a slash. `**` as a whole
name stands for any number of names, and for two `*` elsewhere. `{a,b}` are alternatives, they
nest, and each may contain slashes. A class may begin with `!` or `^`, and with `]`; without
its end `[` is literal. A backslash takes the special meaning away. Differently from the
reference `?` is one character, not one byte.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

from exec_server.errors import InternalError
from exec_server.sandbox.plan import Glob

# Each match becomes a mount of its own. The reference gives up at the same number.
MAX_MATCHES: Final = 8192
# Directory entries looked at for one policy. A tree of this size takes seconds to search, which
# is more than a request may wait for; a narrower pattern is the answer.
MAX_ENTRIES: Final = 2_000_000
# Patterns kept translated: many policies with several globs each.
_TRANSLATED: Final = 512


def matches(glob: Glob, path: str) -> bool:
    """Whether an absolute path without links is one that the glob means."""
    prefix = glob.root.rstrip("/") + "/"
    if not path.startswith(prefix):
        return False
    return _matches_below(glob, path[len(prefix) :])


def check(glob: Glob) -> None:
    """Raise InternalError if the pattern means nothing."""
    try:
        _translated(glob.pattern)
    except _Malformed as reason:
        raise InternalError(
            f"unreadable glob pattern is invalid for {glob.root}: "
            f"error parsing glob '{glob.pattern}': {reason}"
        ) from None


def scan(globs: Sequence[Glob]) -> list[str]:
    """The files that the globs mean now, sorted; links and directories are not among them.

    The roots must be free of links (see `layout.real_globs`). Raises InternalError when there
    are too many, or when a directory cannot be searched that could be from inside.
    """
    found: set[str] = set()
    budget = _Budget()
    for root in dict.fromkeys(glob.root for glob in globs):
        of_root = [glob for glob in globs if glob.root == root]
        for below in _files(root, _depth(of_root), budget):
            if any(_matches_below(glob, below) for glob in of_root):
                found.add(f"{root.rstrip('/')}/{below}")
                if len(found) > MAX_MATCHES:
                    raise InternalError(
                        f"unreadable globs match more than {MAX_MATCHES} files; "
                        "deny a directory instead"
                    )
    return sorted(found)


class _Malformed(Exception):
    """A pattern that is none."""


class _Budget:
    """Counts down the directory entries that may still be looked at."""

    def __init__(self) -> None:
        self._left = MAX_ENTRIES

    def take(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise InternalError(
                f"unreadable globs would search more than {MAX_ENTRIES} files; "
                "use a longer directory prefix"
            )


def _depth(globs: Sequence[Glob]) -> int | None:
    depths = [glob.max_depth for glob in globs]
    limits = [depth for depth in depths if depth is not None]
    return max(limits) if len(limits) == len(depths) else None


def _files(root: str, max_depth: int | None, budget: _Budget) -> Iterator[str]:
    """The paths, from the root, of all files at most that deep; links are not followed."""
    pending = [("", 1)]
    while pending:
        below, depth = pending.pop()
        for entry in _listed(f"{root}/{below}"):
            budget.take()
            if entry.is_symlink():
                continue
            if not entry.is_dir(follow_symlinks=False):
                yield below + entry.name
            elif max_depth is None or depth < max_depth:
                pending.append((f"{below}{entry.name}/", depth + 1))


def _listed(path: str) -> Iterator[os.DirEntry[str]]:
    """What is in a directory; nothing if it is none, or somebody else's and closed."""
    try:
        with os.scandir(path) as listing:
            yield from listing
    except PermissionError:
        if _is_ours(path):
            raise InternalError(
                f"unreadable globs cannot be enforced: {path.rstrip('/')} cannot be searched"
            ) from None
    except OSError:
        pass


def _is_ours(path: str) -> bool:
    """Whether the directory that bars the way could be opened by us, so from inside, too."""
    while True:
        path = os.path.dirname(path)
        try:
            return os.lstat(path).st_uid == os.geteuid()
        except PermissionError:
            continue
        except OSError:
            return False


def _matches_below(glob: Glob, below: str) -> bool:
    if glob.max_depth is not None and below.count("/") >= glob.max_depth:
        return False
    return _translated(glob.pattern).fullmatch(below) is not None


@lru_cache(_TRANSLATED)
def _translated(pattern: str) -> re.Pattern[str]:
    text = _Translator(pattern).translate()
    if "/" not in pattern:
        # Without a slash it is a pattern for names, at any depth.
        text = f"(?:.*/)?(?:{text})"
    return re.compile(text, re.DOTALL)


class _Translator:
    """One pass over a pattern, producing a regular expression."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._open_groups = 0

    def translate(self) -> str:
        parts: list[str] = []
        while self._at < len(self._pattern):
            parts.append(self._next())
        if self._open_groups:
            raise _Malformed("unclosed alternate group; missing '}' (maybe escape '{' with '[{]'?)")
        return "".join(parts)

    def _next(self) -> str:
        character = self._pattern[self._at]
        self._at += 1
        match character:
            case "*":
                return self._stars()
            case "?":
                return "[^/]"
            case "[":
                return self._class()
            case "{":
                self._open_groups += 1
                return "(?:"
            case "}":
                if not self._open_groups:
                    raise _Malformed(
                        "unopened alternate group; missing '{' (maybe escape '}' with '[}]'?)"
                    )
                self._open_groups -= 1
                return ")"
            case "," if self._open_groups:
                return "|"
            case "\\":
                if self._at == len(self._pattern):
                    raise _Malformed("dangling '\\'")
                self._at += 1
                return re.escape(self._pattern[self._at - 1])
        return re.escape(character)

    def _stars(self) -> str:
        begin = self._at - 1
        if self._pattern[self._at : self._at + 1] != "*":
            return "[^/]*"
        before = self._pattern[begin - 1] if begin else "/"
        after = self._pattern[self._at + 1 : self._at + 2] or "/"
        # Inside braces an alternative begins and ends a name, too.
        begins_name = before == "/" or (self._open_groups > 0 and before in "{,")
        ends_name = after == "/" or (self._open_groups > 0 and after in ",}")
        self._at += 1
        if not (begins_name and ends_name):
            return "[^/]*"
        if self._pattern[self._at : self._at + 1] != "/":
            return ".*"
        self._at += 1
        return "(?:.*/)?"

    def _class(self) -> str:
        negated = self._pattern[self._at : self._at + 1] in ("!", "^")
        first = self._at + negated
        # A bracket in first place belongs to the class.
        end = self._pattern.find("]", first + 1)
        if end < 0:
            return re.escape("[")
        members = self._pattern[first:end]
        self._at = end + 1
        parts: list[str] = []
        index = 0
        while index < len(members):
            if members[index + 1 : index + 2] == "-" and index + 2 < len(members):
                low, high = members[index], members[index + 2]
                if low > high:
                    raise _Malformed(f"invalid range; '{low}' > '{high}'")
                parts.append(f"{re.escape(low)}-{re.escape(high)}")
                index += 3
            else:
                parts.append(re.escape(members[index]))
                index += 1
        return f"[{'^' if negated else ''}{''.join(parts)}]"
