"""The exec-server command: a command for people, or the guardian and then the server."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

# First words that mean a command for people: a client, which starts nothing that needs guarding.
CLIENT_COMMANDS = frozenset({"exec", "cp", "ls", "cat", "rm", "info", "targets", "completion"})


def main() -> None:
    """Entry point of the command; does not return."""
    is_client = bool(sys.argv[1:2]) and sys.argv[1] in CLIENT_COMMANDS
    if is_client and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        # Until a command has something to clean up: Ctrl-C while it is loaded is no traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from exec_server.core import system

    system.open_missing_standard_descriptors()
    if is_client:
        from exec_server.commands.dispatch import run

        system.keep_freed_memory()
        _leave(run(sys.argv[1], sys.argv[2:]))
    _serve()


def _serve() -> NoReturn:
    from exec_server import guardian
    from exec_server.core import descendants, system

    system.close_inherited_descriptors_on_exec()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored by our starter, it would reap for us
    guard = guardian.start()
    # Imported after the fork, so that the guardian stays as small as it is.
    if sys.argv[1:2] == ["sandbox"]:
        from exec_server.sandbox_command import run

        code = run(sys.argv[2:], guard.remember)
    else:
        from exec_server.daemon import serve

        code = serve(sys.argv[1:], guard.remember)
    descendants.kill_below(spared=guard.pid)  # orphans that have got rid of their tag
    _leave(code)


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # it is if we were started without one
            stream.flush()
    # Not sys.exit: a thread that hangs on a dead disk must not keep us here.
    os._exit(code)
