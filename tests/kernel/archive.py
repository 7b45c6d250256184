"""Writes an initial ramfs: a cpio archive in the format `newc`, which the kernel unpacks."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import BinaryIO, Final

_MAGIC: Final = b"070701"
_END: Final = "TRAILER!!!"
_ALIGNMENT: Final = 4


def add_tree(archive: BinaryIO, folder: Path) -> None:
    """Add everything below a folder of the host, owned by root.

    Trees can be added one after the other: the kernel lets later entries replace earlier ones.
    """
    for path in sorted(folder.rglob("*")):
        name, info = path.relative_to(folder).as_posix(), path.lstat()
        if stat.S_ISREG(info.st_mode):
            _add_header(archive, name, info.st_mode, info.st_size)
            with path.open("rb") as file:
                shutil.copyfileobj(file, archive)
            _pad(archive, info.st_size)
        else:
            content = os.fsencode(path.readlink()) if path.is_symlink() else b""
            _add_entry(archive, name, info.st_mode, content)


def add_end(archive: BinaryIO) -> None:
    """Add the entry after the last one."""
    _add_entry(archive, _END, 0, b"")


def _add_entry(archive: BinaryIO, name: str, mode: int, content: bytes) -> None:
    _add_header(archive, name, mode, len(content))
    archive.write(content)
    _pad(archive, len(content))


def _add_header(archive: BinaryIO, name: str, mode: int, size: int) -> None:
    encoded = os.fsencode(name) + b"\0"
    # inode, mode, owner, group, links, time, size, device (2), device node (2), name, checksum;
    # a file with several names is stored several times, with one link each
    fields = (0, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, len(encoded), 0)
    header = _MAGIC + b"".join(b"%08x" % field for field in fields) + encoded
    archive.write(header)
    _pad(archive, len(header))


def _pad(archive: BinaryIO, length: int) -> None:
    archive.write(bytes(-length % _ALIGNMENT))
