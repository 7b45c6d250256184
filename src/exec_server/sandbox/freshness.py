"""Whether a view that was built earlier is still what its policy means on the disk of now."""

from __future__ import annotations

import os
import select
import stat
import threading
from typing import Final, NamedTuple

from exec_server.core.placeholder import is_placeholder
from exec_server.sandbox.plan import View

_MOUNT_TABLE: Final = "/proc/self/mountinfo"
# Descriptors for all views together. A usual policy needs fewer than ten; a server often has no
# more than 1024 for everything. A view without pins is built anew for each use.
MAX_PINS: Final = 384


class Mounts:
    """Counts the changes of this machine's mount table, as far as this server sees it."""

    def __init__(self) -> None:
        # The kernel tells of changes since the table was opened or last polled.
        self._table = os.open(_MOUNT_TABLE, os.O_RDONLY | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._table, select.POLLPRI)
        self._lock = threading.Lock()
        self._changes = 0

    def changes(self) -> int:
        with self._lock:
            if self._poll.poll(0):
                self._changes += 1
            return self._changes

    def close(self) -> None:
        os.close(self._table)


class _State(NamedTuple):
    """An entry as it was."""

    device: int
    inode: int
    changed_ns: int | None  # of links and pointer files, whose content matters


class Pins:
    """Descriptors that keep inodes in use, so that their numbers are not given to others.

    The mounts of a view do not: whoever removes a directory on the host detaches them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = MAX_PINS

    def take(self, paths: list[str]) -> list[int] | None:
        """A descriptor of each entry; None if there are too many, or one is gone."""
        with self._lock:
            if len(paths) > self._left:
                return None
            self._left -= len(paths)
        descriptors: list[int] = []
        try:
            for path in paths:
                descriptors.append(os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC))
        except OSError:
            self.give_back(descriptors, len(paths))
            return None
        return descriptors

    def give_back(self, descriptors: list[int], count: int) -> None:
        for descriptor in descriptors:
            os.close(descriptor)
        with self._lock:
            self._left += count


class Freshness:
    """What a view was derived from; made before the view is built, checked before each use.

    `sees_placeholders` as for the disk that the view was laid out on.
    """

    def __init__(self, view: View, mounts: Mounts, pins: Pins, *, sees_placeholders: bool) -> None:
        self._mounts = mounts
        self._pins = pins
        self._changes = mounts.changes()
        self._sees_placeholders = sees_placeholders
        self._writable = {step.path for step in view.steps if step.kind == "write"}
        existing = [fact.path for fact in view.facts if fact.device is not None]
        self._pinned = pins.take(existing)
        self._states = {fact.path: self._state(fact.path) for fact in view.facts}
        # What cannot be pinned, or is no longer what the view was laid out for, is good for
        # one use only.
        self._is_checkable = self._pinned is not None and all(
            _identity(self._states[fact.path]) == (fact.device, fact.inode) for fact in view.facts
        )

    def is_current(self) -> bool:
        """Whether nothing that matters has changed. Blocking: it asks the disk."""
        return (
            self._is_checkable
            and self._mounts.changes() == self._changes
            and all(self._state(path) == state for path, state in self._states.items())
        )

    def close(self) -> None:
        """Let go of the entries; from here on the view counts as stale."""
        pinned, self._pinned = self._pinned, None
        self._is_checkable = False
        if pinned is not None:
            self._pins.give_back(pinned, len(pinned))

    def _state(self, path: str) -> _State | None:
        try:
            info = os.lstat(path)
        except OSError:
            return None
        if not self._sees_placeholders and is_placeholder(info):
            return None
        content_matters = not stat.S_ISDIR(info.st_mode) and path not in self._writable
        return _State(info.st_dev, info.st_ino, info.st_ctime_ns if content_matters else None)


def _identity(state: _State | None) -> tuple[int | None, int | None]:
    return (None, None) if state is None else (state.device, state.inode)
