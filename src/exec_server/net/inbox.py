"""Inbox: delivers received items to a receiver that can pause. It has no socket.

    FLOWING --pause--> PAUSED --resume--> DRAINING --no more items--> FLOWING
       `--------- a burst of items ----------^  `--pause--> PAUSED

The stream reads from its socket or pipe only in FLOWING, when no item is buffered: each read may
bring more than the receiver takes, and the end of the stream must not overtake buffered items.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from exec_server.host.event_loop import guarded_call

# Items delivered in a row before the event loop runs other callbacks, and the time after which it
# runs them anyway: an item may take milliseconds.
BURST = 64
BURST_SECONDS = 0.002

T = TypeVar("T")


class Flow(enum.Enum):
    FLOWING = enum.auto()  # items are delivered as they arrive
    PAUSED = enum.auto()  # the receiver wants none
    DRAINING = enum.auto()  # buffered items are delivered, then the stream is read again
    CLOSED = enum.auto()  # nothing is delivered any more


class _Cause(enum.Enum):
    PAUSE = enum.auto()
    RESUME = enum.auto()
    BURST = enum.auto()
    EMPTY = enum.auto()
    CLOSE = enum.auto()


# A missing key changes nothing.
_TRANSITIONS = {
    (Flow.FLOWING, _Cause.PAUSE): Flow.PAUSED,
    (Flow.FLOWING, _Cause.BURST): Flow.DRAINING,
    (Flow.FLOWING, _Cause.CLOSE): Flow.CLOSED,
    (Flow.PAUSED, _Cause.RESUME): Flow.DRAINING,
    (Flow.PAUSED, _Cause.CLOSE): Flow.CLOSED,
    (Flow.DRAINING, _Cause.PAUSE): Flow.PAUSED,
    (Flow.DRAINING, _Cause.EMPTY): Flow.FLOWING,
    (Flow.DRAINING, _Cause.CLOSE): Flow.CLOSED,
}


class Inbox(Generic[T]):
    """Passes items from `next_item` to `receive`; `update_reading` is called when the flow changes.

    `next_item` returns None if no item is complete, and may close the inbox.
    """

    __slots__ = (
        "_burst",
        "_delivered",
        "_flow",
        "_loop",
        "_next_item",
        "_receive",
        "_update_reading",
        "is_flowing",
    )

    def __init__(
        self,
        next_item: Callable[[], T | None],
        receive: Callable[[T], None],
        update_reading: Callable[[], None],
        *,
        burst: int = BURST,
        delivered: Callable[[], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._next_item = next_item
        self._receive = receive
        self._update_reading = update_reading
        self._burst = burst
        self._delivered = delivered
        self._flow = Flow.FLOWING
        self.is_flowing = True  # an attribute, because the hot path reads it for each message

    @property
    def is_paused(self) -> bool:
        return self._flow is Flow.PAUSED

    def deliver(self) -> None:
        """Deliver the items that are complete, unless the receiver is paused or being drained."""
        if self.is_flowing:
            self._deliver()

    def pause(self) -> None:
        self._change(_Cause.PAUSE)

    def resume(self) -> None:
        """Deliver again, after the caller has returned."""
        if self._change(_Cause.RESUME):
            self._loop.call_soon(self._continue)

    def close(self) -> None:
        self._change(_Cause.CLOSE)

    def _continue(self) -> None:
        if self._flow is Flow.DRAINING:
            self._deliver()

    def _deliver(self) -> None:
        self._deliver_burst()
        if self._delivered is not None:
            self._delivered()

    def _deliver_burst(self) -> None:
        clock = self._loop.time
        until = clock() + BURST_SECONDS
        for _ in range(self._burst):
            item = self._next_item()
            if item is None:
                self._change(_Cause.EMPTY)
                return
            self._receive(item)
            if self._flow is not Flow.FLOWING and self._flow is not Flow.DRAINING:
                return
            if clock() >= until:
                break
        self._change(_Cause.BURST)
        self._loop.call_soon(self._continue)

    def _change(self, cause: _Cause) -> bool:
        flow = _TRANSITIONS.get((self._flow, cause))
        if flow is None:
            return False
        self._flow = flow
        is_flowing = flow is Flow.FLOWING
        if is_flowing is not self.is_flowing:
            self.is_flowing = is_flowing
            self._update_reading()
        return True


class ByteBudget:
    """Bytes that large messages of all connections may take up, granted in order of request."""

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
