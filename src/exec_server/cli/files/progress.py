"""The progress bar of a copy.

Hand-written, because tqdm and rich take longer to import than typer (`python -m
bench.alternatives`).
"""

from __future__ import annotations

import os
import time
import unicodedata
from collections import deque
from typing import Final

from exec_server.cli.streams import write_all
from exec_server.client.results import Progress
from exec_server.errors import printable

# Faster updates cannot be read.
REDRAW_SECONDS: Final = 0.1
# The rate is an average over these seconds, computed from at most this many samples.
RATE_SECONDS: Final = 5.0
MAX_SAMPLES: Final = 64

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_BAR_COLUMNS: Final = 20
_DEFAULT_COLUMNS: Final = 80
_MIN_COLUMNS_FOR_BAR: Final = 60


class Meter:
    """Computes rate and remaining time, and formats the line; no I/O, time is an argument."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._samples: deque[tuple[float, int]] = deque([(now, 0)], MAX_SAMPLES)
        self._copied = 0

    def update(self, copied: int, now: float) -> None:
        """Record the number of bytes copied so far."""
        self._copied = copied
        if now - self._samples[-1][0] >= RATE_SECONDS / MAX_SAMPLES:
            self._samples.append((now, copied))
            while len(self._samples) > 2 and self._samples[1][0] < now - RATE_SECONDS:
                self._samples.popleft()

    def rate(self, now: float) -> float:
        """Bytes per second over the last `RATE_SECONDS`."""
        when, copied = self._samples[0]
        return (self._copied - copied) / (now - when) if now > when else 0.0

    def line(self, label: str, state: Progress, now: float, columns: int) -> str:
        """Format the line for a terminal of `columns` columns, the last of which stays free."""
        rate = self.rate(now)
        share = min(1.0, state.done_bytes / state.total_bytes) if state.total_bytes else 1.0
        bar = "#" * round(share * _BAR_COLUMNS)
        tail = "  ".join(
            [
                f"{int(share * 100):3d}%",
                *([f"[{bar:-<{_BAR_COLUMNS}}]"] if columns >= _MIN_COLUMNS_FOR_BAR else []),
                f"{format_size(state.done_bytes):>9}",
                f"{format_size(int(rate)):>9}/s",
                f"{self._remaining(state, rate, now):>9}",
            ]
        )
        head = truncate(printable(label), max(8, columns - len(tail) - 3))
        return truncate(f"{head}  {tail}", columns - 1)

    def _remaining(self, state: Progress, rate: float, now: float) -> str:
        remaining = state.total_bytes - state.done_bytes
        if remaining <= 0:
            return format_duration(now - self._began)
        return f"{format_duration(remaining / rate)} left" if rate else "-:-- left"


class ProgressBar:
    """Draws the progress of one transfer on a terminal, at most every `REDRAW_SECONDS`."""

    def __init__(self, descriptor: int, label: str) -> None:
        """`label` names the source; the path of the current file below it is appended."""
        self._descriptor = descriptor
        self._label = label
        self._meter = Meter(time.monotonic())
        self._state: Progress | None = None
        self._last_drawn = float("-inf")

    def update(self, state: Progress) -> None:
        """Record the progress, and draw it if the last drawing is old enough."""
        now = time.monotonic()
        self._state = state
        self._meter.update(state.done_bytes - state.resumed_bytes, now)
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
        self._write(f"\r{self._meter.line(label, state, now, columns)}\x1b[K")

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
