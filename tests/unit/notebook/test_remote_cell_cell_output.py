"""Output in a cell while it arrives."""

from __future__ import annotations

import io

import pytest

from exec_server.client.results import Chunk
from exec_server.notebook import remote_cell
from exec_server.notebook.remote_cell import CellOutput


class Recorder(io.StringIO):
    """A stream that a notebook shows when it is flushed."""

    def __init__(self, name: str, screen: list[tuple[str, str]]) -> None:
        super().__init__()
        self._name = name
        self._screen = screen

    def flush(self) -> None:
        if text := self.getvalue():
            self._screen.append((self._name, text))
            self.seek(0)
            self.truncate()


def make() -> tuple[CellOutput, list[tuple[str, str]]]:
    screen: list[tuple[str, str]] = []
    return CellOutput(Recorder("out", screen), Recorder("err", screen)), screen


def test_streams_keep_their_order_and_colours() -> None:
    output, screen = make()
    chunks = [Chunk("stdout", b"\x1b[31ma\x1b[m\n"), Chunk("stderr", b"b\n"), Chunk("pty", b"c\n")]
    output.show(chunks)
    assert screen == [("out", "\x1b[31ma\x1b[m\n"), ("err", "b\n"), ("out", "c\n")]
    output.finish()
    assert len(screen) == 3


def test_characters_are_not_torn() -> None:
    output, screen = make()
    for byte in "ä€".encode():
        output.show([Chunk("stdout", bytes([byte]))])
    output.show([Chunk("stderr", b"\xe2\x82")])
    assert "".join(text for _, text in screen) == "ä€"
    output.finish()
    assert screen[-1] == ("err", "\ufffd")


def test_the_middle_of_long_output_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_cell, "SHOWN_BYTES", 10)
    monkeypatch.setattr(remote_cell, "END_BYTES", 6)
    output, screen = make()
    output.show([Chunk("stdout", b"0123456"), Chunk("stderr", b"abcdef")])
    output.show([Chunk("stdout", b"x" * 100), Chunk("stderr", b"yyyy"), Chunk("stdout", b"zz")])
    assert output._end_bytes == sum(len(data) for _, data in output._end) == 6
    output.finish()
    assert screen == [
        ("out", "0123456"),
        ("err", "abc"),
        ("err", "\n[… 103 bytes not shown …]\nyyyy"),
        ("out", "zz"),
    ]


def test_output_that_is_a_little_longer_is_shown_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_cell, "SHOWN_BYTES", 3)
    output, screen = make()
    output.show([Chunk("stdout", b"12345")])
    output.finish()
    assert screen == [("out", "123"), ("out", "45")]
