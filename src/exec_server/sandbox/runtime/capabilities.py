"""The confinement that this machine supports, found by trying it."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Final

from exec_server.errors import InternalError, os_error_text
from exec_server.sandbox.policy.model import Network, Restrictions, View, choose_restrictions
from exec_server.sandbox.runtime import kernel
from exec_server.sandbox.runtime.launcher import NOT_BUILT, Launcher, launch, request
from exec_server.sandbox.runtime.messages import BuildRequest, ExecRequest
from exec_server.sandbox.runtime.view import ProcMount

log = logging.getLogger(__name__)

_NAMESPACES: Final = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC
# The whole tree of the host, read-only; and a root in which nothing of the host is.
_WHOLE_VIEW: Final = View(False, (), (), (), ())
_RESTRICTED_VIEW: Final = View(True, (), (), (), ())

# The features that `check_features` tries, each with a request that needs it.
USER_NAMESPACES: Final = "user namespaces"
NAMESPACES: Final = {
    "mount namespaces": kernel.CLONE_NEWNS,
    "pid namespaces": kernel.CLONE_NEWPID,
    "ipc namespaces": kernel.CLONE_NEWIPC,
    "network namespaces": kernel.CLONE_NEWNET,
}
MOUNTS: Final = "new mount calls"
PRIVATE_PROC: Final = "private /proc"
FILTER: Final = "seccomp"
# The commands that `check_commands` runs.
WHOLE_ROOT: Final = "whole root"
RESTRICTED_ROOT: Final = "restricted root"
MANAGED_NETWORK: Final = "managed network"
COMMANDS: Final[dict[str, tuple[View, Network]]] = {
    WHOLE_ROOT: (_WHOLE_VIEW, "restricted"),
    RESTRICTED_ROOT: (_RESTRICTED_VIEW, "restricted"),
    MANAGED_NETWORK: (_WHOLE_VIEW, "proxied"),
}
# The reason for refusing commands that are not separate (see policy.restrictions).
NOT_SEPARATE: Final = (
    "none of user namespaces, private /proc and Landlock is available, "
    "so commands would reach each other's files through /proc"
)
# The beginning of the failure of a feature that needs another failed one.
NOT_TRIED: Final = "not without "
_WITHOUT_VIEW: Final = BuildRequest("init", None, "restricted", "inherited")
# With network, because such views need all kinds of mounts.
_WITH_VIEW: Final = BuildRequest("init", _WHOLE_VIEW, "enabled", "inherited")
_WITH_PROC: Final = BuildRequest("init", _WHOLE_VIEW, "enabled", "private")
_RUN_TRUE: Final = ExecRequest(["true"], None, "/", {}, None, ())


@dataclass(frozen=True, slots=True)
class Confinement:
    """How processes are confined here; `refusal` is the reason why they cannot be."""

    user_namespace: bool = False
    private_proc: bool = False
    landlock: int = 0
    refusal: str | None = None

    def restrictions(self, view: View | None, network: Network) -> Restrictions:
        """The restrictions of a command; without `landlock` at least these."""
        return choose_restrictions(
            view,
            network,
            user_namespace=self.user_namespace,
            private_proc=self.private_proc,
            landlock=self.landlock,
        )

    def namespaces(self, *, network: bool) -> int:
        """The namespaces of a confined process; `network` adds an empty network namespace."""
        flags = _NAMESPACES | (kernel.CLONE_NEWUSER if self.user_namespace else 0)
        return flags | (kernel.CLONE_NEWNET if network else 0)


# The confinement that current kernels offer to every user. The version of Landlock is queried
# where it is used.
BEST_CONFINEMENT: Final = Confinement(user_namespace=True, private_proc=True)


def find_confinement(launcher: Launcher) -> Confinement:
    """Try the kinds of confinement, the best first. Blocking, for some milliseconds."""
    if not kernel.is_supported_machine():
        return Confinement(refusal=f"system calls of {kernel.MACHINE} are not known")
    landlock = kernel.landlock_version()
    reasons = []
    for user_namespace in (True, False) if os.geteuid() == 0 else (True,):
        for private_proc in (True, False):
            confinement = Confinement(user_namespace, private_proc, landlock)
            reason = _try_confinement(launcher, confinement)
            if reason is None:
                return confinement
            reasons.append(reason)
            log.info("sandbox: %s does not work here: %s", confinement, reason)
    return Confinement(landlock=landlock, refusal=reasons[0])


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature of the kernel, tried alone; `failure` is None if it works."""

    name: str
    failure: str | None


def check_features(launcher: Launcher) -> list[Feature]:
    """Try each feature alone, to report the missing ones; empty on unknown machines. Blocking."""
    if not kernel.is_supported_machine():
        return []
    failure = _try_request(launcher, kernel.CLONE_NEWUSER, _WITHOUT_VIEW)
    features = [Feature(USER_NAMESPACES, failure)]
    if failure is not None and os.geteuid() != 0:
        # Only root may create the other namespaces without a user namespace.
        names = (*NAMESPACES, MOUNTS, PRIVATE_PROC)
        features += [Feature(name, f"{NOT_TRIED}{USER_NAMESPACES}") for name in names]
    else:
        base = kernel.CLONE_NEWUSER if failure is None else 0
        for name, flag in NAMESPACES.items():
            features.append(Feature(name, _try_request(launcher, base | flag, _WITHOUT_VIEW)))
        failed = next((feature.name for feature in features[1:] if feature.failure), None)
        for name, build in ((MOUNTS, _WITH_VIEW), (PRIVATE_PROC, _WITH_PROC)):
            if failed is None:
                failure = _try_request(launcher, base | _NAMESPACES, build)
                failed = name if failure else None
            else:
                failure = f"{NOT_TRIED}{failed}"
            features.append(Feature(name, failure))
    features.append(Feature(FILTER, _try_request(launcher, 0, _WITHOUT_VIEW, _RUN_TRUE)))
    return features


def check_commands(launcher: Launcher, confinement: Confinement) -> list[Feature]:
    """Run a command of each kind: features that work alone can fail together. Blocking."""
    checked = []
    for name, (view, network) in COMMANDS.items():
        if confinement.refusal is not None:
            failure: str | None = f"{NOT_TRIED}confinement"
        elif not confinement.restrictions(view, network).is_separate:
            failure = f"{NOT_TRIED}separation of commands"
        else:
            proc: ProcMount = "private" if confinement.private_proc else "inherited"
            build = BuildRequest("init", view, network, proc)
            namespaces = confinement.namespaces(network=True)
            failure = _try_request(launcher, namespaces, build, _RUN_TRUE)
        checked.append(Feature(name, failure))
    return checked


def _try_request(
    launcher: Launcher, namespaces: int, build: BuildRequest, command: ExecRequest | None = None
) -> str | None:
    """The reason why a process cannot be built, or run its command; None if it can."""
    try:
        _, control = launch(launcher, namespaces, build)
        with control, open(os.devnull, "r+b", buffering=0) as null:
            if command is not None:
                request(control, command, [null.fileno()] * 3)
    except OSError as error:
        return os_error_text(error)
    except InternalError as error:
        return error.message.removeprefix(NOT_BUILT)
    return None


def _try_confinement(launcher: Launcher, confinement: Confinement) -> str | None:
    """The reason why a process cannot be confined in this way, None if it can."""
    proc: ProcMount = "private" if confinement.private_proc else "none"
    build = BuildRequest("worker", _WHOLE_VIEW, "restricted", proc)
    try:
        _, control = launch(launcher, confinement.namespaces(network=True), build)
    except OSError as error:
        return f"cannot create namespaces: {os_error_text(error)}"
    except InternalError as error:
        return error.message
    control.close()
    return None
