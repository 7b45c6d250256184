"""Signals of the server: those that end it, and those without an action in any of its processes."""

from __future__ import annotations

import signal
from typing import Final

ENDING: Final = (signal.SIGTERM, signal.SIGINT)
# The signals with an action, once there is an event loop.
HANDLED: Final = (*ENDING, signal.SIGHUP)
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


def block_handled() -> None:
    """Hold the HANDLED signals back until there are handlers, which unblock them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
