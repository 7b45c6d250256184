"""The disk of this machine, as `layout` asks for it."""

from __future__ import annotations

import os
import stat
from typing import Final

from exec_server.core.placeholder import is_placeholder
from exec_server.sandbox.layout import Kind, Node

_KINDS: Final[dict[int, Kind]] = {
    stat.S_IFDIR: "directory",
    stat.S_IFREG: "file",
    stat.S_IFLNK: "link",
}


class HostDisk:
    """The host's files. What cannot be looked at is as good as missing: nobody inside can."""

    def __init__(self, *, sees_placeholders: bool) -> None:
        self._sees_placeholders = sees_placeholders

    def status(self, path: str) -> Node | None:
        try:
            info = os.lstat(path)
        except OSError:
            return None
        if not self._sees_placeholders and is_placeholder(info):
            return None
        kind = _KINDS.get(stat.S_IFMT(info.st_mode), "other")
        return Node(kind, info.st_dev, info.st_ino)

    def link_target(self, path: str) -> str:
        try:
            return os.readlink(path)
        except OSError:
            return ""  # replaced meanwhile; the view will not be current

    def head(self, path: str, limit: int) -> bytes:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return b""
        try:
            return os.read(descriptor, limit)
        except OSError:
            return b""
        finally:
            os.close(descriptor)
