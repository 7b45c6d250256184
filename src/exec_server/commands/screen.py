"""What passes between a terminal and a program on it, as far as it means something to us.

`Escapes` finds what the user says to us instead of to the program, `ScreenModes` what the program
has switched on at the user's terminal. Neither does I/O.
"""

from __future__ import annotations

import enum
import re
from typing import Final

# More at once was not typed: a person's keys come one by one, or a few if we were busy.
TYPED_BYTES: Final = 8
# Of an escape sequence that is cut in two; the ones we look for are shorter.
CARRIED_BYTES: Final = 64

HELP_TEXT: Final = """\
 {0}.   leave, and end the command
 {0}^Z  suspend exec-server
 {0}?   this text
 {0}{0}   send {0}
(only after Enter)
"""


class Escape(enum.Enum):
    LEAVE = "."
    SUSPEND = "\x1a"
    HELP = "?"


class Escapes:
    """Finds `~.` and its like at the beginning of a line, as ssh does, but never in a paste."""

    def __init__(self, character: str | None = "~") -> None:
        self._character = None if character is None else character.encode()
        self._is_line_start = True
        self._has_begun = False

    def feed(self, data: bytes) -> list[bytes | Escape]:
        """What to send to the program and what to do, in order."""
        if self._character is None or (len(data) > TYPED_BYTES and not self._has_begun):
            self._is_line_start = data.endswith((b"\r", b"\n"))
            return [data]
        found: list[bytes | Escape] = []
        for key in (data[at : at + 1] for at in range(len(data))):
            item = self._take(key)
            if isinstance(item, bytes) and found and isinstance(found[-1], bytes):
                found[-1] += item
            elif item:
                found.append(item)
        return found

    def _take(self, key: bytes) -> bytes | Escape:
        assert self._character is not None
        if self._has_begun:
            self._has_begun = False
            for escape in Escape:
                if key == escape.value.encode():
                    self._is_line_start = True
                    return escape
            self._is_line_start = key in b"\r\n"
            return key if key == self._character else self._character + key
        if self._is_line_start and key == self._character:
            self._has_begun = True
            return b""
        self._is_line_start = key in b"\r\n"
        return key


# What a program that is killed leaves behind at a terminal, and a shell does not expect: cursor
# keys, mouse, focus, other screens, pastes in brackets.
_UNDONE: Final = frozenset(
    {1, 9, 47, 66, 1000, 1001, 1002, 1003, 1004, 1005, 1006, 1015, 1016, 1047, 1049, 2004}
)
_CURSOR: Final = 25
_PRIVATE_MODE: Final = re.compile(rb"\x1b\[\?([0-9;]{1,48})([hl])")


class ScreenModes:
    """Which private modes a program has switched on, seen in passing."""

    def __init__(self) -> None:
        self._on: set[int] = set()
        self._is_cursor_hidden = False
        self._carried = b""

    def feed(self, data: bytes) -> None:
        """Look at output on its way to the terminal."""
        if not self._carried and b"\x1b" not in data:
            return
        data = self._carried + data
        end = 0
        for match in _PRIVATE_MODE.finditer(data):
            end = match.end()
            self._set(match[1], is_on=match[2] == b"h")
        last = data.rfind(b"\x1b", max(end, len(data) - CARRIED_BYTES))
        self._carried = data[last:] if last >= 0 else b""

    def _set(self, numbers: bytes, *, is_on: bool) -> None:
        for number in (int(text) for text in numbers.split(b";") if text):
            if number == _CURSOR:
                self._is_cursor_hidden = not is_on
            elif number in _UNDONE and is_on:
                self._on.add(number)
            else:
                self._on.discard(number)

    def undo(self) -> bytes:
        """What puts the terminal back as it was, for a program that can no longer do it."""
        parts = [b"\x1b[?%dl" % number for number in sorted(self._on, reverse=True)]
        if self._is_cursor_hidden:
            parts.append(b"\x1b[?25h")
        if parts:
            parts.append(b"\x1b>\x1b[0m")  # the keypad, and colours
        return b"".join(parts)
