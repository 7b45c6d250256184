"""The progress bar of a copy.

Hand-written, because tqdm and rich take longer to import than typer (`python -m
bench.alternatives`).
"""

from __future__ import annotations

import os
import time
import unicodedata
from typing import Final

from exec_server.cli.streams import write_all
from exec_server.client.results import Progress
from exec_server.errors import printable

# Faster updates cannot be read.
REDRAW_SECONDS: Final = 0.1

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_BAR_COLUMNS: Final = 20
_DEFAULT_COLUMNS: Final = 80
_MIN_COLUMNS_FOR_BAR: Final = 60


def progress_line(label: str, state: Progress, elapsed: float, columns: int) -> str:
    """The line for a terminal of `columns` columns, the last of which stays free."""
    rate = state.bytes_per_second
    share = min(1.0, state.done_bytes / state.total_bytes) if state.total_bytes else 1.0
    bar = "#" * round(share * _BAR_COLUMNS)
    tail = "  ".join(
        [
            f"{int(share * 100):3d}%",
            *([f"[{bar:-<{_BAR_COLUMNS}}]"] if columns >= _MIN_COLUMNS_FOR_BAR else []),
            f"{format_size(state.done_bytes):>9}",
            f"{format_size(int(rate)):>9}/s",
            f"{_remaining(state, rate, elapsed):>9}",
        ]
    )
    head = truncate(printable(label), max(8, columns - len(tail) - 3))
    return truncate(f"{head}  {tail}", columns - 1)


def _remaining(state: Progress, rate: float, elapsed: float) -> str:
    remaining = state.total_bytes - state.done_bytes
    if remaining <= 0:
        return format_duration(elapsed)
    return f"{format_duration(remaining / rate)} left" if rate else "-:-- left"


class ProgressBar:
    """Draws the progress of one transfer on a terminal, at most every `REDRAW_SECONDS`."""

    def __init__(self, descriptor: int, label: str) -> None:
        """`label` names the source; the path of the current file below it is appended."""
        self._descriptor = descriptor
        self._label = label
        self._began = time.monotonic()
        self._state: Progress | None = None
        self._last_drawn = float("-inf")

    def update(self, state: Progress) -> None:
        """Record the progress, and draw it if the last drawing is old enough."""
        now = time.monotonic()
        self._state = state
        if now - self._last_drawn >= REDRAW_SECONDS:
            self._draw(state, now)

    def finish(self) -> None:
        """Draw the last state and end the line."""
        if self._state is not None:
            self._draw(self._state, time.monotonic())
            self._write("\n")

    def _draw(self, state: Progress, now: float) -> None:
        self._last_drawn = now
        try:
            columns = os.get_terminal_size(self._descriptor).columns or _DEFAULT_COLUMNS
        except OSError:
            columns = _DEFAULT_COLUMNS
        label = f"{self._label}/{state.path}" if state.path else self._label
        line = progress_line(label, state, now - self._began, columns)
        self._write(f"\r{line}\x1b[K")

    def _write(self, text: str) -> None:
        try:
            write_all(self._descriptor, text.encode(errors="replace"))
        except OSError:
            pass  # the terminal is closed; the copy continues


def format_size(count: int) -> str:
    """Format a number of bytes with three digits and a unit."""
    value = float(count)
    for unit in _UNITS:
        if value < 999.5 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.{1 if value < 99.95 else 0}f} {unit}"


def format_duration(seconds: float) -> str:
    """Format a duration as M:SS or H:MM:SS."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours >= 100:
        return "days"
    clock = f"{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
    return f"{hours}:{clock}" if hours else clock


def truncate(text: str, columns: int) -> str:
    """Shorten a text to a number of columns, ending in `…` if characters were removed."""
    if _width(text) <= columns:
        return text
    prefix = ""
    for character in text:
        if _width(prefix + character) > columns - 1:
            break
        prefix += character
    return f"{prefix}…"


def _width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text)
