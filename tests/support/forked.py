"""Tests that need a process of their own."""

from __future__ import annotations

import functools
import os
import traceback
import warnings
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")


def in_own_process(test: Callable[P, None]) -> Callable[P, None]:
    """Runs a test in a fork of this process: one thread, three descriptors.

    Other tests leave threads behind, such as those in which an event loop asks for addresses, and
    a signal that is blocked in the test's own thread would be theirs.
    """

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
            pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.closerange(3, os.sysconf("SC_OPEN_MAX"))
                test(*args, **kwargs)
                code = 0
            except BaseException:
                # Not through sys.stderr, whose descriptor belongs to pytest and is closed.
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(code)
        status = os.waitpid(pid, 0)[1]
        assert status == 0, f"wait status {status}: see the traceback on stderr"

    return run
