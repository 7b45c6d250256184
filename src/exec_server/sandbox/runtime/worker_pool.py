"""The file workers of a server: built on demand, reused, bounded in number."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from exec_server.errors import InternalError
from exec_server.sandbox.policy.model import Policy
from exec_server.sandbox.runtime.staleness import ViewDependencies
from exec_server.sandbox.runtime.worker import Worker

T = TypeVar("T")

# Each is an interpreter of a few MiB. Beyond it the longest idle worker is closed.
MAX_WORKERS: Final = 16
# Concurrent requests of one policy; more would keep workers from other policies.
MAX_PER_POLICY: Final = 4
# An active client sends its next request within seconds.
IDLE_SECONDS: Final = 60.0

Build = Callable[[Policy], tuple[Worker, ViewDependencies]]


class _PooledWorker:
    """A worker, its policy, and the dependencies of its view."""

    def __init__(self, policy: Policy, worker: Worker, dependencies: ViewDependencies) -> None:
        self.policy = policy
        self.worker = worker
        self.dependencies = dependencies
        self.idle_since = 0.0

    def is_usable(self) -> bool:
        """Whether the idle worker lives and its view is current."""
        return self.dependencies.is_current() and not self.worker.has_ended()

    def close(self) -> None:
        self.worker.close()
        self.dependencies.close()


class WorkerPool:
    """Lends workers to threads. A worker serves one policy and one request at a time."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._idle: list[_PooledWorker] = []  # the longest idle first
        self._busy: dict[Policy, int] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def run(self, policy: Policy, action: Callable[[Worker], T]) -> T:
        """Call `action` with a worker for the policy; waits if all are busy. Blocking."""
        pooled = self._acquire(policy)
        try:
            if pooled is None or not pooled.is_usable():
                if pooled is not None:
                    pooled.close()
                    pooled = None
                pooled = _PooledWorker(policy, *self._build(policy))
            return action(pooled.worker)
        finally:
            self._release(policy, pooled)

    def _acquire(self, policy: Policy) -> _PooledWorker | None:
        """Wait for a free slot; returns an idle worker for the policy, None to build one."""
        with self._changed:
            while not self._is_closed:
                for pooled in reversed(self._idle):
                    if pooled.policy == policy:
                        self._idle.remove(pooled)
                        self._count_busy(policy)
                        return pooled
                busy = sum(self._busy.values())
                if self._busy.get(policy, 0) < MAX_PER_POLICY and busy < MAX_WORKERS:
                    if busy + len(self._idle) >= MAX_WORKERS:
                        self._idle.pop(0).close()
                    self._count_busy(policy)
                    return None
                self._changed.wait()
            raise InternalError("the server is shutting down")

    def _count_busy(self, policy: Policy) -> None:
        self._busy[policy] = self._busy.get(policy, 0) + 1

    def _release(self, policy: Policy, pooled: _PooledWorker | None) -> None:
        with self._changed:
            self._busy[policy] -= 1
            if not self._busy[policy]:
                del self._busy[policy]
            if pooled is not None:
                if pooled.worker.is_broken or self._is_closed:
                    pooled.close()
                else:
                    pooled.idle_since = time.monotonic()
                    self._idle.append(pooled)
            self._changed.notify_all()

    def drop_idle(self) -> None:
        """End the workers that were unused for IDLE_SECONDS."""
        with self._changed:
            oldest = time.monotonic() - IDLE_SECONDS
            while self._idle and self._idle[0].idle_since < oldest:
                self._idle.pop(0).close()

    def close(self) -> None:
        """End all workers, the busy ones as soon as they are released."""
        with self._changed:
            self._is_closed = True
            while self._idle:
                self._idle.pop().close()
            self._changed.notify_all()
