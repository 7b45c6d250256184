"""The disk of this machine, as the interface of `policy.resolver` defines it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from math import inf
from typing import Final

from exec_server.errors import InternalError, os_error_text
from exec_server.filesystem.placeholder import is_placeholder
from exec_server.sandbox.policy.access import matches_below
from exec_server.sandbox.policy.layout import resolve_globs, resolve_writable
from exec_server.sandbox.policy.model import Glob, Policy
from exec_server.sandbox.policy.resolver import Disk, Kind, PathNode, Unexaminable

_KINDS: Final[dict[int, Kind]] = {
    stat.S_IFDIR: "directory",
    stat.S_IFREG: "file",
    stat.S_IFLNK: "link",
}
# Errors for a link or file that was replaced or removed after its status was read.
_REPLACED: Final = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EINVAL, errno.ELOOP, errno.EISDIR, errno.ENXIO}
)

# Each match becomes a mount of its own. The reference gives up at the same number.
MAX_MATCHES: Final = 8192
# Directory entries examined for one policy. Searching a larger tree takes seconds, which is too
# long for a request; the error asks for a narrower pattern.
MAX_ENTRIES: Final = 2_000_000
# Characters of a path in an error: paths of directories can be longer than those of open(2).
_SHOWN_PATH: Final = 400


class HostDisk:
    """The host's files. A path is missing only if the kernel reports ENOENT or ENOTDIR."""

    def __init__(self, *, sees_placeholders: bool) -> None:
        self.user = os.geteuid()
        self._sees_placeholders = sees_placeholders

    def status(self, path: str) -> PathNode | None:
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
        return PathNode(
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


# The search on the disk for files and directories that match deny globs.
def scan_policy(policy: Policy, disk: Disk) -> list[str]:
    """The files and directories that the globs of a policy deny now, sorted."""
    if not policy.globs:
        return []
    return scan(resolve_globs(policy, disk), resolve_writable(policy, disk))


def scan(globs: Sequence[Glob], writable: Sequence[str] = ()) -> list[str]:
    """The files and directories that match one of the globs, sorted; links are left out.

    A directory that matches is searched only if one of the `writable` paths is below it: all the
    rest of it is denied with it. The roots must be free of links (see `layout.resolve_globs`).
    Raises InternalError for too many matches, and for a directory that cannot be searched but
    that a confined process could open or pass through.
    """
    matches: set[str] = set()
    entries = count(1)
    reopened = {above for path in writable for above in _parents(path)}
    for root in dict.fromkeys(glob.root for glob in globs):
        of_root = [glob for glob in globs if glob.root == root]
        for path in _matches(root, of_root, reopened, entries):
            matches.add(path)
            if len(matches) > MAX_MATCHES:
                raise InternalError(
                    f"unreadable globs match more than {MAX_MATCHES} files; "
                    "deny a directory instead"
                )
    return sorted(matches)


def _parents(path: str) -> Iterator[str]:
    while path != "/":
        path = os.path.dirname(path)
        yield path


def _matches(
    root: str, globs: Sequence[Glob], reopened: set[str], entries: Iterator[int]
) -> Iterator[str]:
    """The paths below a root that match one of its globs; `entries` counts those examined."""
    max_depth = max(inf if glob.max_depth is None else glob.max_depth for glob in globs)
    pending = [("", 1)]
    while pending:
        below, depth = pending.pop()
        for name, is_directory in _entries(f"{root}/{below}"):
            if next(entries) > MAX_ENTRIES:
                raise InternalError(
                    f"unreadable globs would search more than {MAX_ENTRIES} files; "
                    "use a longer directory prefix"
                )
            path = f"{root.rstrip('/')}/{below}{name}"
            is_match = any(matches_below(glob, below + name) for glob in globs)
            if is_match:
                yield path
            if is_directory and depth < max_depth and (not is_match or path in reopened):
                pending.append((f"{below}{name}/", depth + 1))


def _entries(path: str) -> Iterator[tuple[str, bool]]:
    """The entries of a directory but links; none if no confined process can find an entry."""
    try:
        with os.scandir(path) as listing:
            for entry in listing:
                if not entry.is_symlink():
                    yield entry.name, entry.is_dir(follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        if not isinstance(error, PermissionError) or _is_reachable(path):
            raise _unsearchable(path, error) from None


def _unsearchable(path: str, error: OSError) -> InternalError:
    path = path.rstrip("/")
    if len(path) > _SHOWN_PATH:
        path = f"{path[:_SHOWN_PATH]}…"
    return InternalError(
        f"unreadable globs cannot be enforced: {path} cannot be searched: {os_error_text(error)}"
    )


def _is_reachable(path: str) -> bool:
    """Whether a confined process could open files in a closed directory, as owner or by name."""
    directory = path
    while True:
        directory = os.path.dirname(directory)
        try:
            owner = os.lstat(directory).st_uid
        except (FileNotFoundError, NotADirectoryError):
            return False
        except PermissionError:
            continue
        except OSError as error:
            raise _unsearchable(directory, error) from None
        return owner == os.geteuid() or _is_passable(path)


def _is_passable(path: str) -> bool:
    """Whether an entry of a directory, whose path ends with a slash, can be reached by name."""
    try:
        os.stat(f"{path}.")
    except PermissionError:
        return False
    except OSError as error:
        raise _unsearchable(path, error) from None
    return True
