"""Texts of peers without effects on a terminal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.errors import lossy, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ü 日本", "plain ü 日本"),
        ("\x1b[31m\x07", "\\x1b[31m\\x07"),
        ("\x9b2J\x7f", "\\x9b2J\\x7f"),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\u202e\u2066\u2028", "\\u202e\\u2066\\u2028"),
        ("\U000e0001", "\\U000e0001"),
        ("not UTF-8: \udcff", "not UTF-8: \\xff"),
        ("half: \ud800", "half: \\ud800"),
        ("", ""),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_some_can_be_kept() -> None:
    assert printable("a\nb\x1b", keep="\n") == "a\nb\\x1b"


@given(st.text())
def test_the_result_is_printable(text: str) -> None:
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain ü \x1b", "plain ü \x1b"),
        ("/tmp/x\udcff", "/tmp/x\ufffd"),
        ("\udcc3\udcbc", "ü"),
        ("half \ud83d", "half ?"),
    ],
)
def test_lossy(text: str, expected: str) -> None:
    assert lossy(text) == expected
    lossy(text).encode()
