"""BusyPoll: polls for the next request for a moment instead of sleeping."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Final

# How long the loop polls after an answer. Clients that work through a list send the next request
# soon, and waking up takes longer than half an answer.
POLL_SECONDS: Final = 50e-6
# After so many polls in a row that no request ended, the loop sleeps: the client is slow, or
# another program needs the processor that the loop would keep busy.
VAIN_POLLS: Final = 4
# Answers after which one more poll is tried then.
RETRY_ANSWERS: Final = 64


class BusyPoll:
    """Keeps the event loop from sleeping for a moment, if there is more than one processor."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_affordable = len(os.sched_getaffinity(0)) > 1
        self._until = 0.0
        self._is_polling = False
        self._vain = 0  # polls without a request since the last one with a request
        self._unpolled = 0  # answers since the last poll

    def extend(self) -> None:
        """Poll from now on: a request was answered."""
        if self._is_polling:
            self._vain = 0
        elif self._may_poll():
            self._is_polling = True
            self._loop.call_soon(self._poll)
        else:
            return
        self._until = time.monotonic() + POLL_SECONDS

    def _may_poll(self) -> bool:
        if self._vain < VAIN_POLLS:
            return self._is_affordable
        self._unpolled += 1
        if self._unpolled < RETRY_ANSWERS:
            return False
        self._unpolled = 0
        return True

    def _poll(self) -> None:
        # While a callback is due the loop polls its descriptors without waiting.
        if time.monotonic() < self._until:
            self._loop.call_soon(self._poll)
        else:
            self._is_polling = False
            self._vain += 1
