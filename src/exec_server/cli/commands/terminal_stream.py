"""Parsers for the bytes between the user's terminal and a remote program; no I/O.

`EscapeParser` finds the user's escapes (`~.` and others) in the input. `ScreenModes` tracks the
terminal modes that the program's output has switched on.
"""

from __future__ import annotations

import enum
import re
from typing import Final

# Longer input was pasted: typed keys arrive one by one, or a few at once on a busy machine.
MAX_TYPED_BYTES: Final = 8
# Bytes kept of an escape sequence cut in two; all sequences searched for are shorter.
MAX_PARTIAL_BYTES: Final = 64

HELP_TEXT: Final = """\
 {0}.   end the command and leave
 {0}^Z  suspend exec-server
 {0}?   show this help
 {0}{0}   send {0}
(only at the beginning of a line)
"""


class Escape(enum.Enum):
    TERMINATE = "."
    SUSPEND = "\x1a"
    HELP = "?"


class EscapeParser:
    """Finds escapes at the beginning of a line, as ssh does, but never in pasted text."""

    def __init__(self, character: str | None = "~") -> None:
        self._character = None if character is None else character.encode()
        self._is_line_start = True
        self._is_escape_pending = False

    def feed(self, data: bytes) -> list[bytes | Escape]:
        """Split input into bytes for the program and escapes, in order."""
        if self._character is None or (len(data) > MAX_TYPED_BYTES and not self._is_escape_pending):
            self._is_line_start = data.endswith((b"\r", b"\n"))
            return [data]
        found: list[bytes | Escape] = []
        for key in (data[at : at + 1] for at in range(len(data))):
            item = self._feed_key(key)
            if isinstance(item, bytes) and found and isinstance(found[-1], bytes):
                found[-1] += item
            elif item:
                found.append(item)
        return found

    def _feed_key(self, key: bytes) -> bytes | Escape:
        assert self._character is not None
        if self._is_escape_pending:
            self._is_escape_pending = False
            for escape in Escape:
                if key == escape.value.encode():
                    self._is_line_start = True
                    return escape
            self._is_line_start = key in b"\r\n"
            return key if key == self._character else self._character + key
        if self._is_line_start and key == self._character:
            self._is_escape_pending = True
            return b""
        self._is_line_start = key in b"\r\n"
        return key


# DEC private modes that a shell does not reset after a killed program: cursor keys, mouse and
# focus reports, alternate screens, bracketed paste.
_RESET_MODES: Final = frozenset(
    {1, 9, 47, 66, 1000, 1001, 1002, 1003, 1004, 1005, 1006, 1015, 1016, 1047, 1049, 2004}
)
_CURSOR: Final = 25
_PRIVATE_MODE: Final = re.compile(rb"\x1b\[\?([0-9;]{1,48})([hl])")


class ScreenModes:
    """Tracks the DEC private modes that a program's output has switched on."""

    def __init__(self) -> None:
        self._on: set[int] = set()
        self._is_cursor_hidden = False
        self._partial = b""

    def feed(self, data: bytes) -> None:
        """Inspect output on its way to the terminal."""
        if not self._partial and b"\x1b" not in data:
            return
        data = self._partial + data
        end = 0
        for match in _PRIVATE_MODE.finditer(data):
            end = match.end()
            self._set(match[1], is_on=match[2] == b"h")
        last = data.rfind(b"\x1b", max(end, len(data) - MAX_PARTIAL_BYTES))
        self._partial = data[last:] if last >= 0 else b""

    def _set(self, numbers: bytes, *, is_on: bool) -> None:
        for number in (int(text) for text in numbers.split(b";") if text):
            if number == _CURSOR:
                self._is_cursor_hidden = not is_on
            elif number in _RESET_MODES and is_on:
                self._on.add(number)
            else:
                self._on.discard(number)

    def reset_sequence(self) -> bytes:
        """Bytes that reset the tracked modes, for a program that can no longer do so itself."""
        parts = [b"\x1b[?%dl" % number for number in sorted(self._on, reverse=True)]
        if self._is_cursor_hidden:
            parts.append(b"\x1b[?25h")
        if parts:
            parts.append(b"\x1b>\x1b[0m")  # numeric keypad, default colours
        return b"".join(parts)
