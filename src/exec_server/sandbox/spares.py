"""Sandboxes built ahead: an init that waits in its finished view for a program to run.

Building namespaces and mounts takes most of the time of a short command. After each confined
command one more sandbox for the same policy is built in the background, for the next one. It
is used if nothing that its view was derived from has changed since.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

from exec_server.errors import ExecServerError
from exec_server.sandbox.freshness import Freshness
from exec_server.sandbox.plan import Missing, Policy

log = logging.getLogger(__name__)

# One for each of the policies used last; each is a process of a few MiB.
MAX_SPARES: Final = 4
# How long a build is waited for; it takes milliseconds.
BUILD_SECONDS: Final = 0.5
# A client that is at work runs its next command within minutes.
IDLE_SECONDS: Final = 120.0


class Init(NamedTuple):
    """An init in its view, and what it still needs to know when its program comes."""

    pid: int
    control: socket.socket
    missing: tuple[Missing, ...]
    freshness: Freshness | None

    def close(self) -> None:
        """End it, unless its program runs: that does not need us any more."""
        self.control.close()
        if self.freshness is not None:
            self.freshness.close()


Build = Callable[[Policy], Init]


class Spares:
    """Keeps at most one init for each policy. Every method may be called from any thread."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._lock = threading.Condition()
        self._spares: OrderedDict[Policy, tuple[Init, float]] = OrderedDict()  # oldest first
        self._thread = ThreadPoolExecutor(1, "spares")
        self._wanted: set[Policy] = set()  # being built, or about to be
        self._awaited: set[Policy] = set()  # of those, what somebody waits for
        self._is_closed = False

    def take(self, policy: Policy) -> Init | None:
        """An init for the policy that is good for use; the caller has it to itself.

        One that is being built is waited for, by one caller: to begin another one would only
        slow down both.
        """
        with self._lock:
            if policy in self._wanted and policy not in self._awaited:
                self._awaited.add(policy)
                self._lock.wait_for(lambda: policy not in self._wanted, BUILD_SECONDS)
                self._awaited.discard(policy)
            spare, _ = self._spares.pop(policy, (None, 0.0))
        if spare is not None and (spare.freshness is None or not spare.freshness.is_current()):
            spare.close()
            spare = None
        return spare

    def want(self, policy: Policy) -> None:
        """Have one built in the background, unless that is under way."""
        with self._lock:
            if self._is_closed or policy in self._wanted or len(self._wanted) >= MAX_SPARES:
                return
            self._wanted.add(policy)
            self._thread.submit(self._add, policy)

    def _add(self, policy: Policy) -> None:
        spare = None
        try:
            spare = self._build(policy)
        except (OSError, ExecServerError) as error:
            log.info("sandbox: no spare: %s", error)  # the next command will say why
        dropped = []
        with self._lock:
            self._wanted.discard(policy)
            if spare is not None:
                dropped.append(self._spares.pop(policy, (None, 0.0))[0])
                self._spares[policy] = (spare, time.monotonic())
                if self._is_closed or len(self._spares) > MAX_SPARES:
                    dropped.append(self._spares.popitem(last=False)[1][0])
            self._lock.notify_all()
        for init in dropped:
            if init is not None:
                init.close()

    def drop_idle(self) -> None:
        """End those that nobody has asked for a while."""
        oldest = time.monotonic() - IDLE_SECONDS
        with self._lock:
            while self._spares and next(iter(self._spares.values()))[1] < oldest:
                self._spares.popitem(last=False)[1][0].close()

    def close(self) -> None:
        """End all of them."""
        with self._lock:
            self._is_closed = True
            for init, _ in self._spares.values():
                init.close()
            self._spares.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)
