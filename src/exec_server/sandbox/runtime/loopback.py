"""The loopback interface of a network namespace, and ports on it that the server listens on.

A socket belongs to the namespace in which it was created. So the init of a command binds the
ports, and the server accepts from them: no process has to carry bytes between the two.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Sequence
from typing import Final

# The ioctl that sets the flags of an interface, and struct ifreq for it.
_SET_FLAGS: Final = 0x8914
_REQUEST: Final = struct.Struct("16sH22x")
_UP_AND_RUNNING: Final = 0x41
_ADDRESS: Final = "127.0.0.1"
# Connections that the server has not accepted yet; the kernel makes others wait.
_BACKLOG: Final = 128


def bring_up() -> None:
    """Make the loopback interface of this namespace work; raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SET_FLAGS, _REQUEST.pack(b"lo", _UP_AND_RUNNING))


def listen(ports: Sequence[int]) -> list[socket.socket]:
    """Listening sockets on ports of this namespace, which the caller closes; raises OSError."""
    listeners: list[socket.socket] = []
    try:
        for port in ports:
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            listeners.append(listener)
            listener.bind((_ADDRESS, port))
            listener.listen(_BACKLOG)
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners
