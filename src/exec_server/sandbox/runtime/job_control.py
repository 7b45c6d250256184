"""Children of this process that a signal has stopped (SIGSTOP, SIGTSTP): found and resumed.

The kernel answers a parent without /proc. A child that a debugger has stopped is not reported.
"""

from __future__ import annotations

import os
import signal
from typing import Final

# Reported without waiting, and reported again to the next caller.
_STOPPED: Final = os.WSTOPPED | os.WNOHANG | os.WNOWAIT


def is_stopped(pidfd: int) -> bool:
    """Whether the child with this pidfd is stopped; False for other processes."""
    return _is_stopped(os.P_PIDFD, pidfd)


def resume_if_stopped(pid: int) -> None:
    """Resume a child that is stopped. The caller knows that it has not been reaped."""
    if _is_stopped(os.P_PID, pid):
        try:
            os.kill(pid, signal.SIGCONT)
        except OSError:
            pass  # ended meanwhile


def _is_stopped(kind: int, number: int) -> bool:
    try:
        return os.waitid(kind, number, _STOPPED) is not None
    except ChildProcessError:
        return False  # ended and reaped
