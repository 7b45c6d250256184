"""Forwards signals of the client to a command that runs on a server.

A second SIGINT within two seconds ends the client, and so does SIGHUP after a grace period.
Stopping the client also stops the command, unless the command has a terminal of its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from exec_server.cli.commands.terminal import Terminal, window_size
from exec_server.client.process import Process
from exec_server.errors import ExecServerError, Unsupported

# A second Ctrl-C within this time terminates the command.
DOUBLE_INTERRUPT_SECONDS: Final = 2.0
# Time for the command to react to SIGHUP before it is terminated.
HANGUP_GRACE_SECONDS: Final = 5.0
# Time for the server to stop the command before the client stops alone.
STOP_TIMEOUT_SECONDS: Final = 1.0
# Signals sent to a server that has not yet answered. Further ones are dropped: more would only
# repeat these.
MAX_PENDING: Final = 64

FORWARDED: Final = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
_FATAL: Final = frozenset({signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})


def unignored(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """The signals that were not ignored when this process started (`nohup`, a shell's `&`)."""
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


class SignalForwarder:
    """Forwards signals while it is installed; calls `abort` with the exit code to end with."""

    def __init__(
        self,
        process: Process,
        terminal: Terminal | None,
        tasks: asyncio.TaskGroup,
        abort: Callable[[int], None],
    ) -> None:
        self._process = process
        self._terminal = terminal
        self._tasks = tasks
        self._abort = abort
        self._loop = asyncio.get_running_loop()
        self._pending: set[asyncio.Task[None]] = set()
        self._hangup_timer: asyncio.TimerHandle | None = None
        self._last_interrupt = float("-inf")  # monotonic
        self._has_new_size = False
        self._is_resizing = False
        self._is_continued = False  # since the command is being stopped

    def install(self) -> None:
        for number in unignored(FORWARDED):
            self._loop.add_signal_handler(number, self._forward, number)
        for number in unignored((signal.SIGTSTP,)):
            self._loop.add_signal_handler(number, self._on_stop)
        self._loop.add_signal_handler(signal.SIGCONT, self._on_continue)
        if self._terminal is not None:
            self._loop.add_signal_handler(signal.SIGWINCH, self.resize)

    def remove(self) -> None:
        """Restore the default handlers and cancel everything pending."""
        for number in (*FORWARDED, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH):
            self._loop.remove_signal_handler(number)
        if self._hangup_timer is not None:
            self._hangup_timer.cancel()
        for task in self._pending:
            task.cancel()

    def _start_task(self, work: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            try:
                await work()
            except ExecServerError:
                pass  # process or session has ended, which the output reader reports

        if len(self._pending) >= MAX_PENDING:
            return
        task = self._tasks.create_task(run())
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    # ---- forwarding -------------------------------------------------------------------

    def _forward(self, number: signal.Signals) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            elapsed, self._last_interrupt = now - self._last_interrupt, now
            if elapsed < DOUBLE_INTERRUPT_SECONDS:
                self._abort(128 + number)
                return
        if number == signal.SIGHUP and self._hangup_timer is None:
            self._hangup_timer = self._loop.call_later(
                HANGUP_GRACE_SECONDS, self._abort, 128 + number
            )
        self._start_task(lambda: self._send(number))

    async def _send(self, number: signal.Signals) -> None:
        try:
            await self._process.signal(number.name.removeprefix("SIG"))
        except Unsupported:
            if number == signal.SIGINT:
                await self._process.interrupt()
            elif number in _FATAL:
                await self._process.kill()

    # ---- the terminal -----------------------------------------------------------------

    def resize(self) -> None:
        """Send the size of the local terminal to the command, if the server supports it."""
        self._has_new_size = True
        if not self._is_resizing:
            self._start_task(self._resize)

    async def _resize(self) -> None:
        """Send one size at a time; only the latest size matters."""
        self._is_resizing = True
        try:
            while self._has_new_size:
                self._has_new_size = False
                if (size := window_size(0)) is not None:
                    await self._process.resize(*size)
        except Unsupported:
            pass  # the remote terminal keeps its size
        finally:
            self._is_resizing = False

    # ---- stopping and continuing ------------------------------------------------------

    def _on_stop(self) -> None:
        if self._terminal is not None:
            self.suspend()
        else:
            self._start_task(self._stop_both)

    async def _stop_both(self) -> None:
        self._is_continued = False
        try:
            async with asyncio.timeout(STOP_TIMEOUT_SECONDS):
                # Not TSTP: the kernel discards it for an orphaned process group.
                await self._process.signal("STOP")
        except (TimeoutError, ExecServerError):
            pass  # only the client stops
        if not self._is_continued:  # SIGCONT may be faster than the server
            self.suspend()
        try:
            await self._process.signal("CONT")
        except Unsupported:
            pass

    def suspend(self) -> None:
        """Stop this process, as Ctrl-Z would; returns when it is continued."""
        if self._terminal is not None:
            self._terminal.restore()
        for number in unignored((signal.SIGTSTP,)):
            self._loop.remove_signal_handler(number)
            os.kill(os.getpid(), number)
            self._loop.add_signal_handler(number, self._on_stop)
        self._on_continue()

    def _on_continue(self) -> None:
        self._is_continued = True
        if self._terminal is not None:
            self._terminal.make_raw()
            self.resize()
