"""A number of bytes that all connections of a listener share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Room:
    """Bytes that large incoming messages may take up at a time, given in order of asking."""

    def __init__(self, total: int) -> None:
        self._free = total
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    def take(self, size: int, granted: Callable[[], None]) -> bool:
        """Take room at once, or be called when it has been taken."""
        if self.take_now(size):
            return True
        self._waiting.append((size, granted))
        return False

    def take_now(self, size: int) -> bool:
        """Take room at once or not at all."""
        if self._waiting or size > self._free:
            return False
        self._free -= size
        return True

    def give_back(self, size: int) -> None:
        self._free += size
        while self._waiting and self._waiting[0][0] <= self._free:
            size, granted = self._waiting.popleft()
            self._free -= size
            granted()

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits."""
        return bool(self._waiting)

    def cancel(self, granted: Callable[[], None]) -> None:
        """Stop waiting."""
        self._waiting = deque(entry for entry in self._waiting if entry[1] != granted)
