"""The launcher: a small process that forks the confined ones, and the server's end of it.

The server is large and has threads, so it cannot fork safely or quickly: another interpreter with a
clean environment does. Forked processes become children of the server (CLONE_PARENT). A launch is
one packet with namespaces and a control socket (see `child`); the response is the pid.

A launcher that ends or is stopped is replaced, and the request repeated with a new control socket:
a process forked for the first one reads its end and exits.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, NoReturn

import msgspec

from exec_server.errors import InternalError, os_error_text
from exec_server.host import interpreter, libc
from exec_server.process import tags
from exec_server.sandbox.runtime import messages
from exec_server.sandbox.runtime.messages import BuildRequest, ControlSocket, Status, is_stopped
from exec_server.sandbox.runtime.view import StaleView

log = logging.getLogger(__name__)

_REQUEST: Final = struct.Struct("<q")  # namespace flags
_RESPONSE: Final = struct.Struct("<q")  # the pid, or the negated error number
_NAME: Final = b"exec-launcher"
_ENDED: Final = "the launcher has ended"
# The launcher responds within milliseconds. One that is silent for CHECK_SECONDS is replaced if it
# is stopped; the others may be starved by a busy machine and get RESPONSE_SECONDS.
CHECK_SECONDS: Final = 0.5
RESPONSE_SECONDS: Final = 20.0
# The variables of the server's environment that confined processes get.
_VARIABLES: Final = ("PATH", "TMPDIR", "TMP", "TEMP")
_CODE: Final = (
    "from exec_server.host import libc; libc.hide_memory(); "  # as early as possible
    "from exec_server.sandbox.runtime.launcher import serve; serve(DESCRIPTOR)"
)

NOT_BUILT: Final = "the sandbox could not be built: "

Launched = tuple[int, ControlSocket]  # the pid and the control socket


class _Unresponsive(InternalError):
    """The launcher does not respond, so it has to be replaced."""


class Launcher:
    """The server's end: starts the launcher and requests forks. `launch` is thread-safe."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._env = {name: variables[name] for name in _VARIABLES if name in variables}
        # Held during a request: others wait for the same launcher, or for its replacement.
        self._lock = threading.Lock()
        self._is_closed = False
        self._failure: str | None = None
        self._pidfd: int | None = None
        self._socket = self._start()

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(CHECK_SECONDS)
        self._failure = None
        argv = interpreter.helper_words(_CODE.replace("DESCRIPTOR", str(theirs.fileno())))
        try:
            with theirs, tags.TaggedAsHelper() as tag:
                process = subprocess.Popen(
                    argv,
                    env=self._env | {"PWD": "/"},
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            tags.tag_running(process.pid, tag)
            process.returncode = 0  # the server reaps all its children itself
            self._pidfd = os.pidfd_open(process.pid)
        except OSError as error:
            # The server runs without confinement and refuses requests that need it.
            self._failure = f"{sys.executable} cannot be executed: {os_error_text(error)}"
        return ours

    def launch(self, namespaces: int) -> tuple[int, socket.socket]:
        """Fork a process; returns its pid and its control socket. Raises OSError. Blocking."""
        with self._lock:
            try:
                return self._fork(namespaces)
            except _Unresponsive as failure:
                self._end()
                if self._is_closed:
                    raise InternalError("the server is shutting down") from None
                log.warning("sandbox: %s; a new launcher is started", failure)
            self._socket = self._start()
            try:
                return self._fork(namespaces)
            except _Unresponsive:
                self._end()  # the next request starts another one
                raise

    def _fork(self, namespaces: int) -> tuple[int, socket.socket]:
        if self._failure is not None:
            raise _Unresponsive(self._failure)
        control, theirs = socket.socketpair()
        try:
            with theirs:
                pid = self._request(namespaces, theirs)
            if pid < 0:
                raise OSError(-pid, os.strerror(-pid))
        except BaseException:
            control.close()
            raise
        return pid, control

    def _request(self, namespaces: int, control: socket.socket) -> int:
        try:
            socket.send_fds(self._socket, [_REQUEST.pack(namespaces)], [control.fileno()])
            response = self._receive()
        except OSError as error:
            raise _Unresponsive(f"{_ENDED}: {os_error_text(error)}") from None
        if len(response) != _RESPONSE.size:
            raise _Unresponsive(_ENDED)
        (pid,) = _RESPONSE.unpack(response)
        return int(pid)

    def _receive(self) -> bytes:
        deadline = time.monotonic() + RESPONSE_SECONDS
        while True:
            try:
                return self._socket.recv(_RESPONSE.size)
            except TimeoutError:
                if self._pidfd is not None and is_stopped(self._pidfd):
                    raise _Unresponsive("the launcher is stopped") from None
                if self._is_closed or time.monotonic() > deadline:
                    raise _Unresponsive("the launcher does not respond") from None

    def _end(self) -> None:
        """Kill the launcher: a stopped one would not notice that its socket is closed."""
        self._socket.close()
        if self._pidfd is not None:
            with suppress(OSError):  # it has ended
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
            self._pidfd = None

    def close(self) -> None:
        """End the launcher; forked processes end with their own control sockets."""
        self._is_closed = True
        with self._lock:
            self._end()


def serve(descriptor: int) -> NoReturn:
    """The main loop of the launcher: fork on request until the server closes its end."""
    # Imported here, so that the server does not load modules of confined processes.
    from exec_server.sandbox.runtime import child, kernel

    libc.name_process(_NAME)
    kernel.die_with_parent()  # also while it is stopped
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    libc.ignore_unused()  # also in file workers; commands start with the defaults
    # The parent may have blocked signals that it reads from a descriptor.
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    server = socket.socket(fileno=descriptor)
    child.warm_up()
    gc.disable()
    gc.collect()
    gc.freeze()  # forked processes then share these pages
    while True:
        request, descriptors, _, _ = socket.recv_fds(server, _REQUEST.size, 1)
        if not request:
            os._exit(0)
        (namespaces,) = _REQUEST.unpack(request)
        (control,) = descriptors
        try:
            pid = kernel.fork_as_sibling(namespaces)
        except OSError as error:
            pid = -(error.errno or 1)
        if pid == 0:
            server.close()
            child.main(control, namespaces)
        os.close(control)
        server.send(_RESPONSE.pack(pid))


# The server's end of a confined process: launching it, and requests on its control socket.
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
    messages.close_all(extra)
    if status.state == "ready" and expected:
        raise InternalError(f"{NOT_BUILT}{len(extra)} of {expected} sockets")
    if status.state == "ready":
        return ()
    if status.state == "stale":
        raise StaleView(f"the disk keeps changing: {status.reason}")
    raise InternalError(f"{NOT_BUILT}{status.reason}")
