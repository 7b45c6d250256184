"""Attempts: when a lost connection is tried again, and when it is given up.

The end is one of the clock that runs during suspend, because the server's is one, too. A laptop
that wakes up tries at once: the delay, and an attempt that may wait for an address that is gone,
are cut short.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from exec_server.host.clock import SleepDetector, boot_time

# The longest delay between two attempts: a person who opens a laptop waits no longer. Before that
# it is a share of the time since the loss: nobody waits much longer than the server is away.
MAX_DELAY_SECONDS = 5.0
DELAY_SHARE = 0.05
# How often the clock is looked at, which may have jumped.
CHECK_SECONDS = 1.0


class Attempts:
    """The attempts to get one session back, or a new one."""

    def __init__(
        self, seconds: float, last_seconds: float, clock: Callable[[], float] = boot_time
    ) -> None:
        """Give up after `seconds`; the last attempt begins `last_seconds` before that."""
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._began = clock()
        self._last_seconds = last_seconds
        self._sleep = SleepDetector(self._loop.time(), self._began)
        self.seconds = seconds
        self.count = 0
        """The number of attempts that were begun."""
        self.reason = ""
        """The error of the last one."""

    @property
    def remaining(self) -> float:
        """Seconds until the end, negative after it."""
        return self._began + self.seconds - self._clock()

    def delay(self, shortest: float) -> float:
        """Seconds to wait before the next attempt, at least `shortest` unless it is the last."""
        elapsed = self.seconds - self.remaining
        delay = max(shortest, min(MAX_DELAY_SECONDS, elapsed * DELAY_SHARE))
        before_last = self.remaining - self._last_seconds
        return min(delay, before_last) if before_last > 0 else delay

    @contextlib.asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Raise TimeoutError in the block at the end, and when the machine has woken up."""
        timer: asyncio.TimerHandle | None = None
        self._has_woken()  # while no block was entered

        def check() -> None:
            nonlocal timer
            remaining = self.remaining
            if remaining <= 0 or self._has_woken():
                scope.reschedule(self._loop.time())
            else:
                timer = self._loop.call_later(min(CHECK_SECONDS, remaining), check)

        async with asyncio.timeout(None) as scope:
            check()
            try:
                yield
            finally:
                if timer is not None:
                    timer.cancel()

    def _has_woken(self) -> bool:
        return self._sleep.has_slept(self._loop.time(), self._clock())
