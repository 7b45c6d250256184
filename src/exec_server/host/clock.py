"""The clock that goes on while the machine is suspended, and durations in words.

The clock of an event loop stands still meanwhile.
"""

from __future__ import annotations

import re
import sys
import time
from typing import Final

# A difference between both clocks that a busy machine does not make.
SLEPT_SECONDS = 1.0

_UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def duration(text: str) -> float:
    """Seconds of `90`, `90s`, `15m`, `12h` or `30d`; raises ValueError."""
    match = re.fullmatch(r"([0-9]{1,9})([smhd]?)", text)
    if match is None:
        raise ValueError(text)
    return float(int(match[1]) * _UNITS[match[2]])


duration.__name__ = "duration (90s, 30m, 8h, 1d)"  # in the errors of argparse


def _boot_clock() -> int | None:
    """The clock that includes suspension; None where `time.monotonic` does, as on Windows."""
    # `time.monotonic` of macOS is mach_absolute_time, which stands still while it sleeps; its
    # CLOCK_MONOTONIC goes on (clock_gettime(3) of macOS).
    name = "CLOCK_MONOTONIC" if sys.platform == "darwin" else "CLOCK_BOOTTIME"
    clock: int | None = getattr(time, name, None)
    return clock


_BOOT_CLOCK: Final = _boot_clock()


def boot_time() -> float:
    """Seconds since the boot or another fixed time, including those of suspension."""
    return time.monotonic() if _BOOT_CLOCK is None else time.clock_gettime(_BOOT_CLOCK)


class SleepDetector:
    """Tells whether the machine was suspended, from both clocks."""

    def __init__(self, running: float, boot: float) -> None:
        self._difference = boot - running

    def has_slept(self, running: float, boot: float) -> bool:
        """Whether it was suspended since the last question."""
        before, self._difference = self._difference, boot - running
        return self._difference - before > SLEPT_SECONDS
