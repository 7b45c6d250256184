"""Learns of ended children, ours and the orphans we inherit, and reaps all of them.

One descriptor tells of every child, so a process costs no watcher of its own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from exec_server.core import system

ExitCallback = Callable[[int], None]
_SIGNAL_RECORD_BYTES = 128 * 32


class Reaper:
    """Calls back with the exit code of each watched child."""

    def __init__(self) -> None:
        self._descriptor = system.child_signal_descriptor()
        self._watched: dict[int, ExitCallback] = {}
        # Exit codes of children that ended before they could be watched. Only kept while a
        # start is under way, so it never holds more than what ended during those starts.
        self._early: dict[int, int] = {}
        self._starting = 0

    def open(self) -> None:
        asyncio.get_running_loop().add_reader(self._descriptor, self._on_signal)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)

    def watched(self) -> set[int]:
        """Children started here that have not ended yet."""
        return set(self._watched)

    def expect(self) -> None:
        """A child is about to be started: remember exits until `watch` or `forget` follows."""
        self._starting += 1

    def forget(self) -> None:
        """The start failed."""
        self._starting -= 1
        if not self._starting:
            self._early.clear()

    def watch(self, pid: int, callback: ExitCallback) -> None:
        """Call back once when the child has ended, never before the loop's next turn."""
        code = self._early.pop(pid, None)
        if code is not None and _is_reaped(pid):
            asyncio.get_running_loop().call_soon(callback, code)
        else:
            self._watched[pid] = callback
        self.forget()

    def _on_signal(self) -> None:
        try:
            os.read(self._descriptor, _SIGNAL_RECORD_BYTES)
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = system.exit_code(status)
            callback = self._watched.pop(pid, None)
            if callback is not None:
                callback(code)
            elif self._starting:
                self._early[pid] = code


def _is_reaped(pid: int) -> bool:
    # The number may belong to an orphan that ended while this child, which got the same
    # number afterwards, lives: then it is still ours to wait for.
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False
