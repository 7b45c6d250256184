"""LazyEvent: an asyncio.Event that takes little memory while no task waits for it."""

from __future__ import annotations

import asyncio


class LazyEvent:
    """An event that makes its asyncio.Event, whose queue takes 800 bytes, for the first waiter.

    Each connection has one and hardly ever a task that waits for it.
    """

    __slots__ = ("_event", "_is_set")

    def __init__(self) -> None:
        self._is_set = False
        self._event: asyncio.Event | None = None  # while tasks wait

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Wake all tasks that wait."""
        self._is_set = True
        if self._event is not None:
            self._event.set()
            self._event = None

    def clear(self) -> None:
        self._is_set = False

    async def wait(self) -> None:
        """Wait until the event is set; it may be cleared again by then."""
        if not self._is_set:
            if self._event is None:
                self._event = asyncio.Event()
            await self._event.wait()
