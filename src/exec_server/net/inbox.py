"""Inbox: delivers received items to a receiver that can pause. It has no socket.

Theory of operation. A stream feeds received bytes to its decoder, then calls `deliver`, which
takes whole items from the decoder and passes them on, as far as the receiver wants them.

    FLOWING --pause--> PAUSED --resume--> DRAINING --no more items--> FLOWING
       `--------- a burst of items ----------^  `--pause--> PAUSED

The stream reads from its socket or pipe only in FLOWING, when no item is buffered: each read may
bring more than the receiver takes, and the end of the stream must not overtake buffered items.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from typing import Generic, TypeVar

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

    `next_item` returns None if no item is complete. It may close the inbox. `delivered` is called
    after each burst of items.
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
