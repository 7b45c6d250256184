"""The launcher: a small process that forks the confined ones, and the server's end of it.

The server is large and has threads, so it cannot fork safely or quickly. At its start it
runs one more interpreter with a clean environment, which loads what confined processes need
and then only forks. What it forks becomes a child of the server: the kernel is told so, and
the launcher never waits for anybody.

A launch is one small packet: the namespaces wanted, and the descriptor of the socket by which
the new process takes its orders from the server (see `child`). The answer is the pid.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Final, NoReturn

from exec_server.core import system
from exec_server.errors import InternalError, os_error_text

_REQUEST: Final = struct.Struct("<q")  # namespace flags
_ANSWER: Final = struct.Struct("<q")  # the pid, or the negated error number
_NAME: Final = b"exec-launcher"
# The launcher answers within milliseconds; one that does not is broken or starved.
ANSWER_SECONDS: Final = 20.0
# What the confined processes may know of the server's environment.
_VARIABLES: Final = ("PATH", "TMPDIR", "TMP", "TEMP")
_CODE: Final = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from exec_server.sandbox.launcher import serve; serve(int(sys.argv[1]))"
)


class Launcher:
    """The server's end: starts the launcher, and has it fork. Any thread may call `launch`."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._env = {name: variables[name] for name in _VARIABLES if name in variables}
        self._lock = threading.Lock()
        self._is_closed = False
        self._failure: str | None = None
        self._socket = self._start()

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(ANSWER_SECONDS)
        self._failure = None
        # Isolated and without `site`: it gets the module path of this process as it is.
        words = [sys.executable, "-I", "-S", "-c", _CODE, str(theirs.fileno()), *sys.path]
        try:
            with theirs:
                process = subprocess.Popen(
                    words,
                    env=self._env | {"PWD": "/"},
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            process.returncode = 0  # the server reaps all its children itself
        except OSError as error:
            # A server that cannot confine serves all the same; it refuses what it cannot do.
            self._failure = f"{sys.executable} cannot be run again: {os_error_text(error)}"
        return ours

    def launch(self, namespaces: int, control: socket.socket) -> int:
        """Fork a process that serves this socket; returns its pid. Raises OSError. Blocking."""
        with self._lock:
            try:
                pid = self._ask(namespaces, control)
            except (OSError, InternalError):
                # Somebody has killed it, or it hangs: what it might still say is lost with it.
                self._socket.close()
                if self._is_closed:
                    raise InternalError("the server is ending") from None
                self._socket = self._start()
                pid = self._ask(namespaces, control)
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return pid

    def _ask(self, namespaces: int, control: socket.socket) -> int:
        if self._failure is not None:
            raise InternalError(self._failure)
        socket.send_fds(self._socket, [_REQUEST.pack(namespaces)], [control.fileno()])
        answer = self._socket.recv(_ANSWER.size)
        if len(answer) != _ANSWER.size:
            raise InternalError("the sandbox launcher has ended")
        (pid,) = _ANSWER.unpack(answer)
        return int(pid)

    def close(self) -> None:
        """End the launcher; what it forked lives on, or not, with its own socket."""
        self._is_closed = True
        self._socket.close()


def serve(descriptor: int) -> NoReturn:
    """The life of the launcher: fork on request until the server closes its end."""
    # Loaded here, so that the server does not load what only confined processes use.
    from exec_server.sandbox import child, kernel

    system.name_process(_NAME)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    # The parent may have blocked what it reads from a descriptor.
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    link = socket.socket(fileno=descriptor)
    child.rehearse()
    gc.disable()
    gc.collect()
    gc.freeze()  # forked processes then share these pages for as long as they live
    while True:
        request, descriptors, _, _ = socket.recv_fds(link, _REQUEST.size, 1)
        if not request:
            os._exit(0)
        (namespaces,) = _REQUEST.unpack(request)
        (control,) = descriptors
        try:
            pid = kernel.fork_for_parent(namespaces)
        except OSError as error:
            pid = -(error.errno or 1)
        if pid == 0:
            link.close()
            child.live(control, namespaces)
        os.close(control)
        link.send(_ANSWER.pack(pid))
