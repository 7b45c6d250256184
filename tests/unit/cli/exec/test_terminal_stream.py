"""Escapes in typed input, modes in printed output."""

from __future__ import annotations

import pytest

from exec_server.cli.exec.terminal import (
    MAX_PARTIAL_BYTES,
    MAX_TYPED_BYTES,
    Escape,
    EscapeParser,
    ScreenModes,
)


def _typed(*keys: bytes, character: str | None = "~") -> list[bytes | Escape]:
    escapes = EscapeParser(character)
    return [item for key in keys for item in escapes.feed(key)]


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ((b"~", b"."), [Escape.TERMINATE]),
        ((b"~.",), [Escape.TERMINATE]),
        ((b"l", b"s", b"\r", b"~", b"\x1a"), [b"l", b"s", b"\r", Escape.SUSPEND]),
        ((b"~", b"?", b"~", b"."), [Escape.HELP, Escape.TERMINATE]),
        ((b"~", b"~"), [b"~"]),
        ((b"~", b"a", b"~", b"."), [b"~a", b"~", b"."]),
        ((b"~", b"\r", b"~", b"."), [b"~\r", Escape.TERMINATE]),
        ((b"a", b"~", b"."), [b"a", b"~", b"."]),
        # A paste is never an escape, but it may end a line.
        ((b"~.\npasted\n~.",), [b"~.\npasted\n~."]),
        ((b"~.\npasted\n", b"~", b"."), [b"~.\npasted\n", Escape.TERMINATE]),
        ((b"pasted~.~", b"."), [b"pasted~.~", b"."]),
        ((b"\r~.",), [b"\r", Escape.TERMINATE]),
        ((b"x" * MAX_TYPED_BYTES,), [b"x" * MAX_TYPED_BYTES]),
        ((b"x" * (MAX_TYPED_BYTES + 1),), [b"x" * (MAX_TYPED_BYTES + 1)]),
        ((b"~", b".abc"), [Escape.TERMINATE, b"abc"]),
    ],
)
def test_escapes_begin_a_line(keys: tuple[bytes, ...], found: list[bytes | Escape]) -> None:
    assert _typed(*keys) == found


def test_another_character_or_none() -> None:
    assert _typed(b"~", b".", b"\r", b"%", b".", character="%") == [
        b"~",
        b".",
        b"\r",
        Escape.TERMINATE,
    ]
    assert _typed(b"~", b".", character=None) == [b"~", b"."]


def _reset_sequence(*pieces: bytes) -> bytes:
    modes = ScreenModes()
    for piece in pieces:
        modes.feed(piece)
        modes.settle()
    return modes.reset_sequence()


def test_modes_that_are_on_are_reset() -> None:
    assert _reset_sequence(b"\x1b[?1049h\x1b[?25l\x1b[?1;2004h") == (
        b"\x1b\\\x1b[?2004l\x1b[?1049l\x1b[?25h\x1b[?1l\x1b>\x1b[0m"
    )


def test_modes_that_are_off_again_are_not_reset() -> None:
    assert _reset_sequence(b"\x1b[?1049h text \x1b[?1049l\x1b[?25l\x1b[?25h") == b""
    assert _reset_sequence(b"plain", b"\x1b[31mred\x1b[0m", b"\x1b[?7h") == b""


def test_modes_are_reset_until_the_output_that_switches_them_off_is_written() -> None:
    modes = ScreenModes()
    modes.feed(b"\x1b[?1049h\x1b[?25l")
    modes.settle()
    modes.feed(b"\x1b[?1049l\x1b[?25h")
    assert modes.reset_sequence() == b"\x1b\\\x1b[?1049l\x1b[?25h\x1b>\x1b[0m"
    modes.settle()
    assert modes.reset_sequence() == b""


@pytest.mark.parametrize("at", range(1, 8))
def test_sequences_may_be_cut_anywhere(at: int) -> None:
    sequence = b"\x1b[?1049h"
    assert b"\x1b[?1049l" in _reset_sequence(b"x" + sequence[:at], sequence[at:] + b"y")


def test_a_partial_sequence_is_bounded() -> None:
    modes = ScreenModes()
    modes.feed(b"\x1b" + b"x" * MAX_PARTIAL_BYTES)
    assert modes._partial == b""
    modes.feed(b"\x1b" + b"x" * (MAX_PARTIAL_BYTES - 1))
    assert len(modes._partial) == MAX_PARTIAL_BYTES
    for _ in range(10):
        modes.feed(b"[?1")
    assert len(modes._partial) <= MAX_PARTIAL_BYTES
