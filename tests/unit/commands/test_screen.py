"""Escapes in what is typed, modes in what is printed."""

from __future__ import annotations

import pytest

from exec_server.commands.screen import CARRIED_BYTES, TYPED_BYTES, Escape, Escapes, ScreenModes


def _typed(*keys: bytes, character: str | None = "~") -> list[bytes | Escape]:
    escapes = Escapes(character)
    return [item for key in keys for item in escapes.feed(key)]


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ((b"~", b"."), [Escape.LEAVE]),
        ((b"~.",), [Escape.LEAVE]),
        ((b"l", b"s", b"\r", b"~", b"\x1a"), [b"l", b"s", b"\r", Escape.SUSPEND]),
        ((b"~", b"?", b"~", b"."), [Escape.HELP, Escape.LEAVE]),
        ((b"~", b"~"), [b"~"]),
        ((b"~", b"a", b"~", b"."), [b"~a", b"~", b"."]),
        ((b"~", b"\r", b"~", b"."), [b"~\r", Escape.LEAVE]),
        ((b"a", b"~", b"."), [b"a", b"~", b"."]),
        # A paste is never an escape, but it may end a line.
        ((b"~.\npasted\n~.",), [b"~.\npasted\n~."]),
        ((b"~.\npasted\n", b"~", b"."), [b"~.\npasted\n", Escape.LEAVE]),
        ((b"pasted~.~", b"."), [b"pasted~.~", b"."]),
        ((b"\r~.",), [b"\r", Escape.LEAVE]),
        ((b"x" * TYPED_BYTES,), [b"x" * TYPED_BYTES]),
        ((b"x" * (TYPED_BYTES + 1),), [b"x" * (TYPED_BYTES + 1)]),
        ((b"~", b".abc"), [Escape.LEAVE, b"abc"]),
    ],
)
def test_escapes_begin_a_line(keys: tuple[bytes, ...], found: list[bytes | Escape]) -> None:
    assert _typed(*keys) == found


def test_another_character_or_none() -> None:
    assert _typed(b"~", b".", b"\r", b"%", b".", character="%") == [
        b"~",
        b".",
        b"\r",
        Escape.LEAVE,
    ]
    assert _typed(b"~", b".", character=None) == [b"~", b"."]


def _undo(*pieces: bytes) -> bytes:
    modes = ScreenModes()
    for piece in pieces:
        modes.feed(piece)
    return modes.undo()


def test_what_was_switched_on_is_switched_off() -> None:
    assert _undo(b"\x1b[?1049h\x1b[?25l\x1b[?1;2004h") == (
        b"\x1b[?2004l\x1b[?1049l\x1b[?1l\x1b[?25h\x1b>\x1b[0m"
    )


def test_what_was_switched_off_again_is_left_alone() -> None:
    assert _undo(b"\x1b[?1049h text \x1b[?1049l\x1b[?25l\x1b[?25h") == b""
    assert _undo(b"plain", b"\x1b[31mred\x1b[0m", b"\x1b[?7h") == b""


@pytest.mark.parametrize("at", range(1, 8))
def test_sequences_may_be_cut_anywhere(at: int) -> None:
    sequence = b"\x1b[?1049h"
    assert b"\x1b[?1049l" in _undo(b"x" + sequence[:at], sequence[at:] + b"y")


def test_what_is_carried_over_is_bounded() -> None:
    modes = ScreenModes()
    modes.feed(b"\x1b" + b"x" * CARRIED_BYTES)
    assert modes._carried == b""
    modes.feed(b"\x1b" + b"x" * (CARRIED_BYTES - 1))
    assert len(modes._carried) == CARRIED_BYTES
    for _ in range(10):
        modes.feed(b"[?1")
    assert len(modes._carried) <= CARRIED_BYTES
