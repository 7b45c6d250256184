"""Rates, sizes and the line that is redrawn."""

from __future__ import annotations

import os

import pytest

from exec_server.cli.files import progress
from exec_server.cli.files.progress import ProgressBar, format_duration, format_size, progress_line
from exec_server.client.results import Progress

_MIB = 1_048_576


def _state(done: int, total: int, rate: float = 0, path: str = "") -> Progress:
    return Progress(path, done, total, 0, 0, 1, 0, rate)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (100 * 1024, "100 KiB"),
        (5 * _MIB, "5.0 MiB"),
        (3 * 1024**4, "3.0 TiB"),
        (9999 * 1024**4, "9999 TiB"),
    ],
)
def test_sizes_have_three_digits(count: int, text: str) -> None:
    assert format_size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (9.6, "0:10"), (61, "1:01"), (3600, "1:00:00"), (400_000, "days")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_line_says_how_far_how_fast_and_how_long() -> None:
    line = progress_line("file", _state(10 * _MIB, 40 * _MIB, 10 * _MIB), elapsed=1.0, columns=80)
    assert line.split() == [
        *("file", "25%", "[#####---------------]"),
        *("10.0", "MiB", "10.0", "MiB/s", "0:03", "left"),
    ]
    assert len(line) < 80
    assert "-:-- left" in progress_line("f", _state(50, 100), elapsed=60.0, columns=80)


def test_the_end_shows_the_whole_time() -> None:
    line = progress_line("f", _state(100, 100), elapsed=75.0, columns=80)
    assert line.split()[-1] == "1:15"
    assert " 100% " in progress_line("f", _state(0, 0), elapsed=1.0, columns=80)


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 200])
def test_a_line_fits_the_terminal(columns: int) -> None:
    for label in ("n" * 300, "日本" * 100, "short"):
        line = progress_line(label, _state(1, 2), elapsed=1.0, columns=columns)
        assert progress._width(line) < columns
        assert ("[" in line) == (columns >= 60)


def test_names_do_nothing_to_the_terminal() -> None:
    line = progress_line("a\x1b[2J\nb", _state(1, 2), elapsed=1.0, columns=80)
    assert "a\\x1b[2J\\nb" in line


def test_a_bar_is_drawn_now_and_then_and_at_the_end() -> None:
    reader, writer = os.pipe()
    try:
        bar = ProgressBar(writer, "tree")
        for done in range(1000):
            bar.update(_state(done, 1000, path="a/b"))
        bar.finish()
        drawn = os.read(reader, 1_000_000)
    finally:
        os.close(reader)
        os.close(writer)
    assert drawn.startswith(b"\rtree/a/b ")
    assert drawn.endswith(b"\x1b[K\n")
    assert b" 99%" in drawn
    assert drawn.count(b"\r") < 100


def test_a_bar_that_never_began_leaves_nothing() -> None:
    reader, writer = os.pipe()
    try:
        ProgressBar(writer, "x").finish()
    finally:
        os.close(writer)
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_a_copy_goes_on_when_its_terminal_is_gone() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        bar = ProgressBar(writer, "x")
        bar.update(_state(1, 2))
        bar.finish()
    finally:
        os.close(writer)
