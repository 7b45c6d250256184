"""Liveness of a peer: pings, probes and progress. Clocks are arguments; no socket is needed.

`Watchdog` and `Probe` are timers of single streams; a listener checks all connections in one tick.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable


class Action(enum.Enum):
    """The result of a check: the stream waits, sends a ping or drops its peer."""

    WAIT = enum.auto()
    PING = enum.auto()
    GIVE_UP = enum.auto()


class KeepAlive:
    """Pings a peer every `ping_seconds`; gives up one that does not answer in `pong_seconds`."""

    __slots__ = ("_give_up_at", "_ping_at", "_ping_seconds", "_pong_seconds")

    def __init__(self, now: float, ping_seconds: float, pong_seconds: float) -> None:
        self._ping_seconds = ping_seconds
        self._pong_seconds = pong_seconds
        self._ping_at = now + ping_seconds
        self._give_up_at: float | None = None  # while a ping is unanswered

    def touch(self, now: float) -> None:
        """The peer has sent something: it need not be pinged for a while."""
        self._ping_at = now + self._ping_seconds
        self._give_up_at = None

    def answered(self) -> None:
        """The peer has answered the last ping. A pong does not postpone the next ping."""
        self._give_up_at = None

    def check(self, now: float, *, can_answer: bool = True) -> Action:
        """The due action; none while the ping does not reach the peer or its pong is not read."""
        is_due = now >= self._ping_at
        if is_due:
            self._ping_at = now + self._ping_seconds
        if not can_answer:
            self._give_up_at = None
        elif self._give_up_at is not None:
            if now >= self._give_up_at:
                return Action.GIVE_UP
        elif is_due:
            self._give_up_at = now + self._pong_seconds
            return Action.PING
        return Action.WAIT

    def next_check(self) -> float:
        """The time at which an action may be due, unless the peer sends something."""
        if self._give_up_at is None:
            return self._ping_at
        return min(self._ping_at, self._give_up_at)


class TransferProgress:
    """Whether something that should move has moved within `seconds`."""

    __slots__ = ("_moved_at", "_seconds")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._moved_at = 0.0

    def touch(self, now: float) -> None:
        """It begins, or it has moved."""
        self._moved_at = now

    def remaining(self, now: float) -> float:
        """Seconds until it counts as stalled; not positive once it does."""
        return self._moved_at + self._seconds - now


class CheckTimer:
    """A timer that calls `check`, which returns the seconds until the next call, None to stop."""

    __slots__ = ("_check", "_loop", "_timer")

    def __init__(self, check: Callable[[], float | None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._check = check
        self._timer: asyncio.TimerHandle | None = None

    def start(self, delay: float) -> None:
        """Call `check` after a delay, unless a call is due already."""
        if self._timer is None:
            self._timer = self._loop.call_later(delay, self._run)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _run(self) -> None:
        self._timer = None
        delay = self._check()
        if delay is not None:
            self.start(delay)


class Probe:
    """Calls `give_up` unless the peer shows within `seconds` that it is alive."""

    __slots__ = ("_give_up", "_loop", "_seconds", "_timer", "is_active")

    def __init__(self, seconds: float, give_up: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._give_up = give_up
        self._timer: asyncio.TimerHandle | None = None
        self.is_active = False  # an attribute, because the hot path reads it for each message

    def start(self) -> None:
        if not self.is_active:
            self.is_active = True
            reason = "another connection asks for its session and it is silent"
            self._timer = self._loop.call_later(self._seconds, self._give_up, reason)

    def cancel(self) -> None:
        """The peer is alive, or the link is gone."""
        self.is_active = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
