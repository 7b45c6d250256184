"""Clocks for tests: timers whose time the test advances, and an event loop whose time jumps to the
next timer as soon as nothing else is to be done."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar, cast


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


T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """Advances the clock instead of waiting for it."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        # Other threads, which look names up, get a moment of real time.
        events = super().select(0.001)
        if not events:
            self.now += timeout
        return events


class JumpingLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine; `asyncio.get_running_loop().time()` is the time since its start."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(main)
