"""BusyPoll: polls for the next request for a moment instead of sleeping."""

from __future__ import annotations

import asyncio
import os
import time

# How long the loop polls after an answer. Clients that work through a list send the next request
# soon, and waking up takes longer than half an answer.
POLL_SECONDS = 50e-6


class BusyPoll:
    """Keeps the event loop from sleeping for a moment, if there is more than one processor."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_affordable = len(os.sched_getaffinity(0)) > 1
        self._until = 0.0
        self._is_polling = False

    def extend(self) -> None:
        self._until = time.monotonic() + POLL_SECONDS
        if self._is_affordable and not self._is_polling:
            self._is_polling = True
            self._loop.call_soon(self._poll)

    def _poll(self) -> None:
        # While a callback is due the loop polls its descriptors without waiting.
        if time.monotonic() < self._until:
            self._loop.call_soon(self._poll)
        else:
            self._is_polling = False
