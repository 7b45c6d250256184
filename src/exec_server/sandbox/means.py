"""What this machine offers to confine with, found out by trying it."""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass
from typing import Final

import msgspec

from exec_server.errors import InternalError, os_error_text
from exec_server.sandbox import kernel, orders
from exec_server.sandbox.launcher import Launcher
from exec_server.sandbox.orders import Order, Program, Report
from exec_server.sandbox.plan import View
from exec_server.sandbox.view import ProcMount

log = logging.getLogger(__name__)

_ALL: Final = kernel.NEW_MOUNTS | kernel.NEW_PIDS | kernel.NEW_IPC
_EMPTY: Final = View(False, (), (), (), ())
_NOT_BUILT: Final = "the sandbox could not be built: "

# The parts that `survey` tries, each with an order that needs it.
USER_NAMESPACES: Final = "user namespaces"
NAMESPACES: Final = {
    "mount namespaces": kernel.NEW_MOUNTS,
    "pid namespaces": kernel.NEW_PIDS,
    "ipc namespaces": kernel.NEW_IPC,
    "network namespaces": kernel.NEW_NETWORK,
}
MOUNTS: Final = "new mount calls"
OWN_PROC: Final = "private /proc"
FILTER: Final = "seccomp"
# Begins the failure of a part that needs another one, which has failed.
NOT_TRIED: Final = "not without "
_PLAIN: Final = Order("init", None, "restricted", "inherited")
_WITH_VIEW: Final = Order("init", _EMPTY, "restricted", "inherited")
_WITH_PROC: Final = Order("init", _EMPTY, "restricted", "own")
_NOTHING_TO_DO: Final = Program(["true"], None, "/", {}, None, 0, ())


@dataclass(frozen=True, slots=True)
class Means:
    """How processes are confined here; `refusal` says why they cannot be."""

    user_namespace: bool = False
    own_proc: bool = False
    landlock: int = 0
    refusal: str | None = None

    def namespaces(self, *, network: bool) -> int:
        """The namespaces of a confined process; `network` for one that must reach nobody."""
        flags = _ALL | (kernel.NEW_USER if self.user_namespace else 0)
        return flags | (kernel.NEW_NETWORK if network else 0)


# What current kernels offer to everybody. Landlock is asked for by whoever uses it.
BEST_MEANS: Final = Means(user_namespace=True, own_proc=True)


def find_means(launcher: Launcher) -> Means:
    """Try the ways to confine, the best first. Blocking, for some milliseconds."""
    if not kernel.is_known_machine():
        return Means(refusal=f"system calls of {kernel.MACHINE} are not known")
    landlock = kernel.landlock_version()
    reasons = []
    for user_namespace in (True, False) if os.geteuid() == 0 else (True,):
        for own_proc in (True, False):
            means = Means(user_namespace, own_proc, landlock)
            reason = _attempt(launcher, means)
            if reason is None:
                return means
            reasons.append(reason)
            log.info("sandbox: %s does not work here: %s", means, reason)
    return Means(landlock=landlock, refusal=reasons[0])


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that confinement is made of, tried alone; `failure` is None if it works."""

    name: str
    failure: str | None


def survey(launcher: Launcher) -> list[Part]:
    """Try each part by itself, for people who want to know what is missing. Blocking.

    Nothing can be tried on a machine whose system calls are not known.
    """
    if not kernel.is_known_machine():
        return []
    failure = _failure(launcher, kernel.NEW_USER, _PLAIN)
    parts = [Part(USER_NAMESPACES, failure)]
    if failure is not None and os.geteuid() != 0:
        # Only root may do without; everybody else needs it for the right to make the others.
        names = (*NAMESPACES, MOUNTS, OWN_PROC)
        parts += [Part(name, f"{NOT_TRIED}{USER_NAMESPACES}") for name in names]
    else:
        base = kernel.NEW_USER if failure is None else 0
        for name, flag in NAMESPACES.items():
            parts.append(Part(name, _failure(launcher, base | flag, _PLAIN)))
        lacking = next((part.name for part in parts[1:] if part.failure), None)
        for name, order in ((MOUNTS, _WITH_VIEW), (OWN_PROC, _WITH_PROC)):
            if lacking is None:
                failure = _failure(launcher, base | _ALL, order)
                lacking = name if failure else None
            else:
                failure = f"{NOT_TRIED}{lacking}"
            parts.append(Part(name, failure))
    parts.append(Part(FILTER, _failure(launcher, 0, _PLAIN, _NOTHING_TO_DO)))
    return parts


def _failure(
    launcher: Launcher, namespaces: int, order: Order, program: Program | None = None
) -> str | None:
    """Why a process cannot become, or do, what it is told; None if it can."""
    try:
        _, control = launch(launcher, namespaces, order)
        with control, open(os.devnull, "r+b", buffering=0) as null:
            if program is not None:
                tell(control, program, [null.fileno()] * 3)
    except OSError as error:
        return os_error_text(error)
    except InternalError as error:
        return error.message.removeprefix(_NOT_BUILT)
    return None


def _attempt(launcher: Launcher, means: Means) -> str | None:
    """Why a process cannot be confined by these means, None if it can."""
    proc: ProcMount = "own" if means.own_proc else "none"
    order = Order("worker", _EMPTY, "restricted", proc)
    try:
        _, control = launch(launcher, means.namespaces(network=True), order)
    except OSError as error:
        return f"cannot create namespaces: {os_error_text(error)}"
    except InternalError as error:
        return error.message
    control.close()
    return None


Launched = tuple[int, socket.socket]  # the pid, and the way to talk to it


class StaleOrder(InternalError):
    """The disk changed between the laying out and the building of a view."""


def launch(launcher: Launcher, namespaces: int, order: Order) -> Launched:
    """Have a process confined as ordered; returns its pid and socket once it is. Blocking."""
    control, theirs = socket.socketpair()
    try:
        with theirs:
            pid = launcher.launch(namespaces, theirs)
        tell(control, order, [])
    except BaseException:
        control.close()
        raise
    return pid, control


def tell(control: socket.socket, order: msgspec.Struct, descriptors: list[int]) -> None:
    """Give an order and wait until it is carried out. Blocking."""
    try:
        orders.send(control, order, descriptors)
        report, extra = orders.receive(control, Report)
    except (BrokenPipeError, ConnectionError, orders.Disconnected) as error:
        raise InternalError(f"{_NOT_BUILT}{error}") from error
    for descriptor in extra:
        os.close(descriptor)
    if report.state == "ready":
        return
    if report.state == "stale":
        raise StaleOrder(f"the disk keeps changing: {report.reason}")
    raise InternalError(f"{_NOT_BUILT}{report.reason}")
