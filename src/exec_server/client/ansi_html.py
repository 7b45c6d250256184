"""ansi_html: output with the colour sequences of terminals as HTML. Pure.

The text may be hostile: it is escaped, and style attributes are made of constants and numbers of
this module only. Sequences for anything but colours and fonts are removed.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

# One sequence, control character or stretch of text. The text of an operating system command ends
# at the latest with its line, so that one without an end hides no more.
_TOKEN: Final = re.compile(
    r"\x1b\[(?P<arguments>[0-?]*)[ -/]*(?P<final>[@-~])"
    r"|\x1b[]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?"
    r"|\x1b[ -/]*[0-~]?"
    r"|(?P<control>[\n\r\b])"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
    r"|(?P<text>[^\x00-\x08\x0a-\x1f\x7f-\x9f]+)"
)

# Black, red, green, yellow, blue, magenta, cyan, white, and the bright ones: readable on white and
# on dark backgrounds.
_PALETTE: Final = (
    *("#3e424d", "#d0384a", "#1a8f4a", "#a87400", "#2a7bde", "#a5509f", "#168a9c", "#8a8f98"),
    *("#6b7280", "#ef5b6a", "#2eb066", "#c98a00", "#4b96f0", "#c36fbd", "#25a8bb", "#b4b8bf"),
)
_LEVELS: Final = (0, 95, 135, 175, 215, 255)  # of the cube of 216 colours


class _Style(NamedTuple):
    colour: str = ""
    background: str = ""
    is_bold: bool = False
    is_faint: bool = False
    is_italic: bool = False
    is_underlined: bool = False
    is_struck: bool = False
    is_inverse: bool = False

    def css(self) -> str:
        colour, background = self.colour, self.background
        if self.is_inverse:
            colour, background = background or "#f4f4f4", colour or "#3e424d"
        lines = " ".join(
            name
            for name, is_set in (
                ("underline", self.is_underlined),
                ("line-through", self.is_struck),
            )
            if is_set
        )
        parts = {
            "color": colour,
            "background-color": background,
            "font-weight": "bold" if self.is_bold else "",
            "opacity": "0.7" if self.is_faint else "",
            "font-style": "italic" if self.is_italic else "",
            "text-decoration": lines,
        }
        return ";".join(f"{name}:{value}" for name, value in parts.items() if value)


_PLAIN: Final = _Style()
_FONTS: Final[dict[int, dict[str, Any]]] = {
    1: {"is_bold": True},
    2: {"is_faint": True},
    3: {"is_italic": True},
    4: {"is_underlined": True},
    7: {"is_inverse": True},
    9: {"is_struck": True},
    21: {"is_underlined": True},
    22: {"is_bold": False, "is_faint": False},
    23: {"is_italic": False},
    24: {"is_underlined": False},
    27: {"is_inverse": False},
    29: {"is_struck": False},
}


def ansi_to_html(text: str) -> str:
    """The text as the content of a `pre` element."""
    page = _Page()
    for token in _TOKEN.finditer(text.replace("\r\n", "\n")):
        if token["text"] is not None:
            page.write(token["text"])
        elif token["control"] is not None:
            page.control(token["control"])
        elif token["final"] == "m":
            page.style = _restyled(page.style, token["arguments"])
        elif token["final"] == "K" and token["arguments"] == "2":
            page.erase_line()
    return page.html()


class _Page:
    """Finished lines, and the stretches of the last line, which a progress bar may overwrite."""

    def __init__(self) -> None:
        self.style = _PLAIN
        self._done: list[str] = []
        self._line: list[tuple[_Style, str]] = []
        self._is_at_start = False  # after a carriage return, the next text replaces the line

    def write(self, text: str) -> None:
        if self._is_at_start:
            self.erase_line()
        if self._line and self._line[-1][0] == self.style:
            text = self._line.pop()[1] + text
        self._line.append((self.style, text))

    def control(self, character: str) -> None:
        if character == "\n":
            self._done.append(f"{self._line_html()}\n")
            self.erase_line()
        elif character == "\r":
            self._is_at_start = True
        elif self._line:  # a backspace; pagers print bold text with it
            style, text = self._line.pop()
            if len(text) > 1:
                self._line.append((style, text[:-1]))

    def erase_line(self) -> None:
        self._line = []
        self._is_at_start = False

    def html(self) -> str:
        return "".join((*self._done, self._line_html()))

    def _line_html(self) -> str:
        return "".join(
            f'<span style="{css}">{html.escape(text)}</span>'
            if (css := style.css())
            else html.escape(text)
            for style, text in self._line
        )


def _restyled(style: _Style, arguments: str) -> _Style:
    """The style after one Select Graphic Rendition sequence (ECMA-48, 8.3.117)."""
    fields = iter(arguments.split(";"))
    for field in fields:
        parts = field.split(":")  # ISO 8613-6 separates the parts of a colour by colons
        code = _number(parts[0])
        if code == 0:
            style = _PLAIN
        elif code in (38, 48):
            colour = _extended(iter(_without_space(parts[1:])) if len(parts) > 1 else fields)
            is_colour = code == 38
            style = (
                style._replace(colour=colour) if is_colour else style._replace(background=colour)
            )
        elif code == 4 and parts[1:] == ["0"]:  # an underline of the style `none`
            style = style._replace(is_underlined=False)
        elif code in _FONTS:
            style = style._replace(**_FONTS[code])
        else:
            style = _with_basic_colour(style, code)
    return style


def _with_basic_colour(style: _Style, code: int) -> _Style:
    if 30 <= code <= 37 or 90 <= code <= 97:
        return style._replace(colour=_PALETTE[code - 30 if code < 90 else code - 82])
    if 40 <= code <= 47 or 100 <= code <= 107:
        return style._replace(background=_PALETTE[code - 40 if code < 100 else code - 92])
    if code == 39:
        return style._replace(colour="")
    if code == 49:
        return style._replace(background="")
    return style


def _without_space(parts: list[str]) -> list[str]:
    """The parts of a colour without the optional identifier of its colour space (2::R:G:B)."""
    return [parts[0], *parts[2:]] if parts[:1] == ["2"] and len(parts) >= 5 else parts


def _extended(fields: Iterator[str]) -> str:
    """A colour of 256 (5;N) or of 24 bits (2;R;G;B); empty if it is neither."""
    kind = _number(next(fields, ""))
    if kind == 5:
        return _indexed(min(_number(next(fields, "")), 255))
    if kind == 2:
        red, green, blue = (min(_number(next(fields, "")), 255) for _ in range(3))
        return f"#{red:02x}{green:02x}{blue:02x}"
    return ""


def _indexed(index: int) -> str:
    if index < 16:
        return _PALETTE[index]
    if index >= 232:
        grey = 8 + 10 * (index - 232)
        return f"#{grey:02x}{grey:02x}{grey:02x}"
    red, rest = divmod(index - 16, 36)
    green, blue = divmod(rest, 6)
    return f"#{_LEVELS[red]:02x}{_LEVELS[green]:02x}{_LEVELS[blue]:02x}"


def _number(text: str) -> int:
    """A parameter; an empty one is 0, and a longer one than any code is none of them."""
    if not text:
        return 0
    return int(text) if len(text) <= 4 and text.isascii() and text.isdigit() else -1
