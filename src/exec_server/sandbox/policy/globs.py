"""Matching of paths against deny globs. Pure; `runtime.glob_scan` searches the disk.

A directory that matches is denied with everything in it, like the path of a deny entry. In the
reference only files match.

The dialect is the reference's, found by experiment. Case matters, and hidden names are
ordinary names. `*` and `?` stay within one name; a character class may match a slash. `**` as
a whole name matches any number of names; elsewhere it is two `*`. `{a,b}` are alternatives,
which nest and may contain slashes. A class may begin with `!` or `^`, and with `]`; an
unclosed `[` is literal. A backslash escapes the next character. Unlike in the reference, `?`
is one character, not one byte.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

from exec_server.errors import InternalError
from exec_server.sandbox.policy.model import Glob

# Cached regular expressions: enough for many policies with several globs each.
_CACHED_PATTERNS: Final = 512


def matches(glob: Glob, path: str) -> bool:
    """Whether an absolute path without links matches the glob."""
    prefix = glob.root.rstrip("/") + "/"
    if not path.startswith(prefix):
        return False
    return matches_below(glob, path[len(prefix) :])


def deepest_match(glob: Glob, path: str) -> str | None:
    """The deepest of a path and the directories above it that matches the glob."""
    while len(path) > len(glob.root):
        if matches(glob, path):
            return path
        path = posixpath.dirname(path)
    return None


def denies(globs: Iterable[Glob], path: str, writable: Sequence[str]) -> bool:
    """Whether globs deny an absolute path without links, itself or with a directory above it.

    As below a denied path, those `writable` paths are reopened that are below a match.
    """
    found = [match for glob in globs if (match := deepest_match(glob, path)) is not None]
    if not found:
        return False
    denied = max(found, key=len)  # all of them are above the path
    return not any(
        f"{root}/".startswith(f"{denied}/") and root != denied and f"{path}/".startswith(f"{root}/")
        for root in writable
    )


def check(glob: Glob) -> None:
    """Raise InternalError if the pattern is malformed."""
    try:
        _compile(glob.pattern)
    except _MalformedGlob as reason:
        raise InternalError(
            f"unreadable glob pattern is invalid for {glob.root}: "
            f"error parsing glob '{glob.pattern}': {reason}"
        ) from None


class _MalformedGlob(Exception):
    """A pattern with a syntax error."""


def matches_below(glob: Glob, below: str) -> bool:
    """Whether a path below the root of the glob, relative to that root, matches."""
    if glob.max_depth is not None and below.count("/") >= glob.max_depth:
        return False
    return _compile(glob.pattern).fullmatch(below) is not None


@lru_cache(_CACHED_PATTERNS)
def _compile(pattern: str) -> re.Pattern[str]:
    text = _Translator(pattern).translate()
    if "/" not in pattern:
        # A pattern without a slash matches names at any depth.
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
            raise _MalformedGlob(
                "unclosed alternate group; missing '}' (maybe escape '{' with '[{]'?)"
            )
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
                    raise _MalformedGlob(
                        "unopened alternate group; missing '{' (maybe escape '}' with '[}]'?)"
                    )
                self._open_groups -= 1
                return ")"
            case "," if self._open_groups:
                return "|"
            case "\\":
                if self._at == len(self._pattern):
                    raise _MalformedGlob("dangling '\\'")
                self._at += 1
                return re.escape(self._pattern[self._at - 1])
        return re.escape(character)

    def _stars(self) -> str:
        begin = self._at - 1
        if self._pattern[self._at : self._at + 1] != "*":
            return "[^/]*"
        before = self._pattern[begin - 1] if begin else "/"
        after = self._pattern[self._at + 1 : self._at + 2] or "/"
        # Inside braces an alternative also begins and ends a name.
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
        # A closing bracket as the first member belongs to the class.
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
                    raise _MalformedGlob(f"invalid range; '{low}' > '{high}'")
                parts.append(f"{re.escape(low)}-{re.escape(high)}")
                index += 3
            else:
                parts.append(re.escape(members[index]))
                index += 1
        return f"[{'^' if negated else ''}{''.join(parts)}]"
