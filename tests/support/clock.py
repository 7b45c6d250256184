"""A clock for tests: the timers of an event loop, and time that the test advances."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast


@dataclass
class Timer:
    """A TimerHandle of the clock."""

    when: float
    run: Callable[[], Any]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """The part of an event loop that the streams use."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> Timer:
        timer = Timer(self.now + delay, lambda: callback(*args))
        self._timers.append(timer)
        return timer

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> Timer:
        return self.call_later(0, callback, *args)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=cast(asyncio.AbstractEventLoop, self))

    def get_debug(self) -> bool:  # called by Future
        return False

    @property
    def waiting(self) -> list[Timer]:
        """The timers that are due later, in order."""
        self._timers = [timer for timer in self._timers if not timer.cancelled]
        return sorted(self._timers, key=lambda timer: timer.when)

    def advance(self, until: float) -> None:
        """Run all timers that are due until then, each at its time."""
        assert until >= self.now
        while (waiting := self.waiting) and waiting[0].when <= until:
            self._timers.remove(waiting[0])
            self.now = waiting[0].when
            waiting[0].run()
        self.now = until

    def run_soon(self) -> None:
        """Run the callbacks that are due now."""
        self.advance(self.now)

    def run_next(self) -> None:
        """Run the one callback that is due next, without advancing the time."""
        due = self.waiting[0]
        assert due.when <= self.now
        self._timers.remove(due)
        due.run()
