"""Inotify: one inotify instance for all watches of a server.

A user has 128 instances by default, for all programs together, so connections share one. The kernel
keeps one watch for each inode of an instance: subscriptions to the same directory share it, and
the last one that leaves removes it.

Theory of operation. Threads add and remove names, under a lock, because both look up paths. The
event loop reads events and never takes the lock: it copies a set before it iterates, and a
subscription only ever changes from not fired to fired. An event that was queued before a name was
added may fire its subscription; a notification says that a path may have changed, not that it has.
"""

from __future__ import annotations

import asyncio
import errno
import os
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final

from exec_server.filesystem import syscalls

# Watched inodes of the server. The kernel's own limit, for all programs of a user, is between 8,192
# and a million, and a watch costs it about 1 KiB. Above this nothing more is watched.
MAX_SERVER_WATCHES: Final = 16_384
# Enough for hundreds of events. Further events stay queued in the kernel; above its limit the
# overflow event fires every subscription, so no change is lost.
READ_BYTES: Final = 16 * 1024
# Subscriptions that one callback fires: each sends a notification.
BURST: Final = 64

# How long the end of the server waits for a thread that adds a watch.
_CLOSE_SECONDS: Final = 0.5

_IN_MODIFY: Final = 0x2
_IN_ATTRIB: Final = 0x4
_IN_MOVED_FROM: Final = 0x40
_IN_MOVED_TO: Final = 0x80
_IN_CREATE: Final = 0x100
_IN_DELETE: Final = 0x200
_IN_DELETE_SELF: Final = 0x400
_IN_MOVE_SELF: Final = 0x800
_IN_Q_OVERFLOW: Final = 0x4000
_IN_IGNORED: Final = 0x8000
_IN_ONLYDIR: Final = 0x1000000
_IN_DONT_FOLLOW: Final = 0x2000000
_IN_ISDIR: Final = 0x40000000
_IN_NAMES: Final = _IN_ATTRIB | _IN_MOVED_FROM | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE
# IN_ONLYDIR and IN_DONT_FOLLOW: links and files fail.
DIRECTORY_MASK: Final = _IN_NAMES | _IN_DELETE_SELF | _IN_MOVE_SELF | _IN_ONLYDIR | _IN_DONT_FOLLOW
FILE_MASK: Final = _IN_MODIFY | _IN_DONT_FOLLOW
_EVENT: Final = struct.Struct("iIII")

_REASONS: Final = {
    errno.EMFILE: "no inotify instance or descriptor is left: "
    "raise fs.inotify.max_user_instances or the limit of open files",
    errno.ENOSPC: "no inotify watch is left: raise fs.inotify.max_user_watches",
    errno.EDQUOT: f"the server watches at most {MAX_SERVER_WATCHES} files and directories",
}


class Subscription:
    """The watched inodes and names of one request; fires once, in the event loop."""

    __slots__ = ("_on_fired", "has_fired", "is_removed", "names")

    def __init__(self) -> None:
        self.names: dict[int, set[bytes]] = {}  # by watch descriptor
        self.has_fired = False
        self.is_removed = False  # nothing can be added any more
        self._on_fired: Callable[[], None] | None = None

    def on_fired(self, callback: Callable[[], None]) -> None:
        """Call back once it fires; at once if it has."""
        self._on_fired = callback
        if self.has_fired:
            callback()

    def fire(self) -> None:
        if not self.has_fired:
            self.has_fired = True
            if self._on_fired is not None:
                self._on_fired()


class _Watch:
    """One watch of the kernel."""

    __slots__ = ("by_name", "subscriptions")

    def __init__(self) -> None:
        self.subscriptions: set[Subscription] = set()
        self.by_name: defaultdict[bytes, set[Subscription]] = defaultdict(set)


class Inotify:
    """The instance, opened when the first name is watched; `close` releases it.

    `run_in_thread` runs a function in a thread, some time.
    """

    def __init__(self, run_in_thread: Callable[[Callable[[], None]], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._run_in_thread = run_in_thread
        self._lock = threading.Lock()  # for threads; see the theory of operation
        self._fd = -1
        self._is_closed = False
        self._watches: dict[int, _Watch] = {}
        self._reported: set[int] = set()

    # ---- in threads -------------------------------------------------------------------

    def add(self, subscription: Subscription, path: str, mask: int) -> int:
        """Watch a path; returns the watch descriptor. Blocking; raises OSError."""
        with self._lock:
            if subscription.is_removed or self._is_closed:
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
            if self._fd < 0:
                self._fd = syscalls.inotify_init()
                self._loop.call_soon_threadsafe(self._start_reading)
            if len(self._watches) >= MAX_SERVER_WATCHES:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
            descriptor = syscalls.inotify_add_watch(self._fd, path, mask)
            watch = self._watches.setdefault(descriptor, _Watch())
            watch.subscriptions.add(subscription)
            subscription.names.setdefault(descriptor, set())
            return descriptor

    def add_name(self, subscription: Subscription, descriptor: int, name: bytes) -> None:
        """Let events for this name in a watched directory fire the subscription."""
        with self._lock:
            subscription.names[descriptor].add(name)
            # The watch is gone if its directory is: that has fired the subscription already.
            if (watch := self._watches.get(descriptor)) is not None:
                watch.by_name[name].add(subscription)

    def remove(self, subscription: Subscription) -> None:
        """Remove a subscription, and the watches that no other one needs. Blocking."""
        with self._lock:
            subscription.is_removed = True
            for descriptor, names in subscription.names.items():
                watch = self._watches.get(descriptor)
                if watch is None:
                    continue
                watch.subscriptions.discard(subscription)
                for name in names:
                    watch.by_name[name].discard(subscription)
                    if not watch.by_name[name]:
                        del watch.by_name[name]
                if not watch.subscriptions and self._watches.pop(descriptor, None) is not None:
                    syscalls.inotify_rm_watch(self._fd, descriptor)
            subscription.names.clear()

    def explain(self, error: OSError) -> str | None:
        """The limit behind a failed `add`, once for each limit."""
        with self._lock:
            reason = _REASONS.get(error.errno or 0)
            if reason is None or error.errno in self._reported:
                return None
            self._reported.add(error.errno or 0)
            return reason

    # ---- in the event loop ------------------------------------------------------------

    def remove_later(self, subscription: Subscription) -> None:
        """Remove a subscription in a thread, also one that a thread is adding to."""
        self._run_in_thread(lambda: self.remove(subscription))

    def _start_reading(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._fd, self.read_events)

    def read_events(self) -> None:
        """Read queued events and fire the subscriptions that they are relevant for."""
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return
        fired: dict[Subscription, None] = {}
        for descriptor, mask, name in _events(data):
            fired.update(dict.fromkeys(self._subscribers(descriptor, mask, name)))
            if mask & _IN_IGNORED:
                self._watches.pop(descriptor, None)  # removed by the kernel
        self._fire(list(fired))

    def _subscribers(self, descriptor: int, mask: int, name: bytes) -> list[Subscription]:
        if mask & _IN_Q_OVERFLOW:
            return list(chain.from_iterable(list(w.subscriptions) for w in self._all_watches()))
        watch = self._watches.get(descriptor)
        if watch is None:
            return []
        if name:
            return list(watch.by_name.get(name, ()))
        # An event without a name is about the watched directory or file itself. Changed attributes
        # of a directory are also reported for its parent, with a name.
        return [] if mask & ~_IN_ISDIR == _IN_ATTRIB else list(watch.subscriptions)

    def _all_watches(self) -> list[_Watch]:
        return list(self._watches.values())

    def _fire(self, subscriptions: list[Subscription]) -> None:
        for subscription in subscriptions[:BURST]:
            subscription.fire()
        if len(subscriptions) > BURST:
            self._loop.call_soon(self._fire, subscriptions[BURST:])

    def close(self) -> None:
        """Close the instance; no subscription fires any more."""
        self._is_closed = True
        # A thread may hold the lock in a lookup on a dead disk: then the descriptor stays open.
        if self._fd >= 0 and self._lock.acquire(timeout=_CLOSE_SECONDS):
            self._loop.remove_reader(self._fd)
            self._watches.clear()
            os.close(self._fd)
            self._lock.release()


def _events(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Watch descriptor, mask and name of each event."""
    position = 0
    while position < len(data):
        descriptor, mask, _, length = _EVENT.unpack_from(data, position)
        position += _EVENT.size + length
        yield descriptor, mask, data[position - length : position].rstrip(b"\0")
