"""The access that a `Policy` grants at a path, and the rule that denies it. Pure.

Paths are compared as text: links are resolved by `layout`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, Literal

from exec_server.errors import InternalError
from exec_server.sandbox.policy.model import Access, Glob, Policy, Rule

# Cached regular expressions: enough for many policies with several globs each.
_CACHED_PATTERNS: Final = 512

# Read-only directly below a writable root: their contents make other programs run code.
PROTECTED_NAMES: Final = (".git", ".agents", ".codex", ".aws")

_PRECEDENCE: Final[dict[Access, int]] = {"read": 0, "write": 1, "deny": 2}


# Deny globs; `runtime.disk` searches the disk. Unlike in the reference, a directory that
# matches is denied with everything in it, and `?` is one character, not one byte.
#
# The dialect is the reference's, found by experiment. Case matters, and hidden names are ordinary
# names. `*` and `?` stay within one name; a character class may match a slash. `**` as a whole name
# matches any number of names; elsewhere it is two `*`. `{a,b}` are alternatives, which nest and may
# contain slashes. A class may begin with `!` or `^`, and with `]`; an unclosed `[` is literal. A
# backslash escapes the next character.
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
    paths = [match for glob in globs if (match := deepest_match(glob, path)) is not None]
    if not paths:
        return False
    denied = max(paths, key=len)  # all of them are above the path
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


def allows_all_reads(policy: Policy) -> bool:
    """Whether no read is denied, so that reads need no confined process."""
    if policy.globs:
        return False
    if policy.rules is None:
        return True
    return policy_access(policy, "/") is not None and all(
        rule.access != "deny" for rule in policy.rules
    )


def policy_access(policy: Policy, path: str) -> Access | None:
    """The access of the deepest rule above a path, without protected names and globs."""
    return "write" if policy.rules is None else rule_access(policy.rules, path)


def rule_access(rules: Sequence[Rule], path: str) -> Access | None:
    """The access of the deepest rule above a path; the rules are sorted as in a policy."""
    rule = _deepest(rules, path)
    return None if rule is None else rule.access


def explain_denial(policy: Policy, path: str, operation: Literal["read", "write"]) -> str | None:
    """The rule that denies an operation on a path without links, None if it is allowed."""
    writable = [rule.path for rule in policy.rules or () if rule.access == "write"]
    for glob in policy.globs:
        if denies((glob,), path, writable):
            return f"deny glob {join(glob.root, glob.pattern)}"
    if policy.rules is None:
        return None
    rule = _deepest(policy.rules, path)
    if rule is None:
        return "no policy entry covers this path"
    if rule.access == "deny":
        return f"deny entry {rule.path}"
    if operation == "read":
        return None
    if rule.access == "read":
        return f"no policy entry allows writing here; the closest one is: read {rule.path}"
    name = path[len(rule.path) :].lstrip("/").partition("/")[0]
    if name in PROTECTED_NAMES:
        return f"`{name}` below the writable root {rule.path} is protected"
    return None


def merge_rules(stated: Iterable[tuple[str, Access]]) -> tuple[Rule, ...]:
    """The effective rules of all stated paths: sorted parents first, one per path.

    At one path deny overrides write, and write overrides read. A read below a deny has no
    effect. A deny of `/` itself only removes other entries for `/`: reads below it hold.
    """
    strongest: dict[str, Access] = {}
    for path, access in stated:
        known = strongest.get(path)
        if known is None or _PRECEDENCE[access] > _PRECEDENCE[known]:
            strongest[path] = access
    if strongest.get("/") == "deny":
        del strongest["/"]
    rules: list[Rule] = []
    for path in sorted(strongest, key=components):
        if strongest[path] == "read" and rule_access(rules, path) == "deny":
            continue
        rules.append(Rule(path, strongest[path]))
    return tuple(rules)


def contains(parent: str, path: str) -> bool:
    """Whether a path is `parent` or lies below it."""
    return parent in ("/", path) or path.startswith(parent + "/")


def components(path: str) -> list[str]:
    """The names in an absolute path; sorting by them puts parents first."""
    return [name for name in path.split("/") if name]


def join(directory: str, name: str) -> str:
    """The path of a name in a directory."""
    return f"{directory.rstrip('/')}/{name}"


def _deepest(rules: Sequence[Rule], path: str) -> Rule | None:
    # Rules that contain the same path contain each other, so the last one is the deepest.
    for rule in reversed(rules):
        if contains(rule.path, path):
            return rule
    return None
