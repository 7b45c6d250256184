"""The directory of Codex, and the name of the host."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping
from functools import cache
from typing import Final

from exec_server.errors import InternalError
from exec_server.host.environment import user_home

# A client waits 10 s for the answer that has the name; a resolver without a server may take longer.
# Beyond this time the name of the kernel is used.
LOOKUP_SECONDS: Final = 2.0


def codex_home(variables: Mapping[str, str]) -> str:
    """CODEX_HOME without links, or `.codex` of the user. Blocking; raises InternalError."""
    named = variables.get("CODEX_HOME")
    if not named:
        home = user_home(variables)
        if home is None:
            raise InternalError("Could not find home directory")
        return os.path.join(home, ".codex")
    try:
        path = os.path.realpath(named, strict=True)
    except OSError:
        raise InternalError(_points_to(named, "does not exist")) from None
    if not os.path.isdir(path):
        raise InternalError(_points_to(named, "is not a directory"))
    return path


def _points_to(named: str, fault: str) -> str:
    return f'CODEX_HOME points to "{named}", but that path {fault}'


@cache
def hostname() -> str | None:
    """The canonical name of the host, or that of the kernel; None without any. Blocking."""
    own = socket.gethostname()
    found: list[str] = []

    def look_up() -> None:
        try:
            for *_, canonical, _ in socket.getaddrinfo(own, None, flags=socket.AI_CANONNAME):
                found.append(canonical)
        except (OSError, UnicodeError):
            return  # the host has no canonical name

    thread = threading.Thread(target=look_up, name="host name", daemon=True)
    thread.start()
    thread.join(LOOKUP_SECONDS)
    name = next((each for each in list(found) if "." in each.strip(".")), own)
    return name.rstrip(".").lower() or None
