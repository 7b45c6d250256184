r"""LinePattern: the regular expressions of fs/grep, one dialect for all ways to search. Pure.

The dialect is that of Python's `re` without the flags `a`, `L` and `x`, with POSIX classes such as
`[[:alpha:]]`, `\<` and `\>`, `\p{…}` and `(?<name>…)`. No part of a translated pattern matches a
line break, so that a block of many lines, which is faster, has exactly the matches of its lines.
"""

from __future__ import annotations

import re
from typing import Final

from exec_server.errors import InvalidParams

MAX_PATTERN: Final = 4096
# Parts of a pattern, one in `{n}` counted n times: the memory for a compiled pattern grows with
# them, and the time to compile empty groups with their square.
MAX_PARTS: Final = 4_000

_CODE: Final = r"x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[xu]\{[0-9A-Fa-f]{1,8}\}"
_PROPERTY: Final = r"[pPN]\{[^{}]*\}|[pP][A-Z]"
_TOKEN: Final = re.compile(
    rf"""
    (?P<repeat>[*+?][+?]?|\{{(?:(?P<low>\d+)(?:,(?P<high>\d*))?|,(?P<most>\d+))\}}[+?]?)
    |\\(?:(?P<code>{_CODE})|(?P<property>{_PROPERTY})|(?P<group>[1-9]\d?)|(?P<escape>.))
    |(?P<comment>\(\?\#[^)]*\))
    |(?P<reference>\(\?P=\w+\))
    |(?P<test>\(\?\(\w+\))
    |(?P<look>\(\?<?[=!])
    |(?P<flags>\(\?(?P<on>[imsu]*)(?:-(?P<off>[imsu]+))?(?P<scope>[:)]))
    |(?P<open>\((?:\?(?:>|P?<(?P<name>[A-Za-z_]\w*)>)|(?![?*])))
    |(?P<close>\))
    |(?P<set>\[\^?)
    |(?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_ITEM: Final = re.compile(
    rf"\[:(?P<posix>\^?[a-z]+):\]|\\(?:(?P<code>{_CODE})|(?P<property>{_PROPERTY})|(?P<escape>.))"
    r"|(?P<other>.)",
    re.DOTALL,
)
_POSIX: Final = frozenset(
    (
        *("alnum", "alpha", "ascii", "blank", "cntrl", "digit", "graph"),
        *("lower", "print", "punct", "space", "upper", "word", "xdigit"),
    )
)
_CLASSES: Final = frozenset("dDpPsSwW")
_CONTROLS: Final = {"a": "\a", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
# Each escape that is not a character: its translation, and that of the wider pattern.
_OTHER_BYTES: Final = r"[\x80-\xff]{1,4}"
_ANY: Final = f"(?:.|{_OTHER_BYTES})"
_NOTHING: Final = "(?:)"
_ESCAPES: Final = {
    "d": (r"\d", rf"(?:\d|{_OTHER_BYTES})"),
    "w": (r"\w", rf"(?:\w|{_OTHER_BYTES})"),
    "s": (r"[^\S\n]", rf"(?:\s|{_OTHER_BYTES})"),
    "S": (r"\S", rf"(?:\S|{_OTHER_BYTES})"),
    "D": (r"[^\d\n]", _ANY),
    "W": (r"[^\w\n]", _ANY),
    "b": (r"\b", _NOTHING),
    "B": (r"\B", _NOTHING),
    "<": (r"\m", _NOTHING),
    ">": (r"\M", _NOTHING),
    "A": ("^", _NOTHING),
    "Z": ("$", _NOTHING),
    "z": ("$", _NOTHING),
}
# Characters outside of ASCII are the same letter as one of these.
_FOLDED: Final = frozenset("iIkKsS")


class LinePattern:
    """A pattern in the dialect of `regex`, and a wider one for programs that search in bytes."""

    def __init__(self, pattern: str, *, literal: bool, ignore_case: bool) -> None:
        if not pattern or len(pattern) > MAX_PATTERN:
            raise InvalidParams(f"pattern must have 1 to {MAX_PATTERN} characters")
        if "\n" in pattern or "\0" in pattern:
            raise InvalidParams("pattern must not contain a line break or a null character")
        self.ignore_case = ignore_case
        self._text = pattern
        self._folds = ignore_case or re.search(r"\(\?[a-z]*i", pattern) is not None
        self._exact: list[str] = []
        self._wide: list[str] = []
        # For each open group: its parts, and what stands for it in `_wide` from which index on.
        self._groups: list[tuple[int, str | None, int]] = []
        self._parts = 0
        self._last_parts = 0
        if literal:
            for character in pattern:
                self._add_character(character)
        else:
            self._translate()

    @property
    def exact(self) -> str:
        """The pattern for `regex` with its flag MULTILINE, which matches no line break."""
        return "".join(self._exact)

    @property
    def wide(self) -> str:
        """A pattern for `rg --no-unicode` or `grep -P` that matches wherever the exact one does.

        Bytes that are not ASCII stand for any character, anchors and lookarounds for nothing.
        """
        return "".join(self._wide)

    @property
    def wide_ignores_case(self) -> bool:
        return self._folds

    def _translate(self) -> None:
        position = 0
        while position < len(self._text):
            token = _TOKEN.match(self._text, position)
            assert token is not None  # any character is one
            position = token.end()
            match token.lastgroup:
                case "set":
                    position = self._add_set(position, is_negated=token[0] == "[^")
                case "repeat":
                    self._add_repeat(token)
                case "code":
                    self._add_character(_character(token["code"]))
                case "property":
                    self._add(rf"(?:(?!\n)\{token['property']})", _ANY)
                case "escape":
                    self._add_escape(token["escape"])
                case "comment":
                    pass
                case "reference" | "group":
                    self._add(token[0], f"{_ANY}*")
                case "close":
                    self._close_group()
                case "other":
                    self._add_other(token[0])
                case _:
                    self._open_group(token)
        if self._groups:
            raise _error("a parenthesis is not closed")

    def _add(self, exact: str, wide: str) -> None:
        self._exact.append(exact)
        self._wide.append(wide)
        self._count(1)

    def _count(self, parts: int) -> None:
        self._last_parts = parts
        self._parts += parts
        if self._parts > MAX_PARTS:
            raise _error(f"it has more than {MAX_PARTS} parts with all repetitions")

    def _add_character(self, character: str) -> None:
        exact = _escape(character) if character != "\n" else "(?!)"
        if character == "\n" or (self._folds and not character.isascii()):
            wide = _ANY
        elif self._folds and character in _FOLDED:
            wide = f"(?:{character}|{_OTHER_BYTES})"
        else:
            encoded = "".join(f"\\x{byte:02x}" for byte in character.encode())
            wide = exact if character.isascii() else f"(?:{encoded})"
        self._add(exact, wide)

    def _add_escape(self, character: str) -> None:
        if character in _ESCAPES:
            self._add(*_ESCAPES[character])
        elif character in _CONTROLS:
            self._add_character(_CONTROLS[character])
        else:
            self._add_character(_unescaped(character))

    def _add_other(self, character: str) -> None:
        match character:
            case ".":
                self._add(".", _ANY)
            case "^" | "$":
                self._add(character, _NOTHING)
            case "|":
                self._add("|", "|")
            case "(" | "\\":
                raise _error(f"{character!r} begins nothing that is known here")
            case _:  # also a brace that begins no repetition
                self._add_character(character)

    def _add_repeat(self, token: re.Match[str]) -> None:
        most = token["high"] or token["low"] or token["most"]
        if most is not None:
            if len(most) > len(str(MAX_PARTS)):
                raise _error("a repetition is too long")
            self._count(self._last_parts * max(int(most) - 1, 0))
        self._exact.append(token[0])
        repeat = token[0] if token["most"] is None else f"{{0{token[0][1:]}"
        self._wide.append(repeat[:1] + repeat[1:].removesuffix("+"))  # not possessive

    def _open_group(self, token: re.Match[str]) -> None:
        replacement = None
        exact = token[0]
        match token.lastgroup:
            case "flags" if token["scope"] == ")":
                if self._exact:
                    raise _error("flags for all of it must be at its beginning")
                self.ignore_case |= "i" in token["on"]
                return
            case "flags":
                on, off = "i" in token["on"], "i" in (token["off"] or "")
                exact = "(?i:" if on and not off else "(?-i:" if off else "(?:"
            case "look":
                replacement = _NOTHING
            case "test":
                replacement = f"{_ANY}*"
            case _ if token["name"] is not None:
                exact = f"(?P<{token['name']}>"
        self._exact.append(exact)
        self._groups.append((self._parts, replacement, len(self._wide)))
        self._count(1)  # an empty group is a part too
        self._wide.append("(?:")

    def _close_group(self) -> None:
        if not self._groups:
            raise _error("a parenthesis is not opened")
        parts, replacement, index = self._groups.pop()
        self._exact.append(")")
        self._wide.append(")")
        if replacement is not None:
            self._wide[index:] = [replacement]
        self._last_parts = self._parts - parts

    def _add_set(self, start: int, *, is_negated: bool) -> int:
        """Add the set of characters at a position; returns the position after it."""
        position = start
        items: list[str] = []
        is_ascii, has_break = True, False
        while position == start or not self._text.startswith("]", position):
            first, position = self._read_item(position)
            last = first
            if re.compile(r"-[^\]]").match(self._text, position):
                last, position = self._read_item(position + 1)
                if len(first) + len(last) > 2 or first > last:
                    raise _error("a range of characters has no first or no last one")
            is_ascii &= len(last) == 1 and last.isascii() and not first <= "\n" <= last
            has_break |= first <= "\n" <= last if len(first) == 1 else first not in (r"\w", r"\d")
            ends = [each if len(each) > 1 else _escape(each) for each in (first, last)]
            items.append("-".join(ends) if first != last else ends[0])
        text = "".join(items)
        if any(_complement(item) in items for item in items):
            # `regex` takes such a set for one of all characters even if it is negated.
            self._add("(?!)" if is_negated else ".", _ANY)
        elif is_negated:
            self._add(f"[^{text}\\n]", _ANY)
        else:
            wide = f"[{text}]" if is_ascii else _ANY
            wide = f"(?:{wide}|{_OTHER_BYTES})" if self._folds else wide
            self._add(rf"(?:(?!\n)[{text}])" if has_break else f"[{text}]", wide)
        return position + 1

    def _read_item(self, position: int) -> tuple[str, int]:
        token = _ITEM.match(self._text, position)
        if token is None:
            raise _error("a set of characters is not closed")
        text = token[0]
        match token.lastgroup:
            case "posix" if token["posix"].removeprefix("^") not in _POSIX:
                raise _error(f"{text} is not a class")
            case "code":
                text = _character(token["code"])
            case "escape" if text[1] in _CONTROLS or text[1] == "b":
                text = _CONTROLS.get(text[1], "\b")
            case "escape" if text[1] not in "dDsSwW":
                text = _unescaped(text[1])
        return text, token.end()


def _complement(item: str) -> str | None:
    """The class of all other characters; None for a character or range."""
    if item.startswith("[:^"):
        return f"[:{item[3:]}"
    if item.startswith("[:"):
        return f"[:^{item[2:]}"
    return f"\\{item[1].swapcase()}{item[2:]}" if item[1:2] in _CLASSES else None


def _escape(character: str) -> str:
    """A character for both patterns, inside and outside of a set."""
    is_plain = character.isalnum() or character == "_" or not character.isascii()
    return character if is_plain else f"\\x{ord(character):02x}"


def _unescaped(character: str) -> str:
    if character.isascii() and character.isalnum():
        raise _error(rf"\{character} is not known")
    return character


def _character(code: str) -> str:
    number = int(code[1:].strip("{}"), 16)
    if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF:
        raise _error(rf"\{code} is not a character")
    return chr(number)


def _error(text: str) -> InvalidParams:
    return InvalidParams(f"pattern is not a regular expression: {text}")
