"""A small process that outlives the server, to kill what the server started.

A server that is killed with SIGKILL cannot clean up. So the command forks before it does
anything else. The child, the guardian, waits for the end of a pipe that only the server
holds; when the server has ended, in whatever way, it kills every process that carries one of
the server's tags (see core.descendants), and removes the directories that the server has told
it of by that pipe (see sandbox.placeholders). It has a session of its own, so what is sent to
the server's group or terminal does not reach it, and its own name, so `pkill exec-server` does
not either.
"""

from __future__ import annotations

import os
import signal
import threading

from exec_server.core import descendants, placeholder, system

_NAME = b"exec-guardian"
# Each is told when it is made and when it is gone, so there are no more than commands run.
MAX_REMEMBERED = 65_536
_READ_BYTES = 65_536


class Guardian:
    """The server's end."""

    def __init__(self, pid: int, lifeline: int) -> None:
        self.pid = pid
        self._lifeline = lifeline  # open as long as this process lives
        self._lock = threading.Lock()

    def remember(self, path: str, exists: bool) -> None:
        """Have a placeholder removed should this server be killed, or no longer."""
        message = (b"+" if exists else b"-") + os.fsencode(path) + b"\0"
        with self._lock:
            try:
                os.write(self._lifeline, message)
            except OSError:
                pass  # somebody has killed the guardian, or stopped it for long


def start() -> Guardian:
    """Fork the guardian; to be called before there are other threads."""
    lifeline, held = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(held)
        _guard(lifeline)
    os.close(lifeline)
    os.set_blocking(held, False)
    return Guardian(pid, held)


def _guard(lifeline: int) -> None:
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    system.name_process(_NAME)
    system.hide_memory()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)  # the ends of the server's streams are the server's alone
    left_behind = _listen(lifeline)
    descendants.kill_strays()
    for path in left_behind:
        placeholder.remove_left_behind(path)
    os._exit(0)


def _listen(lifeline: int) -> set[bytes]:
    """Follow the server to its end; returns what it has not removed itself."""
    remembered: set[bytes] = set()
    rest = b""
    while data := os.read(lifeline, _READ_BYTES):
        *messages, rest = (rest + data).split(b"\0")
        for message in messages:
            if message[:1] == b"-":
                remembered.discard(message[1:])
            elif len(remembered) < MAX_REMEMBERED:
                remembered.add(message[1:])
    return remembered
