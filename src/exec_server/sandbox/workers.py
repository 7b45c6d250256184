"""The file workers of a server: made on demand, kept for the next request, bounded in number."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from exec_server.errors import InternalError
from exec_server.sandbox.freshness import Freshness
from exec_server.sandbox.plan import Policy
from exec_server.sandbox.worker import Worker

T = TypeVar("T")

# Each is an interpreter of a few MiB. Beyond it the one that was idle longest makes room.
MAX_WORKERS: Final = 16
# Requests under one policy that run side by side; more would take the places of others.
MAX_PER_POLICY: Final = 4
# A client that is at work asks again within seconds.
IDLE_SECONDS: Final = 60.0

Build = Callable[[Policy], tuple[Worker, Freshness]]


class _Seat:
    """A worker and what it is good for."""

    def __init__(self, policy: Policy, worker: Worker, freshness: Freshness) -> None:
        self.policy = policy
        self.worker = worker
        self.freshness = freshness
        self.idle_since = 0.0

    def close(self) -> None:
        self.worker.close()
        self.freshness.close()


class WorkerPool:
    """Lends workers to threads. A worker serves one policy and one request at a time."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._idle: list[_Seat] = []  # the longest idle first
        self._busy: dict[Policy, int] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def run(self, policy: Policy, action: Callable[[Worker], T]) -> T:
        """Run something on a worker for the policy; waits for one if all are busy. Blocking."""
        seat = self._take(policy)
        try:
            if seat is None or not seat.freshness.is_current():
                if seat is not None:
                    seat.close()
                    seat = None
                seat = _Seat(policy, *self._build(policy))
            return action(seat.worker)
        finally:
            self._give_back(policy, seat)

    def _take(self, policy: Policy) -> _Seat | None:
        """A place among the busy, with an idle worker if there is one."""
        with self._changed:
            while not self._is_closed:
                for seat in reversed(self._idle):
                    if seat.policy == policy:
                        self._idle.remove(seat)
                        self._occupy(policy)
                        return seat
                busy = sum(self._busy.values())
                if self._busy.get(policy, 0) < MAX_PER_POLICY and busy < MAX_WORKERS:
                    if busy + len(self._idle) >= MAX_WORKERS:
                        self._idle.pop(0).close()
                    self._occupy(policy)
                    return None
                self._changed.wait()
            raise InternalError("the server is ending")

    def _occupy(self, policy: Policy) -> None:
        self._busy[policy] = self._busy.get(policy, 0) + 1

    def _give_back(self, policy: Policy, seat: _Seat | None) -> None:
        with self._changed:
            self._busy[policy] -= 1
            if not self._busy[policy]:
                del self._busy[policy]
            if seat is not None:
                if seat.worker.is_broken or self._is_closed:
                    seat.close()
                else:
                    seat.idle_since = time.monotonic()
                    self._idle.append(seat)
            self._changed.notify_all()

    def drop_idle(self) -> None:
        """End the workers that nobody has asked for a while."""
        with self._changed:
            oldest = time.monotonic() - IDLE_SECONDS
            while self._idle and self._idle[0].idle_since < oldest:
                self._idle.pop(0).close()

    def close(self) -> None:
        """End all workers, the busy ones as soon as they are given back."""
        with self._changed:
            self._is_closed = True
            while self._idle:
                self._idle.pop().close()
            self._changed.notify_all()
