"""An event loop whose time jumps to the next timer as soon as nothing else is to be done."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

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


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine; `asyncio.get_running_loop().time()` is the time since its start."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(main)
