"""Finds and kills every descendant of a process, also those that left its group and session.

Theory of operation. The server is a subreaper: a descendant whose parent ends becomes a
child of the server, never of the machine's init, so everything that a client's command
started is somewhere below the server. What an orphan belonged to cannot be seen from its
parent any more; it can be seen from its timer slack, a per-thread number of nanoseconds
that fork and exec pass on, that no shell resets and that needs no privilege. Each process
gets its own slack, at most twice the usual 50 microseconds.

Killing takes several passes, because what is being killed may fork meanwhile. A pid is
pinned with a pidfd before it is looked at a second time, so that a number that the kernel
has given to a stranger is never signalled.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection

from exec_server.core import system

# Room for the processes of many sessions; the largest slack stays a tenth of a millisecond.
TAGS = 50_000
# A fork bomb can outrun the killer for a while; SIGKILL to whole generations wins in the end.
MAX_PASSES = 200


class TagPool:
    """Hands out timer slacks; one is free again when no descendant carries it."""

    def __init__(self) -> None:
        try:
            self._base = system.timer_slack()
            system.set_timer_slack(self._base)
        except OSError:
            self._base = 0  # a kernel without the call: orphans then live until the server ends
        self._free: list[int] = []
        self._next = 1

    def take(self) -> int | None:
        """A slack that no other process has, or None when there is none left."""
        if not self._base:
            return None
        if self._free:
            return self._free.pop()
        if self._next > TAGS:
            return None
        self._next += 1
        return self._base + self._next - 1

    def give_back(self, tag: int | None) -> None:
        """Allow a tag to be used again."""
        if tag is not None:
            self._free.append(tag)


def children_of(pid: int) -> list[int]:
    """Direct children of a process, those of all its threads."""
    children: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return children
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                children.extend(int(word) for word in file.read().split())
        except OSError:
            continue
    return children


def subtree(roots: Collection[int]) -> list[int]:
    """The given processes and everything below them, parents first."""
    found: dict[int, None] = dict.fromkeys(roots)
    queue = list(roots)
    while queue:
        for child in children_of(queue.pop()):
            if child not in found:
                found[child] = None
                queue.append(child)
    return list(found)


def kill_tree(leader: int) -> None:
    """SIGKILL to a child of ours that is not reaped yet, its group and all below it."""
    kill_all(subtree([leader]))
    try:
        os.killpg(leader, signal.SIGKILL)
    except OSError:
        pass  # nobody left


def carriers(tags: Collection[int], others: Collection[int]) -> list[int]:
    """Living descendants that are orphans with one of the tags, or below such an orphan.

    `others` are children known to belong elsewhere; they are not even looked at.
    """
    roots = [pid for pid in children_of(os.getpid()) if pid not in others and _tag_of(pid) in tags]
    return [pid for pid in subtree(roots) if not _is_zombie(pid)]


def kill_carriers(tags: Collection[int], others: Collection[int]) -> None:
    """Kill all that `carriers` finds, until it finds nothing. Blocking."""
    for _ in range(MAX_PASSES):
        found = carriers(tags, others)
        if not found:
            return
        kill_all(found)


def kill_all(pids: Collection[int]) -> None:
    """SIGKILL to each process that is still a descendant of this one."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            if _is_below(pid, os.getpid()):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        except OSError:
            pass  # ended meanwhile, or a process that gained other rights
        finally:
            os.close(descriptor)


def _is_below(pid: int, ancestor: int) -> bool:
    while pid > 1:
        if pid == ancestor:
            return True
        pid = _parent_of(pid)
    return pid == ancestor


def _stat_fields(pid: int) -> list[bytes]:
    """Fields of /proc/PID/stat after the command name: state, parent, group, session, …"""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2].split()
    except OSError:
        return [b"X", b"0", b"0", b"0"]


def _is_zombie(pid: int) -> bool:
    return _stat_fields(pid)[0] in (b"Z", b"X")


def _parent_of(pid: int) -> int:
    return int(_stat_fields(pid)[1])


def _tag_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/timerslack_ns", "rb") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0
