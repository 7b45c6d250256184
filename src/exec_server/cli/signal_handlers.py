"""SignalHandlers: the signals that end the server, that reload its certificate, or have no action.

Not `loop.add_signal_handler`: the loop restores the default actions when it is closed, so a second
signal would kill the server during its clean-up.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from exec_server.host.signals import ENDING, HANDLED, UNUSED

log = logging.getLogger(__name__)


class SignalHandlers:
    """Calls `end` on the event loop for each ENDING signal. The handlers are never removed.

    SIGHUP calls `reload`, also under nohup; without `reload` it keeps its action. These signals are
    unblocked: those that `block_handled` has held back are handled at once.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        end: Callable[[], None],
        reload: Callable[[], None] | None = None,
    ) -> None:
        self._loop = loop
        self._end = end
        self._reload = reload
        self._is_closed = False
        for number in ENDING:
            signal.signal(number, self._handle)
        if reload is not None:
            signal.signal(signal.SIGHUP, self._handle)
        for number in UNUSED:
            if signal.getsignal(number) == signal.SIG_IGN:  # see `ignore_unused`
                signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)

    def close(self) -> None:
        """Ignore all further signals; call this before the loop is closed."""
        self._is_closed = True

    def _handle(self, number: int, _: object) -> None:
        # Called between any two instructions of the main thread, perhaps inside of a log call.
        if not self._is_closed:
            self._loop.call_soon_threadsafe(self._act, number)

    def _act(self, number: int) -> None:
        if number in ENDING:
            self._end()
        elif number == signal.SIGHUP and self._reload is not None:
            self._reload()
        else:
            log.warning("ignored %s: the server has no action for it", _name(number))


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
