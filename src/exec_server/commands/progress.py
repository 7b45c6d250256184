"""How far a copy has come: one line on a terminal, redrawn."""

from __future__ import annotations

import os
import time
import unicodedata
from collections import deque
from typing import Final

from exec_server.client.results import Progress
from exec_server.commands.printing import write_all

# More often nobody can read.
REDRAW_SECONDS: Final = 0.1
# The rate is that of the last few seconds, from as many measurements as are worth keeping.
RATE_SECONDS: Final = 5.0
MAX_SAMPLES: Final = 64

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_BAR: Final = 20
_USUAL_COLUMNS: Final = 80
_NARROW: Final = 60  # columns below which there is no room for a bar


class Meter:
    """Bytes done of a total, the rate, and what is left; no I/O, and time comes as an argument."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._samples: deque[tuple[float, int]] = deque([(now, 0)], MAX_SAMPLES)
        self._copied = 0

    def note(self, copied: int, now: float) -> None:
        """So many bytes have been copied until now."""
        self._copied = copied
        if now - self._samples[-1][0] >= RATE_SECONDS / MAX_SAMPLES:
            self._samples.append((now, copied))
            while len(self._samples) > 2 and self._samples[1][0] < now - RATE_SECONDS:
                self._samples.popleft()

    def rate(self, now: float) -> float:
        """Bytes per second, lately."""
        when, copied = self._samples[0]
        return (self._copied - copied) / (now - when) if now > when else 0.0

    def line(self, label: str, state: Progress, now: float, columns: int) -> str:
        """All of it for a terminal of this width; one column stays free."""
        rate = self.rate(now)
        share = min(1.0, state.done_bytes / state.total_bytes) if state.total_bytes else 1.0
        bar = "#" * round(share * _BAR)
        tail = "  ".join(
            [
                f"{int(share * 100):3d}%",
                *([f"[{bar:-<{_BAR}}]"] if columns >= _NARROW else []),
                f"{readable_size(state.done_bytes):>9}",
                f"{readable_size(int(rate)):>9}/s",
                f"{self._left(state, rate, now):>9}",
            ]
        )
        head = fit(printable(label), max(8, columns - len(tail) - 3))
        return fit(f"{head}  {tail}", columns - 1)

    def _left(self, state: Progress, rate: float, now: float) -> str:
        left = state.total_bytes - state.done_bytes
        if left <= 0:
            return readable_time(now - self._began)
        return f"{readable_time(left / rate)} left" if rate else "-:-- left"


class ProgressBar:
    """Draws it on a terminal, now and then; one bar for one transfer."""

    def __init__(self, descriptor: int, label: str) -> None:
        """`label` is what is copied; files below it are shown behind it."""
        self._descriptor = descriptor
        self._label = label
        self._meter = Meter(time.monotonic())
        self._state: Progress | None = None
        self._last_drawn = float("-inf")

    def update(self, state: Progress) -> None:
        """Take note of how far it is; draws if it is time."""
        now = time.monotonic()
        self._state = state
        self._meter.note(state.done_bytes - state.resumed_bytes, now)
        if now - self._last_drawn >= REDRAW_SECONDS:
            self._draw(state, now)

    def end(self) -> None:
        """Leave the last state on a line of its own."""
        if self._state is not None:
            self._draw(self._state, time.monotonic())
            self._write("\n")

    def _draw(self, state: Progress, now: float) -> None:
        self._last_drawn = now
        try:
            columns = os.get_terminal_size(self._descriptor).columns or _USUAL_COLUMNS
        except OSError:
            columns = _USUAL_COLUMNS
        label = f"{self._label}/{state.path}" if state.path else self._label
        self._write(f"\r{self._meter.line(label, state, now, columns)}\x1b[K")

    def _write(self, text: str) -> None:
        try:
            write_all(self._descriptor, text.encode(errors="replace"))
        except OSError:
            pass  # the terminal is gone, and the copy goes on


def readable_size(count: int) -> str:
    """A number of bytes for people: three digits and a unit."""
    value = float(count)
    for unit in _UNITS:
        if value < 999.5 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.{1 if value < 99.95 else 0}f} {unit}"


def readable_time(seconds: float) -> str:
    """A duration for people."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours >= 100:
        return "days"
    clock = f"{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
    return f"{hours}:{clock}" if hours else clock


def printable(name: str) -> str:
    """A name that does nothing to a terminal."""
    return "".join(character if character.isprintable() else "?" for character in name)


def fit(text: str, columns: int) -> str:
    """The text cut to a number of columns, `…` saying so; padded to none."""
    if _width(text) <= columns:
        return text
    kept = ""
    for character in text:
        if _width(kept + character) > columns - 1:
            break
        kept += character
    return f"{kept}…"


def _width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text)
