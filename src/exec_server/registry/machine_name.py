"""The name of this machine as the id of an environment."""

from __future__ import annotations

import re
import socket
from typing import Final

# Of an environment id, in every registry.
MAX_CHARACTERS: Final = 128
_OTHERS: Final = r"[^A-Za-z0-9._-]+"
_FALLBACK: Final = "machine"


def environment_id(host_name: str | None = None) -> str:
    """The first label of the host name, with other characters than an id may have replaced."""
    name = socket.gethostname() if host_name is None else host_name
    label = name.partition(".")[0]
    return re.sub(_OTHERS, "-", label).strip("-")[:MAX_CHARACTERS] or _FALLBACK
