"""Orphans: children of a living server that it has not started, and the commands that own them.

The tag of an orphan tells its command. One that has lost its tag (see `process.tags`) belongs to
all commands that had a living process and had started when it appeared, and is killed with the last
of them. To know these, the server looks at its children whenever a leader or an orphan was reaped:
the children of a process become orphans before the process can be reaped, so a command with neither
leader nor seen orphan owns no later one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection

from exec_server.process import descendants, tags

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_READ_BYTES = 65_536


class Owner:
    """A command that may own orphans, and the session that it belongs to."""

    def __init__(self, session: object) -> None:
        self.session = session
        self.start = int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS_PER_SECOND)
        self.tag = tags.NO_TAG  # set in the thread that starts the command, before the start


class Orphans:
    """The owners of all orphans. Thread-safe; bounded by the commands and processes that live."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starting: set[Owner] = set()
        self._leaders: dict[int, Owner | None] = {}  # by pid; None: it is being killed
        # Possible owners by pid; none: it is being killed. Helpers of the server are skipped.
        self._owners: dict[int, set[Owner]] = {}
        self._helpers: set[int] = set()
        pid = os.getpid()
        # The kernel gives orphans to the main thread. Commands are children of other threads.
        path = f"/proc/{pid}/task/{pid}/children"
        try:
            self._children: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._children = None  # without /proc, orphans live until the server ends

    def close(self) -> None:
        if self._children is not None:
            os.close(self._children)

    def expect(self, owner: Owner) -> None:
        """The command is about to be started."""
        with self._lock:
            self._starting.add(owner)

    def started(self, owner: Owner, pid: int) -> None:
        """The leader of the command runs."""
        with self._lock:
            self._starting.remove(owner)
            self._leaders[pid] = owner
            self._owners.pop(pid, None)
            self._helpers.discard(pid)

    def ended(self, owner: Owner) -> None:
        """The command was not started, or its leader was reaped before `started`."""
        with self._lock:
            self._starting.remove(owner)
            self._look({owner})

    def reap(self) -> list[tuple[int, int]]:
        """Reap the children that have ended; returns their pids and statuses.

        All children of this process have to be reaped here: a child that is reaped while the
        children are listed lets the kernel skip another one.
        """
        with self._lock:
            reaped = _reap()
            owners: set[Owner] = set()
            is_relevant = False
            for pid, _ in reaped:
                if pid in self._leaders:
                    owner = self._leaders.pop(pid)
                    is_relevant = True
                    if owner is not None:
                        owners.add(owner)
                elif pid in self._owners:
                    owners |= self._owners.pop(pid)
                    is_relevant = True
                else:
                    self._helpers.discard(pid)
            if is_relevant:
                self._look(owners)
            return reaped

    def kill(self, has_ended: Callable[[Owner], bool]) -> None:
        """Kill leaders of ended commands, and orphans that no other command may own. Blocking."""
        with self._lock:
            self._look(set())
            for pid, owner in self._leaders.items():
                if owner is not None and has_ended(owner):
                    self._leaders[pid] = None
            for pid, owners in self._owners.items():
                self._owners[pid] = {owner for owner in owners if not has_ended(owner)}
        descendants.kill_children(self._doomed)

    def _doomed(self) -> Collection[int]:
        with self._lock:
            self._look(set())
            leaders = [pid for pid, owner in self._leaders.items() if owner is None]
            return leaders + [pid for pid, owners in self._owners.items() if not owners]

    def _look(self, ended: set[Owner]) -> None:
        """Find the possible owners of new orphans; `ended` were owners until now."""
        living: set[Owner] | None = None
        for pid in self._list_children():
            if pid in self._leaders or pid in self._owners or pid in self._helpers:
                continue
            tag = tags.tag_of(pid)
            if tag == tags.SERVER_TAG:
                self._helpers.add(pid)
                continue
            if living is None:
                living = self._living_owners() | ended
            if tag != tags.NO_TAG:
                self._owners[pid] = {owner for owner in living if owner.tag == tag}
            else:
                start = descendants.start_of(pid)
                self._owners[pid] = {owner for owner in living if owner.start <= start}

    def _living_owners(self) -> set[Owner]:
        leaders = (owner for owner in self._leaders.values() if owner is not None)
        return self._starting.union(leaders, *self._owners.values())

    def _list_children(self) -> list[int]:
        if self._children is None:
            return []
        os.lseek(self._children, 0, os.SEEK_SET)
        pieces = []
        while piece := os.read(self._children, _READ_BYTES):
            pieces.append(piece)
        return [int(word) for word in b"".join(pieces).split()]


def _reap() -> list[tuple[int, int]]:
    reaped: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return reaped
        if pid == 0:
            return reaped
        reaped.append((pid, status))
