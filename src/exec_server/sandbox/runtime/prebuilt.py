"""Prebuilt sandboxes: an init that waits in its finished view for a command.

Building namespaces and mounts takes most of the time of a short command. After the start of each
confined command another sandbox for the same policy is built in the background, for the next one.
It is used only if the dependencies of its view are unchanged.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

from exec_server.errors import ExecServerError
from exec_server.sandbox.policy.model import MissingName, Policy
from exec_server.sandbox.runtime import messages
from exec_server.sandbox.runtime.messages import ControlSocket
from exec_server.sandbox.runtime.staleness import ViewDependencies

log = logging.getLogger(__name__)

# One for each of the policies used last; each is a process of a few MiB.
MAX_PREBUILT: Final = 4
# The longest wait for a build, which takes milliseconds.
BUILD_SECONDS: Final = 0.5
# An active client runs its next command within minutes.
IDLE_SECONDS: Final = 120.0


class Init(NamedTuple):
    """An init in its built view, with the state needed to start a command in it."""

    pid: int
    control: ControlSocket
    missing: tuple[MissingName, ...]
    dependencies: ViewDependencies | None

    def is_usable(self) -> bool:
        """Whether the waiting init lives and its view is current."""
        is_current = self.dependencies is not None and self.dependencies.is_current()
        return is_current and not messages.has_ended(self.control)

    def end(self) -> None:
        """End an init without a command, also a stopped one."""
        self.control.resume_child()
        self.close()

    def close(self) -> None:
        """Close the control socket, without which an unused init ends, and the dependencies."""
        self.control.close()
        self.close_dependencies()

    def close_dependencies(self) -> None:
        if self.dependencies is not None:
            self.dependencies.close()


Build = Callable[[Policy], Init]


class PrebuiltPool:
    """Keeps at most one init per policy. Every method may be called from any thread."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._changed = threading.Condition()
        self._prebuilt: OrderedDict[Policy, tuple[Init, float]] = OrderedDict()  # oldest first
        self._thread = ThreadPoolExecutor(1, "prebuilt")
        self._building: set[Policy] = set()  # being built, or queued
        self._awaited: set[Policy] = set()  # policies in _building that a caller waits for
        self._is_closed = False

    def take(self, policy: Policy) -> Init | None:
        """A current init for the policy, which the caller then owns; None if there is none.

        One caller waits for an init that is being built: a second build would slow down both.
        """
        with self._changed:
            if policy in self._building and policy not in self._awaited:
                self._awaited.add(policy)
                self._changed.wait_for(lambda: policy not in self._building, BUILD_SECONDS)
                self._awaited.discard(policy)
            init, _ = self._prebuilt.pop(policy, (None, 0.0))
        if init is not None and not init.is_usable():
            init.end()
            init = None
        return init

    def is_building(self, policy: Policy) -> bool:
        """Whether an init for the policy is being built, because the last one was just taken."""
        with self._changed:
            return policy in self._building

    def prebuild(self, policy: Policy) -> None:
        """Build an init in the background, unless one is being built."""
        with self._changed:
            if self._is_closed or policy in self._building or len(self._building) >= MAX_PREBUILT:
                return
            self._building.add(policy)
            self._thread.submit(self._build_one, policy)

    def _build_one(self, policy: Policy) -> None:
        init = None
        try:
            init = self._build(policy)
        except (OSError, ExecServerError) as error:
            log.info("sandbox: cannot prebuild: %s", error)  # the next command reports it
        dropped = []
        with self._changed:
            self._building.discard(policy)
            if init is not None:
                dropped.append(self._prebuilt.pop(policy, (None, 0.0))[0])
                self._prebuilt[policy] = (init, time.monotonic())
                if self._is_closed or len(self._prebuilt) > MAX_PREBUILT:
                    dropped.append(self._prebuilt.popitem(last=False)[1][0])
            self._changed.notify_all()
        for old in dropped:
            if old is not None:
                old.end()

    def drop_idle(self) -> None:
        """End the inits that were unused for IDLE_SECONDS."""
        oldest = time.monotonic() - IDLE_SECONDS
        with self._changed:
            while self._prebuilt and next(iter(self._prebuilt.values()))[1] < oldest:
                self._prebuilt.popitem(last=False)[1][0].end()

    def close(self) -> None:
        """End all inits."""
        with self._changed:
            self._is_closed = True
            for init, _ in self._prebuilt.values():
                init.end()
            self._prebuilt.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)
