"""A small process that outlives the server, to kill what the server started.

A server that is killed with SIGKILL cannot clean up. So the command forks before it does
anything else. The child, the guardian, waits for the end of a pipe that only the server
holds; when the server has ended, in whatever way, it kills every process that carries one of
the server's tags (see core.descendants). It has a session of its own, so what is sent to the
server's group or terminal does not reach it, and its own name, so `pkill exec-server` does not
either.
"""

from __future__ import annotations

import os
import signal

from exec_server.core import descendants, system

_NAME = b"exec-guardian"


def start() -> int:
    """Fork the guardian and return its pid; to be called before there are other threads."""
    lifeline, held = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(held)
        _guard(lifeline)
    os.close(lifeline)  # `held` stays open as long as this process lives
    return pid


def _guard(lifeline: int) -> None:
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    system.name_process(_NAME)
    system.hide_memory()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)  # the ends of the server's streams are the server's alone
    os.read(lifeline, 1)
    descendants.kill_strays()
    os._exit(0)
