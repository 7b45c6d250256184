"""Platform: which parts of the program run on this operating system.

Servers need Linux: namespaces, Landlock, signalfd. The client needs Python alone; its commands need
a POSIX system, for terminals and signals.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # not that of typing: the watchdog is to stay small
if TYPE_CHECKING:
    from typing import Final

SERVER_NEEDS_LINUX: Final = (
    "the server needs Linux: run it there, in a container or a virtual machine, "
    "and connect to it from here"
)
COMMANDS_NEED_POSIX: Final = (
    "the commands of exec-server need Linux or macOS: use WSL, "
    "or the library exec_server, which runs on Windows"
)


def has_server() -> bool:
    """Whether a server can run here."""
    return sys.platform == "linux"


def has_commands() -> bool:
    """Whether the client commands can run here."""
    return sys.platform != "win32"
