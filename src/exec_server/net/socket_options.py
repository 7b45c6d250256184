"""Socket options: the user at the other end of a unix socket, and resets."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import Final

from exec_server.errors import ConnectFailed

_CREDENTIALS: Final = struct.Struct("iII")  # struct ucred: pid, uid, gid
_RESET: Final = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)  # struct linger


def reset_on_close(connected: socket.socket) -> None:
    """Let closing reset the connection: the peer sees an error, and unsent bytes are dropped."""
    with contextlib.suppress(OSError):  # it is closed already
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def peer_user(connected: socket.socket) -> int:
    """The uid of the process at the other end: the one that connected, or the one that listens."""
    data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(data)[1]
    return uid


def check_server_user(connected: socket.socket, path: str) -> None:
    """Raise ConnectFailed unless this user or root runs the server: others could collect tokens."""
    # macOS has no SO_PEERCRED; there the owner of the file is its creator, or root's choice.
    has_credentials = hasattr(socket, "SO_PEERCRED")
    uid = peer_user(connected) if has_credentials else os.stat(path).st_uid
    own = os.geteuid()
    if uid not in (own, 0):
        raise ConnectFailed(
            f"the server at the unix socket {path} is run by uid {uid}, which is neither this "
            f"user (uid {own}) nor root; nothing was sent to it, run the client as that user"
        )
