"""Small processes that outlive the server, to kill what the server started.

A server that is killed with SIGKILL cannot clean up. So the command forks before it does
anything else: the child serves, and the parent, the guardian, only waits. The guardian is a
subreaper, so whatever the server leaves behind becomes its child, and it kills all of that
before it ends the way the server ended. If the guardian is killed instead, the kernel sends
the server SIGTERM. For the case that both are killed together, with their process group for
example, there is an undertaker in a session of its own: it learns of the end of both from a
pipe that only they hold, and finds what is left by its tags.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from exec_server.core import descendants, system

_FORWARDED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


def guard(serve: Callable[[], int]) -> int:
    """Run `serve` in a child; returns its exit code here, or ends by the signal it ended by."""
    system.become_subreaper()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored by our starter, it would reap for us
    _start_undertaker()
    watched = _FORWARDED | {signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    parent = os.getpid()
    server = os.fork()
    if server == 0:
        system.die_with_parent(signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
        if os.getppid() != parent:
            os._exit(1)  # the parent was gone before we could ask to be told
        system.become_subreaper()  # not inherited
        return serve()
    _let_go_of_standard_streams()
    system.hide_memory()
    return _watch(server, watched)


def _start_undertaker() -> None:
    """Fork a process that kills what is left when guardian and server are both dead."""
    lifeline, held = os.pipe()
    if os.fork() != 0:
        os.close(lifeline)
        return  # `held` stays open in this process and in the server until they end
    os.close(held)
    os.setsid()
    system.hide_memory()
    _let_go_of_standard_streams()
    os.dup2(0, 2)
    os.read(lifeline, 1)
    descendants.kill_strays()
    os._exit(0)


def _let_go_of_standard_streams() -> None:
    """Leave stdin and stdout to the server alone, so that its end is theirs."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)


def _watch(server: int, watched: set[signal.Signals]) -> int:
    """Forward signals until the server has ended, then kill what it left."""
    status = None
    while status is None:
        information = signal.sigwaitinfo(watched)
        if information.si_signo == signal.SIGCHLD:
            status = _reap(server)
        elif information.si_pid != 0:  # one from the terminal reaches the server by itself
            os.kill(server, information.si_signo)
    for _ in descendants.passes():
        left = descendants.subtree(descendants.children_of(os.getpid()))
        if not left:
            break
        descendants.kill_all(left)
        _reap(server)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        _die_by(-code)
    return code


def _reap(server: int) -> int | None:
    """Reap all that has ended; returns the status of the server if it is among it."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == server:
            found = status


def _die_by(number: int) -> None:
    signal.signal(number, signal.SIG_DFL) if number not in (
        signal.SIGKILL,
        signal.SIGSTOP,
    ) else None
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
