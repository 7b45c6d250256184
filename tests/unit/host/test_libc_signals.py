"""Signals without an action."""

from __future__ import annotations

import os
import signal

from tests.support.forked import in_own_process

from exec_server.host.libc import UNUSED, ignore_unused


@in_own_process
def test_unused_signals_are_ignored_unless_they_are_handled() -> None:
    received = []
    for number in UNUSED:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, lambda number, _: received.append(number))
    ignore_unused()
    for number in UNUSED:
        os.kill(os.getpid(), number)
    assert received == [signal.SIGPROF]


def test_signals_that_end_a_program_by_convention_keep_their_action() -> None:
    kept = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGXCPU)
    assert not set(kept) & set(UNUSED)
