"""The capacity of pipes."""

from __future__ import annotations

import fcntl
from typing import Final

# The capacity of a new pipe.
PIPE_BYTES: Final = 65_536
# That of one through which much data passes: larger pieces cost less, and larger ones than this
# leave the caches of the processor.
ENLARGED_BYTES: Final = 4 * PIPE_BYTES

_RESIZE: int | None = getattr(fcntl, "F_SETPIPE_SZ", None)  # of Linux alone


def enlarge_pipe(descriptor: int) -> None:
    """Enlarge a pipe that was full; not every pipe, as the kernel limits a user's pipe memory."""
    if _RESIZE is None:
        return
    try:
        fcntl.fcntl(descriptor, _RESIZE, ENLARGED_BYTES)
    except OSError:
        pass  # it is no pipe, or keeps its size
