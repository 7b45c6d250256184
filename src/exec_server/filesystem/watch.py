"""fs/watchMissing: notify a client once when a missing path may have appeared.

Every existing directory on the way gets an inotify watch for the next name, from the top down and
before the name is looked up, so no change is missed. A path through a link is refused: a change
behind it would not be reported.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import stat
from bisect import insort
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

import msgspec

from exec_server.errors import InvalidRequest, RpcError, lossy, os_error_text
from exec_server.filesystem.inotify import (
    DIRECTORY_MASK,
    FILE_MASK,
    IN_CREATE,
    IN_DELETE,
    IN_DELETE_SELF,
    IN_IGNORED,
    IN_ISDIR,
    IN_MOVE_SELF,
    IN_MOVED_FROM,
    IN_MOVED_TO,
    REASONS,
    DirectoryListener,
    Inotify,
    Subscription,
    remove_below,
)
from exec_server.host.libc import LIBC
from exec_server.protocol.files import Change, WatchEventKind, WatchMissingParams

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

# Changed paths that wait to be sent. Beyond it they are dropped, and the overflow is reported.
MAX_CHANGES: Final = 1024
# Directories of one watch. A larger tree is refused, or ends the watch when it grows.
MAX_DIRECTORIES: Final = 4096

# Those of some paths that a policy allows to read. Blocking.
VisiblePaths = Callable[[Sequence[str]], Sequence[str]]

_OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TOO_MANY: Final = f"the tree has more than {MAX_DIRECTORIES} directories: watch a part of it"


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
    """Watch; False if impossible. Blocking; the caller removes the subscription."""
    if not 1 <= len(params.missing) <= MAX_MISSING:
        return False
    builder = _WatchBuilder(inotify, subscription)
    try:
        missing = [path.native() for path in params.missing]
        present = None if params.present is None else params.present.native()
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
        """Watch the paths; False if impossible. `notify` gets the watch id, at most once."""
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


# fs/watch: the event loop gathers events by path, up to a limit. A thread watches new directories
# and lists their entries, which may be older than the watch. A directory that is moved away is
# forgotten at once: later events would have its old path. The server watches without limits, so
# each path is compared with the policy of the client, and the root must still be the same
# directory.
class GatheredChanges:
    """Changes by path, up to a limit."""

    def __init__(self) -> None:
        self._kinds: dict[str, WatchEventKind] = {}
        self.has_overflowed = False

    def add(self, path: str, kind: WatchEventKind) -> None:
        earlier = self._kinds.pop(path, None)
        if earlier == "created" and kind == "deleted":
            return
        if earlier == "created":
            kind = "created"
        elif earlier == "deleted" and kind == "created":
            kind = "modified"
        self._kinds[path] = kind
        if len(self._kinds) > MAX_CHANGES:
            self.overflow()

    def overflow(self) -> None:
        """Drop all changes, and remember that."""
        self._kinds.clear()
        self.has_overflowed = True

    def take(self) -> tuple[dict[str, WatchEventKind], bool]:
        """The changes since the last time, and whether some are missing."""
        taken = self._kinds, self.has_overflowed
        self._kinds, self.has_overflowed = {}, False
        return taken


class Batch(msgspec.Struct, frozen=True):
    """Changes by path, whether some are missing, and the directories to follow because of them."""

    changes: dict[str, WatchEventKind]
    overflow: bool
    new: tuple[str, ...] = ()  # names of directories to watch
    forgotten: tuple[int, ...] = ()  # watch descriptors to remove

    def on_wire(self) -> list[Change]:
        """The changes for a client, by path; bytes that are not UTF-8 are replaced."""
        return [Change(lossy(path), self.changes[path]) for path in sorted(self.changes)]


class ChangeWatch(DirectoryListener):
    """A watch of one client; `open` and `settle` block, other methods are for the event loop."""

    def __init__(self, inotify: Inotify, *, is_recursive: bool) -> None:
        super().__init__()
        self.wake = asyncio.Event()  # set while there is something to settle or to report
        self.has_ended = False
        self.error: str | None = None
        self._inotify = inotify
        self._is_recursive = is_recursive
        self._visible: VisiblePaths | None = None
        self._root = ""
        self._root_id = (0, 0)
        self._only: bytes | None = None  # the name of a watched file
        self._changes = GatheredChanges()
        self._new: list[str] = []  # names of directories to add, in order
        self._forgotten: list[int] = []  # watch descriptors to remove

    def open(self, path: str, visible: VisiblePaths | None) -> None:
        """Begin to watch; raises OSError or RpcError. None: every path is visible."""
        self._visible = visible
        root = os.path.realpath(path, strict=True)
        if visible is not None and not visible([root]):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if not stat.S_ISDIR(os.stat(root).st_mode):
            root, name = os.path.split(root)
            self._only = os.fsencode(name)
            self._is_recursive = False
        if is_unreliable(root):
            raise InvalidRequest(f"{root}: its file system does not report all changes")
        self._root = root
        info = os.stat(root)
        self._root_id = info.st_dev, info.st_ino
        try:
            self._add_tree("")
        except OSError as error:
            if error.errno in REASONS:
                raise InvalidRequest(REASONS[error.errno]) from None
            raise

    def settle(self, batch: Batch) -> Batch:
        """Follow new and moved directories; returns the changes that may be reported."""
        self._inotify.ignore(self, batch.forgotten)
        changes = dict(batch.changes)
        try:
            for name in batch.new:
                entries = self._add_tree(name)
                if name:  # the root is added again after an overflow, which is reported instead
                    for each in entries:
                        changes.setdefault(each, "created")
        except OSError as error:
            self._fail(REASONS.get(error.errno or 0, os_error_text(error)))
        except RpcError as error:
            self._fail(error.message)
        if self._visible is not None:
            if not self._is_root_in_place():
                self.has_ended = True
                changes.clear()
            visible = self._visible_below(changes)
            changes = {path: changes[path] for path in visible}
        return Batch(changes, batch.overflow)

    def _fail(self, error: str) -> None:
        self.error = error
        self.has_ended = True

    def _is_root_in_place(self) -> bool:
        try:
            info = os.lstat(self._root)
        except OSError:
            return False
        is_same = (info.st_dev, info.st_ino) == self._root_id
        return is_same and os.path.realpath(self._root) == self._root

    def _add_tree(self, relative: str) -> list[str]:
        """Watch a directory and those below it; returns the entries below it."""
        paths: list[str] = []
        pending = [relative]
        while pending:
            directory = pending.pop()
            entries = self._add(directory)
            paths += (f"{directory}{name}" for name, _ in entries)
            if self._is_recursive:
                below = [f"{directory}{name}" for name, is_directory in entries if is_directory]
                pending += (f"{path}/" for path in self._visible_below(below))
        return paths

    def _visible_below(self, paths: Iterable[str]) -> list[str]:
        if self._visible is None:
            return list(paths)
        prefix = f"{self._root.rstrip('/')}/"
        visible = self._visible([f"{prefix}{path}" for path in paths])
        return [path.removeprefix(prefix) for path in visible]

    def _add(self, relative: str) -> list[tuple[str, bool]]:
        """Watch one directory; its entries, none if it has vanished or cannot be read."""
        path = f"{self._root.rstrip('/')}/{relative}"
        try:
            directory = os.open(path, _OPEN_DIRECTORY)
        except OSError:
            if not relative:
                raise
            return []
        try:
            # By its descriptor: the path may lead elsewhere by now.
            descriptor = self._inotify.listen(self, f"/proc/self/fd/{directory}", relative)
            if len(self.directories) > MAX_DIRECTORIES:
                raise InvalidRequest(_TOO_MANY)
            # After it was added: a directory that is moved from here on is forgotten by its event.
            if os.readlink(f"/proc/self/fd/{directory}") != (path.rstrip("/") or "/"):
                self._inotify.ignore(self, [descriptor])
                return []
            with os.scandir(directory) as scan:
                return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in scan]
        finally:
            os.close(directory)

    def on_event(self, descriptor: int, mask: int, name: bytes) -> None:
        relative = self.directories.get(descriptor)
        if relative is None:
            return
        if name:
            if self._only is None or name == self._only:
                self._on_entry(f"{relative}{os.fsdecode(name)}", mask)
            return
        if mask & IN_IGNORED:
            self.directories.remove(descriptor)
        if not relative and mask & (IN_IGNORED | IN_DELETE_SELF | IN_MOVE_SELF):
            self.has_ended = True
            self.wake.set()

    def _on_entry(self, path: str, mask: int) -> None:
        kind: WatchEventKind = "modified"
        if mask & (IN_CREATE | IN_MOVED_TO):
            kind = "created"
        elif mask & (IN_DELETE | IN_MOVED_FROM):
            kind = "deleted"
        if mask & IN_ISDIR and self._is_recursive:
            if kind == "created":
                insort(self._new, f"{path}/")
            elif kind == "deleted":
                self._forgotten += self.directories.remove_below(f"{path}/")
                remove_below(self._new, f"{path}/")
        if len(self._new) + len(self._forgotten) > 2 * MAX_DIRECTORIES:
            self._fail(_TOO_MANY)
        self._changes.add(path, kind)
        self.wake.set()

    def on_overflow(self) -> None:
        self._changes.overflow()
        if self._is_recursive:
            insort(self._new, "")  # directories may have been created meanwhile
        self.wake.set()

    def needs_thread(self, batch: Batch) -> bool:
        """Whether changes have to be settled before they are reported."""
        return bool(self._visible or batch.new or batch.forgotten)

    def take(self) -> Batch:
        """The changes since the last time."""
        self.wake.clear()
        changes, is_incomplete = self._changes.take()
        batch = Batch(changes, is_incomplete, tuple(self._new), tuple(self._forgotten))
        self._new, self._forgotten = [], []
        return batch

    def close(self) -> None:
        """End the watch."""
        self.has_ended = True
        self._inotify.remove_listener_later(self)
