"""Output of terminals as HTML."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.client.ansi_html import ansi_to_html

RED, BRIGHT_GREEN = "#d0384a", "#2eb066"


def span(css: str, text: str) -> str:
    return f'<span style="{css}">{text}</span>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain\n\ttext", "plain\n\ttext"),
        ("\x1b[31mred\x1b[0m not", span(f"color:{RED}", "red") + " not"),
        ("\x1b[92;41mx\x1b[39;49my",
         span(f"color:{BRIGHT_GREEN};background-color:{RED}", "x") + "y"),
        ("\x1b[102mx", span(f"background-color:{BRIGHT_GREEN}", "x")),
        ("\x1b[1;3;4;9mx", span("font-weight:bold;font-style:italic;text-decoration:"
                                "underline line-through", "x")),
        ("\x1b[1;2mx\x1b[22my", span("font-weight:bold;opacity:0.7", "x") + "y"),
        ("\x1b[3;4;7;9;23;24;27;29mx", "x"),
        ("\x1b[7mx", span("color:#f4f4f4;background-color:#3e424d", "x")),
        ("\x1b[31;7mx", span(f"color:#f4f4f4;background-color:{RED}", "x")),
        ("\x1b[4:3mx\x1b[4:0my", span("text-decoration:underline", "x") + "y"),
        ("\x1b[38;5;1mx", span(f"color:{RED}", "x")),
        ("\x1b[38;5;196;48;5;255mx", span("color:#ff0000;background-color:#eeeeee", "x")),
        ("\x1b[38;5;999mx", span("color:#eeeeee", "x")),
        ("\x1b[38;2;1;2;300;1mx", span("color:#0102ff;font-weight:bold", "x")),
        ("\x1b[38:2::1:2:3mx", span("color:#010203", "x")),
        ("\x1b[38:2:1:2:3mx\x1b[38:5:1my", span("color:#010203", "x") + span(f"color:{RED}", "y")),
        ("\x1b[38mx\x1b[38;9my\x1b[999999999999;?mz", "xyz"),
        ("\x1b[mx\x1b[;mx", "xx"),
        ("\x1b[31ma\x1b[31mb\x1b[mc", span(f"color:{RED}", "ab") + "c"),
    ],
)  # fmt: skip
def test_colours_and_fonts(text: str, expected: str) -> None:
    assert ansi_to_html(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\r\ntwo\r\n", "one\ntwo\n"),
        (" 10%\r 90%\r100%\n", "100%\n"),
        ("kept\r\n", "kept\n"),
        ("kept\r", "kept"),
        ("gone\r\x1b[2Knew", "new"),
        ("gone\x1b[2K\n", "\n"),
        ("kept\x1b[K\n", "kept\n"),
        ("ab\bc\b\b\b\bd", "d"),
        ("b\x08\x1b[1mb\x1b[0m", span("font-weight:bold", "b")),
        ("\x1b]0;title\x07a\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "alink"),
        ("\x1b]0;no end\nshown", "\nshown"),
        ("\x1bPq#0\x1b\\a\x1b(Bb\x1b7c\x1b", "abc"),
        ("a\x00\x07\x0b\x7f\x9b31mb", "a31mb"),
        ("\x1b[10;10Ha\x1b[?25l", "a"),
    ],
)
def test_other_sequences_do_no_harm(text: str, expected: str) -> None:
    assert ansi_to_html(text) == expected


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)
        assert [name for name, _ in attrs] == ["style"]
        assert re.fullmatch(r"[a-z0-9#;:. -]+", attrs[0][1] or "")


HOSTILE = [
    "<script>",
    "</pre>",
    "\x1b[",
    "31m",
    '"',
    "'",
    "&",
    ";",
    "38;2;",
    "<b",
    "\x1b]8;;",
    "\r",
]


@given(st.lists(st.sampled_from(HOSTILE) | st.text(max_size=4)).map("".join))
def test_no_text_makes_an_element(text: str) -> None:
    made = ansi_to_html(text)
    elements = _Elements()
    elements.feed(made)
    elements.close()
    assert elements.found <= {"span"}
    assert made.count("<span") == made.count("</span>")
    shown = html.unescape(re.sub(r"<[^>]*>", "", made))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
