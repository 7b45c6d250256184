"""The ways in which a command for people fails, and the exit codes for them."""

from __future__ import annotations

from typing import Final

FAILED: Final = 1
MISTAKEN: Final = 2
# As ssh, so that it is hardly ever taken for the command's own.
EXEC_FAILED: Final = 255
# As timeout(1).
TIMED_OUT: Final = 124


class Mistake(Exception):
    """What was asked for makes no sense; the text says what would."""


class Failure(Exception):
    """It did not work; the text says what a person can do about it."""
