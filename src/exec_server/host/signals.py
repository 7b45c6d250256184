"""Signals without an action in the server and its helper processes."""

from __future__ import annotations

import signal
from typing import Final

# By default each of these ends a process. Operators send some of them to programs that reopen logs
# or print statistics on them.
UNUSED: Final = (
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF),
    *(signal.SIGIO, signal.SIGPWR, signal.SIGSTKFLT),
    *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
)


def ignore_unused() -> None:
    """Ignore the UNUSED signals, except those that a profiler handles. Children inherit this."""
    for number in UNUSED:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.SIG_IGN)
