"""What the standard streams of a command are. Light to import."""

from __future__ import annotations

import os
import stat


def is_null_device(descriptor: int) -> bool:
    """Whether a descriptor is /dev/null or closed, and can deliver no input."""
    try:
        status, null = os.fstat(descriptor), os.stat(os.devnull)
    except OSError:
        return True
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == null.st_rdev
