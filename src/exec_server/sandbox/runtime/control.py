"""The server's end of a confined process: launching it, and requests on its control socket."""

from __future__ import annotations

import os
import socket
from typing import Final

import msgspec

from exec_server.errors import InternalError
from exec_server.sandbox.runtime import messages
from exec_server.sandbox.runtime.launcher import Launcher
from exec_server.sandbox.runtime.messages import BuildRequest, ControlSocket, Status
from exec_server.sandbox.runtime.view import StaleView

NOT_BUILT: Final = "the sandbox could not be built: "

Launched = tuple[int, ControlSocket]  # the pid and the control socket


def launch(launcher: Launcher, namespaces: int, build: BuildRequest) -> Launched:
    """Launch a process and wait until it is confined as requested. Blocking."""
    pid, ours = launcher.launch(namespaces)
    control = ControlSocket(pid, ours)
    try:
        request(control, build, [])
    except BaseException:
        control.close()
        raise
    return pid, control


def request(
    control: socket.socket, message: msgspec.Struct, descriptors: list[int], *, expected: int = 0
) -> tuple[int, ...]:
    """Send a request and wait for its status; returns the `expected` descriptors. Blocking.

    Raises StaleView if the disk has changed since the layout, else InternalError.
    """
    try:
        messages.send(control, message, descriptors)
        status, extra = messages.receive(control, Status)
    except (BrokenPipeError, ConnectionError, messages.Disconnected) as error:
        raise InternalError(f"{NOT_BUILT}{error}") from error
    if status.defect:
        messages.log_defect(status.defect)
    if status.state == "ready" and len(extra) == expected:
        return tuple(extra)
    for descriptor in extra:
        os.close(descriptor)
    if status.state == "ready" and expected:
        raise InternalError(f"{NOT_BUILT}{len(extra)} of {expected} sockets")
    if status.state == "ready":
        return ()
    if status.state == "stale":
        raise StaleView(f"the disk keeps changing: {status.reason}")
    raise InternalError(f"{NOT_BUILT}{status.reason}")
