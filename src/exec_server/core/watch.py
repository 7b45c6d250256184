"""fs/watchMissing: tell a client once when a path it found missing may have appeared.

Theory of operation. Every directory on the way to a watched path gets an inotify watch, from
`/` down to the last one that exists, together with the names in it that matter: the next
directory on the way, or the first name that is missing. Any event about such a name, or about
a watched directory itself, fires. Watches are set before the names are looked up, from the
top down, so nothing can slip between. Links are refused on the way: a change behind one would
go unseen.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import stat
import struct
from collections.abc import Awaitable, Callable
from typing import Final

from exec_server.core import filecalls
from exec_server.core.system import LIBC
from exec_server.errors import RpcError
from exec_server.protocol.files import WatchMissingParams
from exec_server.protocol.paths import PathUri

# The reference's limit of paths per request; a request with more is answered `false`.
MAX_MISSING: Final = 64
# Paths share most of their directories, so only a hostile request comes near this; it is
# answered `false`. The kernel's own limit is some thousands for all of a user's programs.
MAX_WATCHES: Final = 1024
# Enough for hundreds of events. What does not fit stays queued in the kernel, and beyond its
# limit the overflow event fires the watch, so nothing is lost.
_READ_SIZE: Final = 16 * 1024

_IN_MODIFY: Final = 0x2
_IN_ATTRIB: Final = 0x4
_IN_MOVED_FROM: Final = 0x40
_IN_MOVED_TO: Final = 0x80
_IN_CREATE: Final = 0x100
_IN_DELETE: Final = 0x200
_IN_DELETE_SELF: Final = 0x400
_IN_MOVE_SELF: Final = 0x800
_IN_ONLYDIR: Final = 0x1000000
_IN_DONT_FOLLOW: Final = 0x2000000
_IN_ISDIR: Final = 0x40000000
_IN_NAMES: Final = _IN_ATTRIB | _IN_MOVED_FROM | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE
_DIRECTORY_MASK: Final = _IN_NAMES | _IN_DELETE_SELF | _IN_MOVE_SELF | _IN_ONLYDIR | _IN_DONT_FOLLOW
_EVENT: Final = struct.Struct("iIII")

# File systems that send no events for changes made elsewhere than through this kernel, or
# none at all: watching them would be a promise nobody keeps.
_SILENT_TYPES: Final = frozenset(
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


class _Watcher:
    """An inotify instance being filled; not yet on the loop."""

    def __init__(self) -> None:
        self.fd = filecalls.inotify_init()
        self.names: dict[int, set[bytes]] = {}
        self._by_path: dict[str, int] = {}

    def add_missing(self, path: str) -> bool:
        """Watch for a path that does not exist; False if it does, or cannot be watched."""
        directory = self._descend(path)
        return directory is not None and not _exists(f"{directory[0]}/{directory[1]}")

    def add_present(self, path: str) -> bool:
        """Watch a path that exists and is no link; False if it does not, or cannot be watched."""
        if path == "/":
            return self._watch("/")
        if self._descend(path) is None:
            return False
        mode = os.lstat(path).st_mode
        if stat.S_ISREG(mode):
            # On the file itself: its directory would also tell of writes to all its siblings.
            watch = filecalls.inotify_add_watch(self.fd, path, _IN_MODIFY | _IN_DONT_FOLLOW)
            self.names.setdefault(watch, {b""})
        return not stat.S_ISLNK(mode)

    def _descend(self, path: str) -> tuple[str, str] | None:
        """Watch the directories on the way; the last that exists, and the name wanted in it."""
        directory = ""
        components = path.split("/")[1:]
        for index, name in enumerate(components):
            if not name or not self._watch(directory or "/"):
                return None
            self.names[self._by_path[directory or "/"]].add(os.fsencode(name))
            below = f"{directory}/{name}"
            if index == len(components) - 1 or not _exists(below):
                return directory, name
            directory = below
        return None

    def _watch(self, directory: str) -> bool:
        if directory in self._by_path:
            return True
        if len(self._by_path) >= MAX_WATCHES or _is_silent(directory):
            return False
        # Refuses links and everything else that is no directory.
        watch = filecalls.inotify_add_watch(self.fd, directory, _DIRECTORY_MASK)
        self._by_path[directory] = watch
        self.names.setdefault(watch, set())
        return True


class Armed:
    """Watches that are set and wait to be put on a loop, or closed."""

    def __init__(self, fd: int, names: dict[int, set[bytes]]) -> None:
        self.fd = fd
        self._names = names

    def has_fired(self) -> bool:
        """Take the queued events; whether one of them matters."""
        try:
            events = os.read(self.fd, _READ_SIZE)
        except BlockingIOError:
            return False
        position = 0
        while position < len(events):
            watch, mask, _, length = _EVENT.unpack_from(events, position)
            position += _EVENT.size + length
            name = events[position - length : position].rstrip(b"\0")
            # Without a name the event is about a watched directory or file itself, or says
            # that the queue overflowed; a watched directory's own attributes are reported
            # to its parent as well, with a name.
            if not name and mask & ~_IN_ISDIR != _IN_ATTRIB:
                return True
            if name in self._names.get(watch, ()):
                return True
        return False

    def close(self) -> None:
        os.close(self.fd)


def arm(params: WatchMissingParams) -> Armed | None:
    """Set the watches of a request, None if it cannot be watched; blocks."""
    if not 1 <= len(params.missing) <= MAX_MISSING:
        return None
    try:
        missing = [path.native() for path in params.missing]
        present = _native(params.present)
        watcher = _Watcher()
    except (RpcError, OSError):
        return None
    try:
        watchable = all(watcher.add_missing(path) for path in missing) and (
            present is None or watcher.add_present(present)
        )
    except OSError:
        watchable = False
    if watchable:
        return Armed(watcher.fd, watcher.names)
    os.close(watcher.fd)
    return None


class MissingWatch:
    """The one watch of a connection; all methods belong to the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._last_id = 0
        self._armed: Armed | None = None
        self._is_closed = False

    async def start(
        self,
        params: WatchMissingParams,
        notify: Callable[[int], None],
        run: Callable[[Callable[[], Armed | None]], Awaitable[Armed | None]],
    ) -> bool:
        """Whether the paths are watched now; `run` runs a blocking function in a thread.

        `notify` gets the watch id, at most once.
        """
        if not self.begin(params.watch_id):
            return False
        armed = await run(lambda: arm(params))
        return self.commit(params.watch_id, armed, notify)

    def begin(self, watch_id: int) -> bool:
        """Cancel the watch before this one; False, and nothing done, if the id is not greater."""
        if watch_id <= self._last_id:
            return False
        self._last_id = watch_id
        self._cancel()
        return True

    def commit(self, watch_id: int, armed: Armed | None, notify: Callable[[int], None]) -> bool:
        """Put armed watches on the loop, unless a later request was faster."""
        if armed is None:
            return False
        if self._is_closed or watch_id != self._last_id:
            self._close(armed)
            return False
        self._armed = armed
        # The reader is called soon if an event is queued already.
        self._loop.add_reader(armed.fd, self._on_events, watch_id, notify)
        return True

    def close(self) -> None:
        """Cancel for good."""
        self._is_closed = True
        self._cancel()

    def _on_events(self, watch_id: int, notify: Callable[[int], None]) -> None:
        if self._armed is not None and self._armed.has_fired():
            self._cancel()
            notify(watch_id)

    def _cancel(self) -> None:
        if self._armed is not None:
            self._loop.remove_reader(self._armed.fd)
            self._close(self._armed)
            self._armed = None

    def _close(self, armed: Armed) -> None:
        # Closing an inotify instance waits for the kernel to forget its watches, which takes
        # up to some milliseconds.
        try:
            self._loop.run_in_executor(None, armed.close)
        except RuntimeError:
            armed.close()  # the loop is ending


def _native(path: PathUri | None) -> str | None:
    return None if path is None else path.native()


def _exists(path: str) -> bool:
    """Whether there is something, even a dangling link; raises OSError if that is unknown."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def _is_silent(directory: str) -> bool:
    """Whether the file system of a directory sends no reliable events."""
    # struct statfs begins with the type; its size is 120 bytes at most on Linux.
    buffer = ctypes.create_string_buffer(256)
    if LIBC.statfs(os.fsencode(directory), buffer) != 0:
        return True
    kind: int = ctypes.c_long.from_buffer(buffer).value
    return kind & 0xFFFFFFFF in _SILENT_TYPES
