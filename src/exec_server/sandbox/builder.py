"""SandboxBuilder: launches confined processes by the best confinement of this kernel."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from exec_server.errors import InternalError, os_error_text
from exec_server.sandbox.policy import compiler
from exec_server.sandbox.policy.compiler import HostPaths
from exec_server.sandbox.policy.layout import lay_out
from exec_server.sandbox.policy.model import Policy, View
from exec_server.sandbox.runtime import capabilities, kernel
from exec_server.sandbox.runtime.capabilities import (
    BEST_CONFINEMENT,
    NOT_SEPARATE,
    Confinement,
)
from exec_server.sandbox.runtime.control import Launched, launch
from exec_server.sandbox.runtime.disk import HostDisk
from exec_server.sandbox.runtime.launcher import Launcher
from exec_server.sandbox.runtime.messages import BuildRequest
from exec_server.sandbox.runtime.staleness import InodePins, MountChanges
from exec_server.sandbox.runtime.view import StaleView

T = TypeVar("T")

# Attempts to build a view of a tree that changes meanwhile; each takes milliseconds. Then the
# request fails.
_ATTEMPTS: Final = 8

LEGACY_LANDLOCK: Final = (
    "useLegacyLandlock is not supported: it would confine less than was asked for"
)


class SandboxBuilder:
    """The launcher of a server and the confinement that works. Every method is thread-safe."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.launcher = Launcher(variables)
        self.mounts = MountChanges()
        self.pins = InodePins()
        self._confinement = BEST_CONFINEMENT
        self._lock = threading.Lock()  # guards _confinement

    def close(self) -> None:
        self.launcher.close()
        self.mounts.close()

    def launch(
        self, make_request: Callable[[Confinement], BuildRequest], *, network: bool
    ) -> Launched:
        """Launch a confined process; with `network` in a network namespace of its own. Blocking.

        The best confinement is tried without looking for it first, which would take longer than
        the attempt.
        """
        with self._lock:
            confinement = self._confinement
        try:
            return self._launch_as(confinement, make_request(confinement), network=network)
        except (InternalError, OSError) as error:
            if isinstance(error, StaleView):
                raise
        with self._lock:
            self._confinement = confinement = capabilities.find_confinement(self.launcher)
            if confinement.refusal is not None:
                self._confinement = BEST_CONFINEMENT  # the refusal may be temporary
                raise _not_available(confinement.refusal)
        return self._launch_as(confinement, make_request(confinement), network=network)

    def launch_unlimited(self, request: BuildRequest) -> Launched:
        """Launch the init of a command without limits on files. Blocking.

        A network of its own needs a user namespace: root could leave it otherwise.
        """
        if request.network != "proxied":
            return launch(self.launcher, 0, request)
        try:
            return launch(self.launcher, kernel.CLONE_NEWUSER | kernel.CLONE_NEWNET, request)
        except OSError as error:
            raise _not_available(f"no network namespace: {os_error_text(error)}") from error

    def _launch_as(
        self, confinement: Confinement, request: BuildRequest, *, network: bool
    ) -> Launched:
        restrictions = confinement.restrictions(request.view, request.network)
        if request.role == "init" and not restrictions.is_separate:
            raise _not_available(NOT_SEPARATE)
        return launch(self.launcher, confinement.namespaces(network=network), request)


def _not_available(reason: str) -> InternalError:
    return InternalError(
        f"the requested sandbox is not available on this machine: {reason}; "
        "the request was refused (`exec-server sandbox check` shows details)"
    )


def build_view(policy: Policy, disk: HostDisk, denied: Sequence[str] = ()) -> View:
    """The view of a policy; raises InternalError for a path that a private /proc would expose."""
    view = lay_out(policy, disk, denied)
    for step in view.steps:
        if step.kind == "mask" and f"{step.path}/".startswith(("/proc/", "/dev/")):
            raise InternalError(
                f"cannot enforce sandbox deny-read path {step.path}: /proc and /dev are private"
            )
    return view


def retry_while_stale(build: Callable[[], T]) -> T:
    """Repeat a build whose view became stale before it was finished."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return build()
        except StaleView:
            pass
    return build()


def host_paths(tmpdir: str | None, cwd: str | None) -> HostPaths:
    """The paths of this host that a policy may refer to by name."""
    minimal = tuple(path for path in compiler.MINIMAL_PATHS if os.path.exists(path))
    return HostPaths(tmpdir, minimal, os.path.isdir("/tmp"), cwd)
