"""The exec-server command: the guardian first, then everything else in its child."""

from __future__ import annotations

import os
import sys

from exec_server.core import system
from exec_server.guardian import guard


def main() -> None:
    """Entry point of the command; does not return."""
    system.open_missing_standard_descriptors()
    system.close_inherited_descriptors_on_exec()
    code = guard(_serve)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # it is if we were started without one
            stream.flush()
    # Not sys.exit: a thread that hangs on a dead disk must not keep us here.
    os._exit(code)


def _serve() -> int:
    # Imported after the fork, so that the guardian stays as small as it is.
    from exec_server.daemon import serve

    return serve(sys.argv[1:])
