"""A small process that outlives the server and cleans up after it, even after SIGKILL.

It is forked first, moves the server to a cgroup if it can, and waits for the end of a pipe that
only the server holds. Then it kills the cgroup and strays (see process.strays), and removes
registered directories (see sandbox.runtime.placeholders). Its own session and name keep it from
signals to the server.
"""

from __future__ import annotations

import os
import signal
from threading import Lock

from exec_server.filesystem import placeholder
from exec_server.host import libc
from exec_server.process import tags
from exec_server.process.strays import Cgroup, Strays

_PROCESS_NAME = b"exec-guardian"  # operators know the process by this name
# The server registers and unregisters each path, so there are no more than running commands.
MAX_REGISTERED = 65_536
_READ_BYTES = 65_536


class Watchdog:
    """The server's handle of the watchdog process."""

    def __init__(self, pid: int, pipe: int, ready: int) -> None:
        self.pid = pid
        self._pipe = pipe  # stays open until this process ends
        self._ready: int | None = ready
        self._lock = Lock()

    def wait_until_ready(self) -> None:
        """Wait until the server may start children, which are born in its cgroup, or end."""
        if self._ready is not None:
            os.read(self._ready, 1)
            os.close(self._ready)
            self._ready = None

    def register_cleanup(self, path: str, exists: bool) -> None:
        """Have a placeholder removed if this server is killed; `exists=False` revokes that."""
        message = (b"+" if exists else b"-") + os.fsencode(path) + b"\0"
        with self._lock:
            try:
                os.write(self._pipe, message)
            except OSError:
                pass  # the watchdog was killed, or stopped until the pipe was full


def start_watchdog() -> Watchdog:
    """Fork the watchdog; call this before starting threads."""
    reader, writer = os.pipe()
    ready_reader, ready_writer = os.pipe()
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(writer)
        os.close(ready_reader)
        _run(server, reader, ready_writer)
    os.close(reader)
    os.close(ready_writer)
    os.set_blocking(writer, False)
    tags.mark_this_process()
    return Watchdog(pid, writer, ready_reader)


def _run(server: int, pipe: int, ready: int) -> None:
    tags.tag_this_process()
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    libc.name_process(_PROCESS_NAME)
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)  # readers must see the end of the server's streams
    strays = Strays(server)
    cgroup = _move_to_cgroup(server)
    os.close(ready)
    paths = read_registrations(pipe)
    if cgroup is not None:
        cgroup.kill()
    strays.kill()
    for path in paths:
        _remove_placeholder(path)
    if cgroup is not None:
        cgroup.remove()
    os._exit(0)


def _move_to_cgroup(server: int) -> Cgroup | None:
    """Move the server, the parent of this process, to a cgroup; None if that is not possible.

    A server that is killed at once leaves this process to init or to a subreaper, which must never
    be moved or killed, and soon another process may have the server's number.
    """
    if os.getppid() != server:
        return None
    cgroup = Cgroup.create_for(server)
    if cgroup is not None and os.getppid() != server:
        cgroup.remove()
        return None
    return cgroup


def _remove_placeholder(path: bytes) -> None:
    directory, name = os.path.split(path)
    try:
        descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return  # the next command in this directory removes it
    try:
        placeholder.remove_left_behind(descriptor, name)
    finally:
        os.close(descriptor)


def read_registrations(pipe: int) -> set[bytes]:
    """Read the pipe to its end; returns the paths that are still registered."""
    registered: set[bytes] = set()
    rest = b""
    while data := os.read(pipe, _READ_BYTES):
        *messages, rest = (rest + data).split(b"\0")
        for message in messages:
            if message[:1] == b"-":
                registered.discard(message[1:])
            elif len(registered) < MAX_REGISTERED:
                registered.add(message[1:])
    return registered
