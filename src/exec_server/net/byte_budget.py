"""A number of bytes that all connections of a listener share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from exec_server.host.event_loop import guarded_call


class ByteBudget:
    """Bytes that large incoming messages may take up at a time, granted in order of request."""

    def __init__(self, total: int) -> None:
        self._free = total
        self._waiters: deque[tuple[int, Callable[[], None]]] = deque()

    def acquire(self, size: int, granted: Callable[[], None]) -> bool:
        """Take bytes now, or return False and call `granted` once they are taken."""
        if self.try_acquire(size):
            return True
        self._waiters.append((size, granted))
        return False

    def try_acquire(self, size: int) -> bool:
        """Take bytes now or not at all; never before a waiter."""
        if self._waiters or size > self._free:
            return False
        self._free -= size
        return True

    def release(self, size: int) -> None:
        self._free += size
        while self._waiters and self._waiters[0][0] <= self._free:
            size, granted = self._waiters.popleft()
            self._free -= size
            guarded_call(granted)  # of another connection than the one that releases

    @property
    def has_waiters(self) -> bool:
        return bool(self._waiters)

    def cancel(self, granted: Callable[[], None]) -> None:
        """Stop waiting."""
        self._waiters = deque(entry for entry in self._waiters if entry[1] != granted)
        self.release(0)  # the next waiter may need less


class Reservation:
    """The part of a budget that one connection holds or waits for."""

    __slots__ = ("_budget", "_granted", "is_waiting", "size")

    def __init__(self, budget: ByteBudget, granted: Callable[[], None]) -> None:
        """`granted` is called when bytes that `acquire` had to wait for are there."""
        self._budget = budget
        self._granted = granted
        self.size = 0
        self.is_waiting = False

    def acquire(self, size: int) -> None:
        """Take bytes, or wait for them; only after `release` of earlier ones."""
        assert not self.size
        self.size = size
        self.is_waiting = not self._budget.acquire(size, self._grant)

    def _grant(self) -> None:
        self.is_waiting = False
        self._granted()

    def resize(self, size: int) -> bool:
        """Hold this many bytes from now on; False, and no change, if there are not as many."""
        if size > self.size and not self._budget.try_acquire(size - self.size):
            return False
        if size < self.size:
            self._budget.release(self.size - size)
        self.size = size
        return True

    def release(self) -> None:
        """Give all bytes back, or stop waiting for them."""
        size, self.size = self.size, 0
        if self.is_waiting:
            self.is_waiting = False
            self._budget.cancel(self._grant)
        elif size:
            self._budget.release(size)
