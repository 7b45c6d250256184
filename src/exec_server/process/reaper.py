"""Reaper: reaps all children, own ones and inherited orphans, and reports exit codes.

One signalfd reports every child, so a process needs no watcher of its own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from exec_server.host import libc
from exec_server.host.guarded_tasks import guarded_call
from exec_server.process.orphans import Orphans, Owner

ExitCallback = Callable[[int], None]
_SIGNAL_RECORD_BYTES = 128 * 32


class Reaper:
    """Calls back with the exit code of each watched child."""

    def __init__(self) -> None:
        self.orphans = Orphans()
        self._descriptor = libc.child_signal_descriptor()
        self._watched: dict[int, ExitCallback] = {}
        # Exit codes of children that ended before `watch`. Only filled while a start is under
        # way, so it holds no more than the children that ended during those starts.
        self._early_exits: dict[int, int] = {}
        self._starting = 0

    def open(self) -> None:
        asyncio.get_running_loop().add_reader(self._descriptor, self._on_signal)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.orphans.close()

    def expect(self, owner: Owner) -> None:
        """Announce a start: exits are remembered until `watch` or `unexpect` is called."""
        self._starting += 1
        self.orphans.expect(owner)

    def unexpect(self, owner: Owner) -> None:
        """Withdraw an `expect`, because the start failed."""
        self.orphans.ended(owner)
        self._end_start()

    def watch(self, pid: int, owner: Owner, callback: ExitCallback) -> None:
        """Call back once when the child has ended, not before the loop's next iteration."""
        code = self._early_exits.pop(pid, None)
        if code is not None and _is_reaped(pid):
            self.orphans.ended(owner)
            asyncio.get_running_loop().call_soon(callback, code)
        else:
            self.orphans.started(owner, pid)
            self._watched[pid] = callback
        self._end_start()

    def _end_start(self) -> None:
        self._starting -= 1
        if not self._starting:
            self._early_exits.clear()

    def _on_signal(self) -> None:
        try:
            os.read(self._descriptor, _SIGNAL_RECORD_BYTES)
        except BlockingIOError:
            pass
        for pid, status in self.orphans.reap():
            code = libc.exit_code(status)
            callback = self._watched.pop(pid, None)
            if callback is not None:
                guarded_call(callback, code)  # the exits of other commands follow
            elif self._starting:
                self._early_exits[pid] = code


def _is_reaped(pid: int) -> bool:
    # The remembered exit may be that of an orphan whose pid was reused for this child, which
    # still runs: then waitid finds the child.
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False
