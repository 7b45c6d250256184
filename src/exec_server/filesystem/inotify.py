"""Inotify: one inotify instance for all watches of a server.

A user has 128 instances by default, and the kernel keeps one watch for each inode of one:
subscriptions share it, and the last removes it. Threads add and remove names under a lock, because
both look up paths. The event loop never takes it: it copies a set before it iterates, and a
subscription only changes to fired. An event from before a name was added may fire it.

Hand-written because watchfiles takes an instance for each watch, and gathers events in a thread of
its own without a bound.
"""

from __future__ import annotations

import asyncio
import errno
import os
import struct
import threading
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final

from exec_server.filesystem import syscalls
from exec_server.host.event_loop import guarded_call

# Watched inodes of the server. The kernel's own limit, for all programs of a user, is between 8,192
# and a million, and a watch costs it about 1 KiB. Above this nothing more is watched.
MAX_SERVER_WATCHES: Final = 16_384
# Listeners add no watch above this number: their trees leave room for fs/watchMissing.
MAX_LISTENED: Final = 8192
# Enough for hundreds of events. Further events stay queued in the kernel; above its limit the
# overflow event fires every subscription, so no change is lost.
READ_BYTES: Final = 16 * 1024
# Subscriptions that one callback fires: each sends a notification.
BURST: Final = 64
# Reports to listeners that one callback makes, about 2 ms: each event goes to all that watch its
# directory, and other connections are served in between.
REPORTS: Final = 512

# How long the end of the server waits for a thread that adds a watch.
_CLOSE_SECONDS: Final = 0.5

IN_MODIFY: Final = 0x2
_IN_ATTRIB: Final = 0x4
IN_MOVED_FROM: Final = 0x40
IN_MOVED_TO: Final = 0x80
IN_CREATE: Final = 0x100
IN_DELETE: Final = 0x200
IN_DELETE_SELF: Final = 0x400
IN_MOVE_SELF: Final = 0x800
_IN_Q_OVERFLOW: Final = 0x4000
IN_IGNORED: Final = 0x8000
_IN_ONLYDIR: Final = 0x1000000
_IN_DONT_FOLLOW: Final = 0x2000000
# A watch is shared, so that each user adds its events to those of the others.
_IN_MASK_ADD: Final = 0x20000000
IN_ISDIR: Final = 0x40000000
_IN_NAMES: Final = _IN_ATTRIB | IN_MOVED_FROM | IN_MOVED_TO | IN_CREATE | IN_DELETE
# IN_ONLYDIR and IN_DONT_FOLLOW: links and files fail.
DIRECTORY_MASK: Final = _IN_NAMES | IN_DELETE_SELF | IN_MOVE_SELF | _IN_ONLYDIR | _IN_DONT_FOLLOW
FILE_MASK: Final = IN_MODIFY | _IN_DONT_FOLLOW
_LISTENER_MASK: Final = _IN_NAMES | IN_MODIFY | IN_DELETE_SELF | IN_MOVE_SELF | _IN_ONLYDIR
_EVENT: Final = struct.Struct("iIII")

# The limit behind the error of a watch that cannot be added.
REASONS: Final = {
    errno.EMFILE: "no inotify instance or descriptor is left: "
    "raise fs.inotify.max_user_instances or the limit of open files",
    errno.ENOSPC: "no inotify watch is left: raise fs.inotify.max_user_watches",
    errno.EDQUOT: f"the server watches at most {MAX_SERVER_WATCHES} files and directories, "
    f"{MAX_LISTENED} of them for fs/watch",
}


# The name of a directory ends with a slash, and that of the root is empty. Those below a directory
# are neighbours in this order, so that the event loop finds them without a look at all others: a
# client that deletes a tree causes an event for each directory of it.
def remove_below(names: list[str], directory: str) -> None:
    """Remove a directory, and those below it, from names in their order."""
    del names[bisect_left(names, directory) : bisect_left(names, _after(directory))]


def _after(directory: str) -> str:
    """The first text in order that is not below a directory."""
    return f"{directory.removesuffix('/')}{chr(ord('/') + 1)}"


class WatchedDirectories:
    """The directories of one watch, by descriptor and in the order of their names.

    Threads add and remove directories, the event loop removes them: each call is short.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # never held during a lookup of a path
        self._names: dict[int, str] = {}  # by watch descriptor
        self._sorted: list[tuple[str, int]] = []

    def __len__(self) -> int:
        return len(self._names)

    def names(self) -> list[str]:
        """All names in order."""
        with self._lock:
            return [name for name, _ in self._sorted]

    def get(self, descriptor: int) -> str | None:
        return self._names.get(descriptor)

    def add(self, descriptor: int, name: str) -> None:
        """Add a directory, or give it another name."""
        with self._lock:
            self._remove(descriptor)
            self._names[descriptor] = name
            insort(self._sorted, (name, descriptor))

    def remove(self, descriptor: int) -> None:
        with self._lock:
            self._remove(descriptor)

    def _remove(self, descriptor: int) -> None:
        name = self._names.pop(descriptor, None)
        if name is not None:
            del self._sorted[bisect_left(self._sorted, (name, descriptor))]

    def remove_below(self, directory: str) -> list[int]:
        """Remove a directory and those below it; returns their descriptors."""
        with self._lock:
            start = bisect_left(self._sorted, (directory,))
            end = bisect_left(self._sorted, (_after(directory),), start)
            below = [descriptor for _, descriptor in self._sorted[start:end]]
            del self._sorted[start:end]
            for descriptor in below:
                del self._names[descriptor]
            return below


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


class DirectoryListener:
    """Gets events of `directories` in the loop; a thread adds one before its events arrive."""

    def __init__(self) -> None:
        self.directories = WatchedDirectories()
        self.is_removed = False  # nothing can be added any more

    def on_event(self, descriptor: int, mask: int, name: bytes) -> None:
        """An event of a directory; without a name it is about the directory itself."""

    def on_overflow(self) -> None:
        """The kernel has dropped events."""


class _Watch:
    """One watch of the kernel."""

    __slots__ = ("by_name", "listeners", "subscriptions")

    def __init__(self) -> None:
        self.listeners: set[DirectoryListener] = set()
        self.subscriptions: set[Subscription] = set()
        self.by_name: defaultdict[bytes, set[Subscription]] = defaultdict(set)


class Inotify:
    """The instance, opened for the first name; `close` releases it."""

    def __init__(self, run_in_thread: Callable[[Callable[[], None]], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._run_in_thread = run_in_thread
        self._lock = threading.Lock()  # for threads; see the theory of operation
        self._fd = -1
        self._is_closed = False
        self._watches: dict[int, _Watch] = {}
        self._reported: set[int] = set()
        self._events: Iterator[tuple[int, int, bytes]] | None = None  # read, and not yet reported

    # In threads.

    def add(self, subscription: Subscription, path: str, mask: int) -> int:
        """Watch a path; returns the watch descriptor. Blocking; raises OSError."""
        with self._lock:
            descriptor = self._add_watch(subscription, path, mask, MAX_SERVER_WATCHES)
            self._watches.setdefault(descriptor, _Watch()).subscriptions.add(subscription)
            subscription.names.setdefault(descriptor, set())
            return descriptor

    def listen(self, listener: DirectoryListener, path: str, name: str) -> int:
        """Report events of a directory as `name`; returns the descriptor. Raises OSError."""
        with self._lock:
            descriptor = self._add_watch(listener, path, _LISTENER_MASK, MAX_LISTENED)
            listener.directories.add(descriptor, name)
            self._watches.setdefault(descriptor, _Watch()).listeners.add(listener)
            return descriptor

    def _add_watch(
        self, user: Subscription | DirectoryListener, path: str, mask: int, limit: int
    ) -> int:
        if user.is_removed or self._is_closed:
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
        if self._fd < 0:
            self._fd = syscalls.inotify_init()
            self._loop.call_soon_threadsafe(self._start_reading)
        if len(self._watches) >= limit:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return syscalls.inotify_add_watch(self._fd, path, mask | _IN_MASK_ADD)

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
                self._release(descriptor, watch)
            subscription.names.clear()

    def ignore(self, listener: DirectoryListener, descriptors: Iterable[int]) -> None:
        """Report no more events of these directories. Blocking."""
        with self._lock:
            for descriptor in descriptors:
                listener.directories.remove(descriptor)
                if (watch := self._watches.get(descriptor)) is not None:
                    watch.listeners.discard(listener)
                    self._release(descriptor, watch)

    def remove_listener(self, listener: DirectoryListener) -> None:
        """Report no more events of any directory. Blocking."""
        with self._lock:
            listener.is_removed = True
        # Also of those that the listener has forgotten, and whose watches it has not left.
        self.ignore(
            listener, [each for each, watch in self._all_watches() if listener in watch.listeners]
        )

    def _release(self, descriptor: int, watch: _Watch) -> None:
        is_needed = watch.subscriptions or watch.listeners
        if not is_needed and self._watches.pop(descriptor, None) is not None:
            syscalls.inotify_rm_watch(self._fd, descriptor)

    def explain(self, error: OSError) -> str | None:
        """The limit behind a failed `add`, once for each limit."""
        with self._lock:
            reason = REASONS.get(error.errno or 0)
            if reason is None or error.errno in self._reported:
                return None
            self._reported.add(error.errno or 0)
            return reason

    # In the event loop.

    def remove_later(self, subscription: Subscription) -> None:
        """Remove a subscription in a thread, also one that a thread is adding to."""
        self._run_in_thread(lambda: self.remove(subscription))

    def remove_listener_later(self, listener: DirectoryListener) -> None:
        """Remove a listener in a thread, also one that a thread is adding to."""
        self._run_in_thread(lambda: self.remove_listener(listener))

    def _start_reading(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._fd, self.read_events)

    def read_events(self) -> None:
        """Read queued events and fire the subscriptions that they are relevant for."""
        if self._events is not None:
            return  # further ones are read after these
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return
        self._dispatch(_events(data))

    def _dispatch(self, events: Iterator[tuple[int, int, bytes]]) -> None:
        """Report some events now, and the rest later."""
        self._events = None
        fired: dict[Subscription, None] = {}
        reports = 0
        for descriptor, mask, name in events:
            reports += self._report(descriptor, mask, name)
            fired.update(dict.fromkeys(self._subscribers(descriptor, mask, name)))
            if mask & IN_IGNORED:
                self._watches.pop(descriptor, None)  # removed by the kernel
            if reports >= REPORTS:
                self._events = events
                self._loop.call_soon(self._dispatch, events)
                break
        self._fire(list(fired))

    def _report(self, descriptor: int, mask: int, name: bytes) -> int:
        listeners: Collection[DirectoryListener] = ()
        if mask & _IN_Q_OVERFLOW:
            listeners = {each for _, watch in self._all_watches() for each in set(watch.listeners)}
            for listener in listeners:
                guarded_call(listener.on_overflow)
        elif (watch := self._watches.get(descriptor)) is not None:
            listeners = list(watch.listeners)
            for listener in listeners:
                guarded_call(listener.on_event, descriptor, mask, name)
        return len(listeners)

    def _subscribers(self, descriptor: int, mask: int, name: bytes) -> list[Subscription]:
        if mask & _IN_Q_OVERFLOW:
            return [each for _, watch in self._all_watches() for each in list(watch.subscriptions)]
        watch = self._watches.get(descriptor)
        if watch is None:
            return []
        if name:
            # A listener has added this event: the file has existed before.
            return [] if mask & IN_MODIFY else list(watch.by_name.get(name, ()))
        # An event without a name is about the watched directory or file itself. Changed attributes
        # of a directory are also reported for its parent, with a name.
        return [] if mask & ~IN_ISDIR == _IN_ATTRIB else list(watch.subscriptions)

    def _all_watches(self) -> list[tuple[int, _Watch]]:
        return list(self._watches.items())

    def _fire(self, subscriptions: list[Subscription]) -> None:
        for subscription in subscriptions[:BURST]:
            guarded_call(subscription.fire)
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
    position = 0
    while position < len(data):
        descriptor, mask, _, length = _EVENT.unpack_from(data, position)
        position += _EVENT.size + length
        yield descriptor, mask, data[position - length : position].rstrip(b"\0")
