"""Standard streams that were closed when this process was started.

Imports nothing that could open a descriptor: it would get the number of a closed stream.
"""

from __future__ import annotations

import os
import sys


def open_missing() -> None:
    """Open /dev/null as 0, 1 and 2 where closed; raises OSError.

    Otherwise the next socket would be the stderr of every program that this process starts. A
    started program inherits the descriptors, so it has all three too.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
            os.set_inheritable(descriptor, True)
    # Python has None for a closed stream, and print(file=None) prints to stdout.
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - open until the process ends
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def flush() -> bool:
    """Flush stdout and stderr; False if one of them cannot be written to."""
    is_flushed = True
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            is_flushed = False
    return is_flushed
