"""When it pays not to sleep."""

from __future__ import annotations

import asyncio
import os
import time

# After an answer the loop looks for the next request for so long before it sleeps: clients that
# work through a list ask again soon, and waking up takes longer than half an answer.
AWAKE_SECONDS = 50e-6


class Wakefulness:
    """Keeps the event loop from sleeping for a moment, if there is a processor to spare."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_affordable = len(os.sched_getaffinity(0)) > 1
        self._until = 0.0
        self._is_awake = False

    def extend(self) -> None:
        self._until = time.monotonic() + AWAKE_SECONDS
        if self._is_affordable and not self._is_awake:
            self._is_awake = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        # While callbacks are due the loop polls its descriptors without waiting.
        if time.monotonic() < self._until:
            self._loop.call_soon(self._turn)
        else:
            self._is_awake = False
