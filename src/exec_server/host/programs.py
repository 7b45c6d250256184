"""Programs of the system, which are run without confinement.

A PATH may begin with directories of a project, such as `.venv/bin`, where a confined command may
write. Where a server runs as root such a directory belongs to root as well, so that its owner says
nothing: the names of the directories do.
"""

from __future__ import annotations

import os
from stat import S_ISREG, S_IWGRP, S_IWOTH
from typing import Final

# Where distributions and administrators put programs.
SYSTEM_DIRECTORIES: Final = ("/usr/local/bin", "/usr/bin", "/bin")


def find_system_program(name: str) -> str | None:
    """The path of a program that only root can replace; None if there is none."""
    for directory in SYSTEM_DIRECTORIES:
        path = os.path.realpath(os.path.join(directory, name))
        try:
            is_program = S_ISREG(os.stat(path).st_mode) and os.access(path, os.X_OK)
            if is_program and _belongs_to_root(path):
                return path
        except OSError:
            continue  # it is missing
    return None


def _belongs_to_root(path: str) -> bool:
    """Whether only root can change a file and the directories above it. Raises OSError."""
    while True:
        found = os.stat(path)
        is_shared = found.st_mode & S_IWOTH or (found.st_mode & S_IWGRP and found.st_gid != 0)
        if found.st_uid != 0 or is_shared:
            return False
        if path == "/":
            return True
        path = os.path.dirname(path)
