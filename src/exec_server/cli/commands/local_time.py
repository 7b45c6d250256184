"""The times that a server reports, as the local times of the tables."""

from __future__ import annotations

import time


def local_time(seconds: float, form: str) -> str:
    """The local time in the form of strftime; `?` for a time that the calendar does not have."""
    try:
        return time.strftime(form, time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "?"
