"""What our signals mean to a command that runs elsewhere: it gets them, as far as it can.

SIGINT twice in a short time means that the user wants an end of it, and SIGHUP that there is no
user any more. Stopping us stops the command, too, unless it has a terminal of its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from exec_server.client.process import Process
from exec_server.commands.terminal import Terminal, window_size
from exec_server.errors import ExecServerError, Unsupported

# Within this time a second Ctrl-C means: whatever it takes.
INSIST_SECONDS: Final = 2.0
# How long a command may go on when its user has gone away.
HANG_UP_SECONDS: Final = 5.0
# How long a signal may take on its way before we stop without it.
STOP_SECONDS: Final = 1.0
# Signals on their way to a server that does not answer. Further ones are dropped: the command will
# have enough to do with these.
MAX_UNDER_WAY: Final = 64

PASSED_ON: Final = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
_DEADLY: Final = frozenset({signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})


def heeded(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """All but those that our starter has us ignore, as nohup does, or a shell with `&`."""
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


class SignalPasser:
    """Passes signals on while it is installed; `give_up` gets the exit code to leave with."""

    def __init__(
        self,
        process: Process,
        terminal: Terminal | None,
        tasks: asyncio.TaskGroup,
        give_up: Callable[[int], None],
    ) -> None:
        self._process = process
        self._terminal = terminal
        self._tasks = tasks
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self._under_way: set[asyncio.Task[None]] = set()
        self._hang_up: asyncio.TimerHandle | None = None
        self._last_interrupt = float("-inf")
        self._has_new_size = False
        self._is_resizing = False

    def install(self) -> None:
        for number in heeded(PASSED_ON):
            self._loop.add_signal_handler(number, self._pass_on, number)
        for number in heeded((signal.SIGTSTP,)):
            self._loop.add_signal_handler(number, self._on_stop)
        self._loop.add_signal_handler(signal.SIGCONT, self._on_continue)
        if self._terminal is not None:
            self._loop.add_signal_handler(signal.SIGWINCH, self.resize)

    def remove(self) -> None:
        """Signals do to us what they do to everybody, and nothing is under way any more."""
        for number in (*PASSED_ON, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH):
            self._loop.remove_signal_handler(number)
        if self._hang_up is not None:
            self._hang_up.cancel()
        for task in self._under_way:
            task.cancel()

    def _begin(self, work: Callable[[], Awaitable[None]]) -> None:
        async def quietly() -> None:
            try:
                await work()
            except ExecServerError:
                pass  # it has ended, or the session; whoever reads its output knows more

        if len(self._under_way) >= MAX_UNDER_WAY:
            return
        task = self._tasks.create_task(quietly())
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    # ---- passing on -------------------------------------------------------------------

    def _pass_on(self, number: signal.Signals) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if now - self._last_interrupt < INSIST_SECONDS:
                self._give_up(128 + number)
                return
            self._last_interrupt = now
        if number == signal.SIGHUP and self._hang_up is None:
            self._hang_up = self._loop.call_later(HANG_UP_SECONDS, self._give_up, 128 + number)
        self._begin(lambda: self._send(number))

    async def _send(self, number: signal.Signals) -> None:
        try:
            await self._process.signal(number.name.removeprefix("SIG"))
        except Unsupported:
            if number == signal.SIGINT:
                await self._process.interrupt()
            elif number in _DEADLY:
                await self._process.terminate()

    # ---- the terminal -----------------------------------------------------------------

    def resize(self) -> None:
        """Tell the command how large the terminal is, if the server can."""
        self._has_new_size = True
        if not self._is_resizing:
            self._begin(self._resize)

    async def _resize(self) -> None:
        """One question at a time; the last size counts."""
        self._is_resizing = True
        try:
            while self._has_new_size:
                self._has_new_size = False
                if (size := window_size(0)) is not None:
                    await self._process.resize(*size)
        except Unsupported:
            pass  # it stays as it was; the user sees that
        finally:
            self._is_resizing = False

    # ---- stopping and going on --------------------------------------------------------

    def _on_stop(self) -> None:
        if self._terminal is not None:
            self.suspend()
        else:
            self._begin(self._stop_both)

    async def _stop_both(self) -> None:
        try:
            async with asyncio.timeout(STOP_SECONDS):
                # Not TSTP: the kernel drops it, as nobody there could ever continue the command.
                await self._process.signal("STOP")
        except (TimeoutError, ExecServerError):
            pass  # then only we stop
        self.suspend()
        try:
            await self._process.signal("CONT")
        except Unsupported:
            pass

    def suspend(self) -> None:
        """Stop ourselves, as Ctrl-Z would; returns when we are continued."""
        if self._terminal is not None:
            self._terminal.restore()
        for number in heeded((signal.SIGTSTP,)):
            self._loop.remove_signal_handler(number)
            os.kill(os.getpid(), number)
            self._loop.add_signal_handler(number, self._on_stop)
        self._on_continue()

    def _on_continue(self) -> None:
        if self._terminal is not None:
            self._terminal.make_raw()
            self.resize()
