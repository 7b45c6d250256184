"""Process.screen: the screen of a terminal as text, rendered by pyte.

Nothing is done, and pyte is not imported, until a program asks for a screen. Then the output that
the server retains is read once more, so no other reader loses any, and further output is not
watched. Programs choose this output: sequences are read here, and pyte gets only those that it
knows, with parameters of the size of the screen.
"""

from __future__ import annotations

import asyncio
import codecs
import re
import unicodedata
from typing import Any, Final

from exec_server.client.engine.session import ClientSession
from exec_server.client.results import Screen
from exec_server.errors import InvalidRequest, ProcessLost, missing_package
from exec_server.protocol.process import READ, ProcessId, ReadParams

try:
    import pyte
    from pyte.charsets import VT100_MAP
    from wcwidth import wcwidth
except ImportError as error:
    text = missing_package("Process.screen()", "pyte", "screen")
    raise ImportError(text, name=error.name) from error

# The terminal of a server without another size.
DEFAULT_SIZE: Final = (24, 80)
# Larger than any screen that a person or a model reads; its cells take some hundred MB.
MAX_ROWS_OR_COLUMNS: Final = 1000
# Work of one call, in changed cells: one to three seconds. Of longer output, such as a flood of
# sequences that clear the screen, only the end is rendered.
WORK_CELLS: Final = 1_000_000
# A sequence that is not complete; the rest of a longer one is shown as text.
HELD_CHARACTERS: Final = 4096
# Cursors that were saved and not restored; xterm keeps one.
SAVED_CURSORS: Final = 8
TITLE_CHARACTERS: Final = 1000
# Output requested at a time.
_READ_BYTES: Final = 262_144
# Output of one call: several times as much as servers retain. One that goes on is asked for more by
# the next call. Each chunk counts for at least the second number.
RECEIVED_BYTES: Final = 16 * 1_048_576
_CHUNK_COST: Final = 256

_TOKEN: Final = re.compile(
    r"(?P<held>\x1b(?:\[[0-?]*+[ -/]*+|[\]PX^_][^\x07\x1b]*+\x1b?|[ -/]*+)?\Z)"
    r"|(?P<text>[^\x00-\x1f\x7f-\x9f]++)"
    r"|(?P<control>[\x08-\x0f])"
    r"|\x1b\[(?P<params>[0-9;:]*+)(?P<final>[@-~])"
    r"|\x1b\[\?(?P<modes>[0-9;]*+)(?P<set>[hl])"
    r"|\x1b\[[0-?]*+[ -/]*+[@-~]"
    r"|\x1b\][02];(?P<title>[^\x07\x1b]*+)(?:\x07|\x1b\\)"
    r"|\x1b[\]PX^_][^\x07\x1b]*+(?:\x07|\x1b\\)"
    r"|\x1b(?P<charset>[()][0-~])"
    r"|\x1b(?P<escape>[78DEHMc]|\x238)"
    r"|\x1b[ -/]*+[0-~]"
    r"|.",
    re.DOTALL,
)

_CONTROLS: Final = {
    "\b": "backspace",
    "\t": "tab",
    "\n": "linefeed",
    "\v": "linefeed",
    "\f": "linefeed",
    "\r": "carriage_return",
}
_ESCAPES: Final = {
    "7": "save_cursor",
    "8": "restore_cursor",
    "D": "index",
    "E": "linefeed",
    "H": "set_tab_stop",
    "M": "reverse_index",
    "#8": "alignment_display",
}
# With their numbers of parameters, and the largest value if it is not the size of the screen.
_SEQUENCES: Final[dict[str, tuple[str, int, int | None]]] = {
    "@": ("insert_characters", 1, None),
    "A": ("cursor_up", 1, None),
    "B": ("cursor_down", 1, None),
    "C": ("cursor_forward", 1, None),
    "D": ("cursor_back", 1, None),
    "E": ("cursor_down1", 1, None),
    "F": ("cursor_up1", 1, None),
    "G": ("cursor_to_column", 1, None),
    "H": ("cursor_position", 2, None),
    "J": ("erase_in_display", 1, 2),
    "K": ("erase_in_line", 1, 2),
    "L": ("insert_lines", 1, None),
    "M": ("delete_lines", 1, None),
    "P": ("delete_characters", 1, None),
    "X": ("erase_characters", 1, None),
    "`": ("cursor_to_column", 1, None),
    "a": ("cursor_forward", 1, None),
    "d": ("cursor_to_line", 1, None),
    "e": ("cursor_down", 1, None),
    "f": ("cursor_position", 2, None),
    "g": ("clear_tab_stop", 1, 3),
    "r": ("set_margins", 2, None),
    "s": ("save_cursor", 0, None),
    "u": ("restore_cursor", 0, None),
}
# Sequences whose work is a line, many lines, or all cells.
_LINE_WORK: Final = frozenset("@KPX")
_LINES_WORK: Final = frozenset("LM")
# Private modes: wrapping, and the alternate screen, which pyte lacks. Not that of the origin, which
# few programs set and pyte cannot do without margins, and that of 132 columns.
_WRAPPING: Final = 7
# The mode in which a character moves the rest of its line.
_INSERTING: Final = 4
_ALTERNATE: Final = frozenset({47, 1047, 1049})


class Renderer:
    """Renders output of a program; its memory is bounded by the size of the screen. No I/O."""

    def __init__(self, rows: int, columns: int) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._is_complete = True
        self._size = rows, columns
        self._reset()

    def _reset(self) -> None:
        rows, columns = self._size
        self._main = self._shown = pyte.Screen(columns, rows)
        self._title = ""
        self._last = " "  # the character that REP repeats
        self._graphics = [False, False]  # whether a character set draws lines
        self._shift = 0

    def show(self, data: bytes, size: tuple[int, int], *, is_complete: bool = True) -> Screen:
        """Add output, which may begin and end anywhere, to a screen of this size."""
        if size != self._size:
            self._size = size
            for screen in (self._main, self._shown):  # or twice the same one
                screen.resize(*size)
                screen.ensure_hbounds()
                screen.ensure_vbounds()
        if not is_complete:
            self._is_complete, self._held = False, ""
        text = self._held + self._decoder.decode(data)
        self._held = ""
        start = self._start_of_work(text)
        if start:
            self._is_complete = False
            self._reset()
        for token in _TOKEN.finditer(text, start):
            self._take(token)
        return self._screen()

    def _screen(self) -> Screen:
        screen, (rows, columns) = self._shown, self._size
        lines = (
            # The second cell of a wide character is empty.
            "".join(screen.buffer[y][x].data for x in range(columns)).rstrip()
            if y in screen.buffer
            else ""
            for y in range(rows)
        )
        cursor = screen.cursor.y, min(screen.cursor.x, columns - 1)
        return Screen(tuple(lines), cursor, self._size, self._title, self._is_complete)

    def _start_of_work(self, text: str) -> int:
        """The place from which the rest of the text is no more than WORK_CELLS of work."""
        rows, columns = self._size
        is_inserting = _INSERTING in self._shown.mode
        most = rows * max(rows, columns) * (columns if is_inserting or "h" in text else 1)
        if len(text) * most < 2 * WORK_CELLS:
            return 0  # even if all of it were sequences of two characters that clear the screen
        work, places = 0, [(0, 0)]
        for token in _TOKEN.finditer(text):
            is_drawn = token["text"] or token["final"] == "b"
            work += self._work(token) * (columns if is_inserting and is_drawn else 1)
            is_inserting = is_inserting or token["final"] == "h"
            if work - places[-1][1] >= WORK_CELLS // 16:
                places.append((token.end(), work))
        return next((place for place, before in places if work - before <= WORK_CELLS), len(text))

    def _work(self, token: re.Match[str]) -> int:
        rows, columns = self._size
        kind = token.lastgroup
        if kind == "text":
            # A line that is full is followed by another one, which may move all of them.
            cells = len(token[0]) if token[0].isascii() else 2 * len(token[0])
            return cells * (1 + rows // columns)
        if kind == "control":
            if token[0] == "\t":
                return 1 + columns // 64  # pyte sorts the tab stops, one for each column at most
            return rows if token[0] in "\n\v\f" else 1
        if kind in ("escape", "set"):
            return rows * columns if token["escape"] in ("#8", "c", None) else rows
        if kind != "final":
            return 1
        final = token["final"]
        if final in _LINES_WORK:
            return rows
        if final in "ST":
            return rows * _numbers(token["params"], 1, rows)[0]
        if final == "b":
            return _numbers(token["params"], 1, rows * columns)[0] * (1 + rows // columns)
        return rows * columns if final == "J" else columns if final in _LINE_WORK else 1

    def _take(self, token: re.Match[str]) -> None:
        kind, screen = token.lastgroup, self._shown
        if kind == "text":
            self._draw(token[0])
        elif kind == "control":
            if token[0] in "\x0e\x0f":
                self._shift = int(token[0] == "\x0e")
            else:
                getattr(screen, _CONTROLS[token[0]])()
        elif kind == "final":
            self._take_sequence(token["final"], token["params"])
        elif kind == "set":
            self._set_modes(_numbers(token["modes"], 16, 9999), is_set=token["set"] == "h")
        elif kind == "title":
            self._title = "".join(each for each in token["title"] if each.isprintable())
            self._title = self._title[:TITLE_CHARACTERS]
        elif kind == "charset":
            self._graphics[token["charset"][0] == ")"] = token["charset"][1] == "0"
        elif kind == "escape" and token["escape"] == "c":
            self._reset()
        elif kind == "escape":
            if token["escape"] == "E":
                screen.carriage_return()
            getattr(screen, _ESCAPES[token["escape"]])()
            del screen.savepoints[:-SAVED_CURSORS]
        elif kind == "held":
            self._held = token[0] if len(token[0]) <= HELD_CHARACTERS else ""

    def _take_sequence(self, final: str, params: str) -> None:
        screen, (rows, columns) = self._shown, self._size
        if final in ("h", "l"):
            if _INSERTING in _numbers(params, 16, 9999):
                change = screen.set_mode if final == "h" else screen.reset_mode
                change(_INSERTING)
        elif final == "b":
            self._draw(self._last * _numbers(params, 1, rows * columns)[0])
        elif final in ("S", "T"):
            self._scroll(_numbers(params, 1, rows)[0], is_up=final == "S")
        elif final in _SEQUENCES:
            method, count, largest = _SEQUENCES[final]
            numbers = _numbers(params, count, 9999, default=0)
            if largest is None:
                numbers = [min(each, max(rows, columns)) for each in numbers]
            elif numbers[0] > largest or (final, numbers[0]) in (("g", 1), ("g", 2)):
                return
            getattr(screen, method)(*numbers)
            del screen.savepoints[:-SAVED_CURSORS]

    def _scroll(self, count: int, *, is_up: bool) -> None:
        screen = self._shown
        margins = screen.margins
        top, bottom = (0, self._size[0] - 1) if margins is None else (margins.top, margins.bottom)
        y, screen.cursor.y = screen.cursor.y, bottom if is_up else top
        for _ in range(count):
            screen.index() if is_up else screen.reverse_index()
        screen.cursor.y = y

    def _set_modes(self, modes: list[int], *, is_set: bool) -> None:
        for mode in modes:
            if mode == _WRAPPING:
                change = self._shown.set_mode if is_set else self._shown.reset_mode
                change(mode, private=True)
            elif mode in _ALTERNATE:
                rows, columns = self._size
                is_alternate = self._shown is not self._main
                if is_set and not is_alternate:
                    self._shown = pyte.Screen(columns, rows)
                elif not is_set:
                    self._shown = self._main

    def _draw(self, text: str) -> None:
        if self._graphics[self._shift]:
            text = text.translate(_LINES)
        if not text.isascii():
            text = _visible(text)
        if text:
            self._shown.draw(text)
            self._last = text[-1]


_LINES: Final = {code: VT100_MAP[code] for code in range(0x5F, 0x7F)}


def _visible(text: str) -> str:
    """Characters that take cells: accents become a part of theirs, others without width go."""
    drawn: list[str] = []
    for character in text:
        if wcwidth(character) > 0:
            drawn.append(character)
        elif drawn and unicodedata.combining(character):
            composed = unicodedata.normalize("NFC", drawn[-1] + character)
            if len(composed) == 1:
                drawn[-1] = composed
    return "".join(drawn)


def _numbers(params: str, count: int, largest: int, *, default: int = 1) -> list[int]:
    """The first parameters of a sequence; missing ones and 0 are the default."""
    numbers = [
        min(int(each[:5]) if each.isdigit() else default, largest) or default
        for each in params.replace(":", ";")[: 6 * 16].split(";")[:count]
    ]
    return numbers[:count]


class TerminalScreen:
    """The screen of one process, from the output that the server retains."""

    def __init__(self, session: ClientSession, process_id: ProcessId) -> None:
        self._session = session
        self._id = process_id
        self._after = 0  # the last event that was rendered
        self._terminal: Renderer | None = None
        self._lock = asyncio.Lock()  # held by an update

    async def update(self, size: tuple[int, int]) -> Screen:
        """The screen with all output of the process until now; raises ProcessLost."""
        if max(size) > MAX_ROWS_OR_COLUMNS:
            limit = f"{MAX_ROWS_OR_COLUMNS} rows and columns"
            raise ValueError(f"the terminal is larger than a screen can be: {limit}")
        async with self._lock:
            data, is_complete = await self._receive()
            if self._terminal is None:
                self._terminal = Renderer(*size)
            # Not in the loop: it may take seconds.
            return await asyncio.to_thread(self._terminal.show, data, size, is_complete=is_complete)

    async def _receive(self) -> tuple[bytes, bool]:
        """The output since the last call, and whether it is complete."""
        pieces: list[bytes] = []
        is_complete, last, size = True, None, 0
        while last is None or self._after < last:
            params = ReadParams(self._id, self._after, _READ_BYTES, 0)
            try:
                answer: Any = await self._session.call(READ, params, is_retryable=True)
            except InvalidRequest:
                if self._terminal is None:
                    text = "the server does not know the process any more, nor its screen"
                    raise ProcessLost(text) from None
                break  # the last screen stays
            last = answer.next_seq - 1 if last is None else last
            if not answer.chunks or answer.chunks[-1].seq <= self._after:
                break
            is_complete = is_complete and not answer.lost_bytes
            is_complete = is_complete and answer.chunks[0].seq <= self._after + 1
            pieces += (each.chunk for each in answer.chunks)
            self._after = answer.chunks[-1].seq
            size += sum(len(each.chunk) + _CHUNK_COST for each in answer.chunks)
            if size > RECEIVED_BYTES:
                is_complete = False
                break
        return b"".join(pieces), is_complete
