"""GlobPatterns: patterns of paths as an automaton over names. Pure.

A pattern has names separated by `/`. In a name, `*` and `?` match any characters, `[…]` one of
several, `{a,b}` alternatives; the name `**` matches any number of directories. Hidden names match
like others.

fnmatch translates the names. Libraries (wcmatch, pathspec) match whole paths; a walk has to know
which directories cannot lead to a match, so that it does not enter them.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator
from typing import Final

from exec_server.errors import InvalidParams

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
