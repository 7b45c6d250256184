"""SecretPatterns: finds secrets by regular expressions of a client, and makes dummies that fit.

A client can write an expression that takes exponential time. So the module `regex` is used, which
searches without the lock of the interpreter and stops at a time limit: other clients do not wait,
and a start whose patterns take too long is refused.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import regex

# Compiling costs memory for each character, with some flags thousands of bytes.
PATTERN_CHARACTERS: Final = 1024
# For all searches and dummies of one start. Searches of usual patterns take microseconds.
SEARCH_SECONDS = 0.5
# For a text of some dozen characters.
_PROBE_SECONDS: Final = 0.1
# Patterns that are kept compiled: a client sends the same ones with each start.
KEPT_PATTERNS: Final = 64
# A dummy with fewer characters of its own could be guessed, or be another text by chance.
OWN_CHARACTERS: Final = 8
# Beginnings of a secret that a dummy may keep, such as `glpat-`.
KEPT_CHARACTERS: Final = 20

# Draws a character of an alphabet.
Draw = Callable[[str], str]
_ALPHABETS: Final = (
    string.ascii_letters + string.digits,
    string.ascii_lowercase + string.digits,
    string.ascii_uppercase + string.digits,
    string.ascii_letters,
    string.ascii_lowercase,
    string.ascii_uppercase,
    string.digits + "abcdef",
    string.digits + "ABCDEF",
    string.digits,
)
# Ordinary values. A pattern that matches a part of one is looked for in the variables that its
# provider names, and not in others, whose meaning it would change.
_ORDINARY: Final = (
    "/usr/local/bin:/usr/bin:/home/user/.local/share/Some-Application_2/config.d",
    "en_US.UTF-8 xterm-256color https://www.example.com:8080/index.html?page=1&size=20#top",
    "0123456789012345 2026-11-17T12:34:56Z 127.0.0.1 ff00:db8::1 DISPLAY=:0.0 a@b.example",
    "/srv/task-fix-the-registry-node-so-that-it-does-not-crash-on-empty-host/bin",
    "abcdefghijklmnop ABCDEFGHIJKLMNOP deadbeef01234567",
)


class UnusablePattern(ValueError):
    """A pattern that cannot be used; the text says why."""


class PatternsTooSlow(Exception):
    """The searches of one start have taken too long."""


class SearchTime:
    """The time that the searches of one start may take together."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._end = clock() + SEARCH_SECONDS

    def left(self) -> float:
        """The seconds that are left; raises PatternsTooSlow."""
        left = self._end - self._clock()
        if left <= 0:
            raise PatternsTooSlow
        return left


class SecretPatterns:
    """The patterns of one provider."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Raises UnusablePattern."""
        self._patterns = [_compiled(each) for each in patterns]

    def find(self, text: str, search_time: SearchTime, *, is_named: bool) -> Iterator[str]:
        """The secrets in the value of a variable, which the provider names or not."""
        for pattern, is_specific in self._patterns:
            start = 0 if is_named or is_specific else len(text)
            while start < len(text):
                found = _limited(search_time, pattern.search, text, start)
                if found is None:
                    break
                if found[0]:
                    yield found[0]
                start = max(found.end(), start + 1)

    def dummy(self, value: str, draw: Draw, search_time: SearchTime) -> str | None:
        """A text that the same pattern matches, and that tells nothing of the secret.

        None if there is none: a pattern may stand for one text only.
        """
        for pattern, _ in self._patterns:
            if _limited(search_time, pattern.fullmatch, value):
                for trial in _imitations(value, draw):
                    if _limited(search_time, pattern.fullmatch, trial):
                        return trial
        return None


def _imitations(value: str, draw: Draw) -> Iterator[str]:
    """Texts like a value that keep as little of it as possible, the beginning at most."""
    for kept in range(min(KEPT_CHARACTERS, len(value) - OWN_CHARACTERS) + 1):
        for alphabet in _ALPHABETS:
            yield value[:kept] + "".join(draw(alphabet) for _ in value[kept:])
        changed = "".join(_same_kind(character, draw) for character in value[kept:])
        if sum(map(str.isalnum, changed)) >= OWN_CHARACTERS:
            yield value[:kept] + changed


def _same_kind(character: str, draw: Draw) -> str:
    """A letter for a letter, a digit for a digit; the character itself if it is neither."""
    for alphabet in (string.digits, string.ascii_lowercase, string.ascii_uppercase):
        if character in alphabet:
            return draw(alphabet)
    return character


def _limited(search_time: SearchTime, match: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a search; raises PatternsTooSlow."""
    try:
        return match(*arguments, timeout=search_time.left())
    except (TimeoutError, MemoryError):
        raise PatternsTooSlow from None


@lru_cache(KEPT_PATTERNS)
def _compiled(text: str) -> tuple[regex.Pattern[str], bool]:
    """A compiled pattern, and whether it matches no ordinary value; raises UnusablePattern."""
    # Imported here: most servers mask nothing.
    import regex

    if len(text) > PATTERN_CHARACTERS:
        raise UnusablePattern(f"is longer than {PATTERN_CHARACTERS} characters")
    try:
        pattern = regex.compile(text, regex.V1, cache_pattern=False)
    except (regex.error, RecursionError, OverflowError) as error:
        raise UnusablePattern(f"is no regular expression: {error}") from None
    try:
        if pattern.search("", timeout=_PROBE_SECONDS):
            raise UnusablePattern("matches the empty text")
        is_ordinary = any(pattern.search(each, timeout=_PROBE_SECONDS) for each in _ORDINARY)
    except TimeoutError:
        raise UnusablePattern("takes too long for a short text") from None
    return pattern, not is_ordinary
