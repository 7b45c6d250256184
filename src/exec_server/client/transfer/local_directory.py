"""The calls on local directories and files that differ between systems: those of this system."""

from __future__ import annotations

import sys

if sys.platform == "win32":
    from exec_server.client.transfer.windows_directory import (
        IS_SYMLINK,
        Directory,
        file_mode,
        link_target,
        pread,
        pwrite,
        set_file_mode,
    )
else:
    from exec_server.client.transfer.posix_directory import (
        IS_SYMLINK,
        Directory,
        file_mode,
        link_target,
        pread,
        pwrite,
        set_file_mode,
    )

__all__ = [
    "IS_SYMLINK",
    "Directory",
    "file_mode",
    "link_target",
    "pread",
    "pwrite",
    "set_file_mode",
]
