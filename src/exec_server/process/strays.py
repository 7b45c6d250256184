"""Strays: processes that a dead server has left. The watchdog finds them.

The children of a dead process become children of its nearest living subreaper, or of init. The
watchdog, a child of the server itself, learns from its own new parent which process that is. Among
all processes it finds those with a tag of the server. Those that have lost their tag still have the
mark (see `process.tags`), and they are below the new parent.
"""

from __future__ import annotations

import os
import time
from collections.abc import Container, Iterator

from exec_server.host import libc
from exec_server.process import cgroup, descendants, tags

# The kernel reports the end of the server's pipe shortly before it gives its children away.
_REPARENT_SECONDS = 5.0
_POLL_SECONDS = 0.001
_MAX_PID = 4_194_304  # of all kernels with 64 bits


class Strays:
    """Recognises what a server leaves. Create it in a child of the server, before any other."""

    def __init__(self, server: int) -> None:
        self._server = server
        self._start = descendants.start_of(os.getpid())
        self._cgroups = _cgroups_of(os.getpid())
        # Of one search: whether a marked process was left, and the starts of those that were.
        self._is_left: dict[int, bool] = {}
        self._starts: dict[int, int] = {}

    def kill(self) -> None:
        """Kill all processes that the server has left; call it when the server has ended. Blocking.

        Returns early if one does not die.
        """
        deadline = time.monotonic() + _REPARENT_SECONDS
        while os.getppid() == self._server and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        descendants.kill_all(self._find, self._is_still_stray)

    def _find(self) -> Iterator[tuple[int, int]]:
        self._is_left.clear()
        self._starts.clear()
        for pid in _list_processes() if _shows_all_processes() else _try_all_pids():
            if self._is_stray(pid):
                yield pid, 0

    def _is_stray(self, pid: int) -> bool:
        if pid == os.getpid():
            return False
        if tags.is_of_this_server(pid):
            return True
        if not tags.is_marked(pid) or not self._is_below_root(pid):
            return False
        self._starts[pid] = descendants.start_of(pid)
        return True

    def _is_still_stray(self, pid: int, _: Container[int]) -> bool:
        return tags.is_of_this_server(pid) or self._starts.get(pid) == descendants.start_of(pid)

    def _is_below_root(self, pid: int) -> bool:
        """Whether a marked process is, or is below, a process that a server has left."""
        climbed = []
        while pid not in self._is_left:
            climbed.append(pid)
            parent = descendants.parent_of(pid)
            if tags.is_marked(parent):
                pid = parent
            else:
                self._is_left[pid] = self._is_root(pid)
        self._is_left.update(dict.fromkeys(climbed, self._is_left[pid]))
        return self._is_left[pid]

    def _is_root(self, pid: int) -> bool:
        """Whether a marked process with an unmarked parent was left by a server.

        Another server is marked too, but its watchdog, a child of it, is not. An ordinary user's
        process cannot have such a child.
        """
        return (
            descendants.parent_of(pid) == os.getppid()
            and descendants.start_of(pid) >= self._start
            and all(tags.is_marked(child) for child in descendants.children_of(pid))
            and self._is_in_own_cgroups(pid)
        )

    def _is_in_own_cgroups(self, pid: int) -> bool:
        """Whether a process is in the server's cgroups: each service has cgroups of its own."""
        theirs = _cgroups_of(pid)
        return theirs.keys() == self._cgroups.keys() and all(
            cgroup.is_inside(theirs[number], own) for number, own in self._cgroups.items()
        )


def _list_processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _try_all_pids() -> Iterator[int]:
    """The processes and threads among all numbers; takes two seconds for 4 million numbers.

    The newest number is no bound: a command can fork until the kernel begins at the low ones again,
    and forks that fail afterwards are counted nowhere.
    """
    try:
        with open("/proc/sys/kernel/pid_max", encoding="ascii") as file:
            numbers = range(1, int(file.read()) + 1)
    except OSError:
        numbers = range(1, _MAX_PID + 1)
    # Not os.getpgid: an exception for each unused number would take longer than the call.
    groups = map(libc.LIBC.getpgid, numbers)
    return (pid for pid, group in zip(numbers, groups, strict=True) if group >= 0)


def _shows_all_processes() -> bool:
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            return os.geteuid() == 0 or not hides_processes(file.read())
    except OSError:
        return False  # there is no /proc


def hides_processes(mounts: bytes) -> bool:
    """Whether a mount table has a procfs at /proc with an option that hides processes."""
    lines = (line.partition(b" - proc ") for line in mounts.split(b"\n"))
    return any(b" /proc " in mount and b"hidepid=" in options for mount, _, options in lines)


def _cgroups_of(pid: int) -> dict[str, str]:
    """The path of a process's cgroup in each hierarchy, by the number of the hierarchy."""
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:
        return {}
    return {number: path for number, _, path in (line.split(":", 2) for line in lines)}
