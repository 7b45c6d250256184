"""fs/watchMissing: notify a client once when a missing path may have appeared.

Theory of operation. Every directory on the way to a watched path gets an inotify watch, from
`/` down to the last one that exists, together with the relevant names in it: the next directory
on the way, or the first name that is missing. Any event for such a name, or for a watched
directory itself, triggers the notification. Watches are added before the names are looked up,
from the top down, so no change is missed in between. A path through a link is refused: a change
behind the link would not be reported. All watches of a server share an instance: see `inotify`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import stat
from collections.abc import Awaitable, Callable
from typing import Final

from exec_server.errors import RpcError
from exec_server.filesystem.inotify import DIRECTORY_MASK, FILE_MASK, Inotify, Subscription
from exec_server.host.libc import LIBC
from exec_server.protocol.files import WatchMissingParams
from exec_server.protocol.paths import PathUri

log = logging.getLogger(__name__)

# The reference's limit of paths per request; above it the result is `false`.
MAX_MISSING: Final = 64
# Paths share most of their directories, so only a hostile request comes near this; the result is
# `false` then. The kernel's own limit is a few thousand for all programs of a user.
MAX_WATCHES: Final = 1024
# File systems that report no events, or none for changes made through another kernel: they
# cannot be watched reliably.
_UNRELIABLE_TYPES: Final = frozenset(
    {
        0x9FA0,  # proc
        0x62656572,  # sysfs
        0x1CD1,  # devpts
        0x27E0EB,  # cgroup
        0x63677270,  # cgroup2
        0x6969,  # nfs
        0x517B,  # smb
        0xFE534D42,  # smb2
        0xFF534D42,  # cifs
        0x01021997,  # 9p
        0x65735546,  # fuse
        0x00C36400,  # ceph
        0x5346414F,  # afs
    }
)


class _WatchBuilder:
    """Adds the watches of one request."""

    def __init__(self, inotify: Inotify, subscription: Subscription) -> None:
        self._inotify = inotify
        self._subscription = subscription
        self._by_path: dict[str, int] = {}

    def add_missing(self, path: str) -> bool:
        """Watch a missing path; False if it exists or cannot be watched."""
        directory = self._descend(path)
        return directory is not None and not _exists(f"{directory[0]}/{directory[1]}")

    def add_present(self, path: str) -> bool:
        """Watch an existing path; False if it is missing, a link, or cannot be watched."""
        if path == "/":
            return self._watch("/")
        if self._descend(path) is None:
            return False
        mode = os.lstat(path).st_mode
        if stat.S_ISREG(mode):
            # On the file itself: its directory would also report writes to all its siblings.
            self._inotify.add(self._subscription, path, FILE_MASK)
        return not stat.S_ISLNK(mode)

    def _descend(self, path: str) -> tuple[str, str] | None:
        """Watch the directories of a path; returns the last existing one and the name after it."""
        directory = ""
        components = path.split("/")[1:]
        for index, name in enumerate(components):
            if not name or not self._watch(directory or "/"):
                return None
            watch = self._by_path[directory or "/"]
            self._inotify.add_name(self._subscription, watch, os.fsencode(name))
            below = f"{directory}/{name}"
            if index == len(components) - 1 or not _exists(below):
                return directory, name
            directory = below
        return None

    def _watch(self, directory: str) -> bool:
        if directory in self._by_path:
            return True
        if len(self._by_path) >= MAX_WATCHES or is_unreliable(directory):
            return False
        self._by_path[directory] = self._inotify.add(self._subscription, directory, DIRECTORY_MASK)
        return True


def add_watches(params: WatchMissingParams, inotify: Inotify, subscription: Subscription) -> bool:
    """Add the watches of a request; False if its paths cannot be watched. Blocking.

    The caller removes the subscription.
    """
    if not 1 <= len(params.missing) <= MAX_MISSING:
        return False
    builder = _WatchBuilder(inotify, subscription)
    try:
        missing = [path.native() for path in params.missing]
        present = _native(params.present)
        return all(builder.add_missing(path) for path in missing) and (
            present is None or builder.add_present(present)
        )
    except RpcError:
        return False
    except OSError as error:
        if reason := inotify.explain(error):
            log.warning("fs/watchMissing fails: %s", reason)
        return False


class MissingWatch:
    """The one watch of a connection. Not thread-safe: for the thread of the event loop."""

    def __init__(self, inotify: Inotify) -> None:
        self._inotify = inotify
        self._last_id = 0
        self._subscription: Subscription | None = None
        self._closed = False

    async def start(
        self,
        params: WatchMissingParams,
        notify: Callable[[int], None],
        run: Callable[[Callable[[], bool]], Awaitable[bool]],
    ) -> bool:
        """Watch the paths; False if that is impossible. `run` runs a function in a thread.

        `notify` is called with the watch id, at most once.
        """
        if not self.begin(params.watch_id):
            return False
        subscription = Subscription()
        is_kept = False
        try:
            if await run(lambda: add_watches(params, self._inotify, subscription)):
                is_kept = self.commit(params.watch_id, subscription, notify)
        finally:
            if not is_kept:
                self._inotify.remove_later(subscription)
        return is_kept

    def begin(self, watch_id: int) -> bool:
        """Cancel the previous watch; does nothing and returns False if the id is not greater."""
        if watch_id <= self._last_id:
            return False
        self._last_id = watch_id
        self._cancel()
        return True

    def commit(
        self, watch_id: int, subscription: Subscription, notify: Callable[[int], None]
    ) -> bool:
        """Take over a subscription; False if a later request was faster."""
        if self._closed or watch_id != self._last_id:
            return False
        self._subscription = subscription
        subscription.on_fired(lambda: self._fired(subscription, watch_id, notify))
        return True

    def close(self) -> None:
        """Cancel the watch and refuse further ones."""
        self._closed = True
        self._cancel()

    def _fired(
        self, subscription: Subscription, watch_id: int, notify: Callable[[int], None]
    ) -> None:
        if subscription is self._subscription:
            self._cancel()
            notify(watch_id)

    def _cancel(self) -> None:
        if self._subscription is not None:
            self._inotify.remove_later(self._subscription)
            self._subscription = None


def _native(path: PathUri | None) -> str | None:
    return None if path is None else path.native()


def _exists(path: str) -> bool:
    """Whether an entry exists, even a dangling link; raises OSError if that is unknown."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def is_unreliable(directory: str) -> bool:
    """Whether the file system of a directory reports no reliable events."""
    # struct statfs begins with the type; its size is 120 bytes at most on Linux.
    buffer = ctypes.create_string_buffer(256)
    if LIBC.statfs(os.fsencode(directory), buffer) != 0:
        return True
    kind: int = ctypes.c_long.from_buffer(buffer).value
    return kind & 0xFFFFFFFF in _UNRELIABLE_TYPES
