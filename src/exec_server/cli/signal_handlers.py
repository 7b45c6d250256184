"""SignalHandlers: the signals that end the server, and a log entry for each one without an action.

Not `loop.add_signal_handler`: the loop restores the default actions when it is closed, so a second
signal would kill the server during its clean-up.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import Final

from exec_server.host.signals import UNUSED

log = logging.getLogger(__name__)

ENDING: Final = (signal.SIGTERM, signal.SIGINT)


class SignalHandlers:
    """Calls `end` on the event loop for each ENDING signal. The handlers are never removed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, end: Callable[[], None]) -> None:
        self._loop = loop
        self._end = end
        self._is_closed = False
        for number in ENDING:
            signal.signal(number, self._handle)
        for number in UNUSED:
            if signal.getsignal(number) == signal.SIG_IGN:  # see `ignore_unused`
                signal.signal(number, self._handle)

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
        else:
            log.warning("ignored %s: the server has no action for it", _name(number))


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
