"""Texts of errors in the output of commands."""

from __future__ import annotations

import errno

import pytest

from exec_server.sandbox.policy.error_texts import ENGLISH, ErrorTexts

_GERMAN = ErrorTexts(
    {"Keine Berechtigung": errno.EACCES, "Das Ger\u00e4t ist belegt (oder nicht)": errno.EBUSY}
)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("x: Permission denied", (3, errno.EACCES)),
        ("EROFS: read-only file system, open 'x'", (7, errno.EROFS)),
        ("Operation not permitted", (0, errno.EPERM)),
        ("Device or resource busy", (0, errno.EBUSY)),
        ("Failed to write file x", (0, errno.EROFS)),
        ("x: Keine Berechtigung", None),
        ("permission  denied", None),
    ],
)
def test_english_texts(line: str, found: tuple[int, int] | None) -> None:
    assert ENGLISH.find(line) == found


def test_translations_are_found_beside_the_english_texts() -> None:
    assert _GERMAN.find("x: keine Berechtigung") == (3, errno.EACCES)
    assert _GERMAN.find("Das Ger\u00e4t ist belegt (oder nicht)") == (0, errno.EBUSY)
    assert _GERMAN.find("Das Ger\u00e4t ist belegt") is None
    assert _GERMAN.find("x: Permission denied") == (3, errno.EACCES)


def test_phrases_are_found_in_lower_cased_bytes() -> None:
    for texts, line in (
        (ENGLISH, "Permission denied"),
        (_GERMAN, "Das Ger\u00e4t ist belegt (oder nicht)"),
    ):
        assert any(phrase in line.encode().lower() for phrase in texts.phrases)
