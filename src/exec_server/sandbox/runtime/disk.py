"""The disk of this machine, as the interface of `policy.resolver` defines it."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import Final

from exec_server.errors import os_error_text
from exec_server.filesystem.placeholder import is_placeholder
from exec_server.sandbox.policy.resolver import Kind, Node, Unexaminable

_KINDS: Final[dict[int, Kind]] = {
    stat.S_IFDIR: "directory",
    stat.S_IFREG: "file",
    stat.S_IFLNK: "link",
}
# Errors for a link or file that was replaced or removed after its status was read.
_REPLACED: Final = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EINVAL, errno.ELOOP, errno.EISDIR, errno.ENXIO}
)


class HostDisk:
    """The host's files. A path is missing only if the kernel reports ENOENT or ENOTDIR."""

    def __init__(self, *, sees_placeholders: bool) -> None:
        self.user = os.geteuid()
        self._sees_placeholders = sees_placeholders

    def status(self, path: str) -> Node | None:
        try:
            info = os.lstat(path)
            if not self._sees_placeholders and is_placeholder(info, path):
                return None
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._unexaminable(path, error) from error
        kind = _KINDS.get(stat.S_IFMT(info.st_mode), "other")
        is_sticky = kind == "directory" and bool(info.st_mode & stat.S_ISVTX)
        return Node(
            kind, info.st_dev, info.st_ino, info.st_uid, is_sticky, changed_ns=info.st_ctime_ns
        )

    def link_target(self, path: str) -> str:
        try:
            return os.readlink(path)
        except OSError as error:
            if error.errno in _REPLACED:
                return ""  # the view will be stale
            raise self._unexaminable(path, error) from error

    def head(self, path: str, limit: int) -> bytes:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                return os.read(descriptor, limit)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno in _REPLACED:
                return b""
            raise self._unexaminable(path, error) from error

    def _unexaminable(self, path: str, error: OSError) -> Unexaminable:
        """The refusal, which names the owner of the path if that is another user."""
        reason = os_error_text(error)
        with suppress(OSError):
            owner = os.lstat(path).st_uid
            if owner != self.user:
                reason = f"{reason}; it belongs to uid {owner}"
        return Unexaminable(path, reason)
