"""EphemeralKeys: keys of handshakes, made while no client waits for them."""

from __future__ import annotations

import asyncio
from typing import Final

from exec_server.relay.noise import Identity

# Keys made ahead: clients that connect at the same moment. Further ones wait for theirs.
KEYS_AHEAD: Final = 4
# A key is replaced after this time, when the handshake that took it is over.
REFILL_SECONDS: Final = 0.05


class EphemeralKeys:
    """A few keys in memory, each of which is used once."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._keys: list[Identity] = []
        self._timer: asyncio.TimerHandle | None = None
        self._schedule()

    def take(self) -> Identity:
        """A key that no other handshake gets."""
        key = self._keys.pop() if self._keys else Identity.generate()
        self._schedule()
        return key

    def _schedule(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(REFILL_SECONDS, self._refill)

    def _refill(self) -> None:
        # One at a time: each takes a fifth of a millisecond.
        self._timer = None
        self._keys.append(Identity.generate())
        if len(self._keys) < KEYS_AHEAD:
            self._schedule()
