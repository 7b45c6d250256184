"""Finds the descendants of a process and kills all of them, also those that left its session.

The server is a subreaper (prctl), so all descendants of a command stay below it. A process may fork
before it is killed, so large families and survivors are stopped first: a stopped process cannot
fork and keeps its place below the process limit. A pid is pinned with a pidfd and checked again
before it is signalled, because pids are reused.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from itertools import islice

# Attempts to kill a family. Beyond this, a process does not die: it waits for a dead disk.
MAX_ATTEMPTS = 200
# A killed process stays in /proc until it has ended: later attempts leave time for that.
_UNDELAYED_ATTEMPTS = 10
_ATTEMPT_SECONDS = 0.01
# Families of up to this many processes are killed without stopping them, at first.
SMALL_FAMILY = 16
PLAIN_ATTEMPTS = 2
# Searches for further processes to stop, until one finds none.
MAX_SEARCHES = 100

# Finds pids with the pids of their parents, parents first.
Search = Callable[[], Iterable[tuple[int, int]]]
# Whether a pid, now pinned, still belongs to a family of pids.
Check = Callable[[int, Container[int]], bool]


def children_of(pid: int) -> list[int]:
    """Direct children of a process, started by any of its threads."""
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


def walk(roots: Collection[int]) -> Iterator[tuple[int, int]]:
    """Children of this process with all their descendants, parents first: pid and parent pid."""
    seen = set(roots)
    queue = list(roots)
    for pid in roots:
        yield pid, os.getpid()
    while queue:
        parent = queue.pop()
        for child in children_of(parent):
            if child not in seen:
                seen.add(child)
                yield child, parent
                queue.append(child)


def kill_tree(leader: int) -> None:
    """Send SIGKILL to an unreaped child of this process, its group and its descendants.

    Bounded, for the event loop: of a family that is not small only the group is killed, and the
    rest become orphans, like those forked meanwhile.
    """
    family = dict(islice(walk([leader]), SMALL_FAMILY + 1))
    if len(family) <= SMALL_FAMILY:
        kill_family(family)
    try:
        os.killpg(leader, signal.SIGKILL)
    except OSError:
        pass  # the group is empty


def kill_family(family: Mapping[int, int]) -> None:
    """Send SIGKILL to processes of a `walk` whose parent is still in it or this process.

    In a sandbox, a process whose parent was killed becomes a child of the sandbox's init, which is
    in the family. If it were skipped, it would run on without its killed children until the end
    of init kills it.
    """
    _kill(family, _has_parent_in)


def kill_children(find_children: Callable[[], Collection[int]]) -> bool:
    """Kill the children of this process that a search finds, with all their descendants.

    Searches again until nothing of them is left; False if something does not die. Blocking.
    """
    return kill_all(lambda: walk(find_children()), _has_parent_in)


def kill_all_descendants(spared: int) -> None:
    """Kill all descendants of this process, tagged or not, except one child. Blocking."""
    kill_children(lambda: [pid for pid in children_of(os.getpid()) if pid != spared])


def kill_all(search: Search, is_member: Check) -> bool:
    """Kill the processes that a search finds, until it finds none; False if some do not die.

    Blocking.
    """
    was_empty = False
    for number in attempts():
        living = ((pid, parent) for pid, parent in search() if not is_zombie(pid))
        family = dict(islice(living, SMALL_FAMILY + 1))
        if not family:
            # A search can miss a process that is given another parent, or a pid, meanwhile.
            if was_empty:
                return True
            was_empty = True
            continue
        was_empty = False
        if number >= PLAIN_ATTEMPTS or len(family) > SMALL_FAMILY:
            family = _stop(search, is_member)
        _kill(family, is_member)
    return False


def attempts() -> Iterator[int]:
    """Number the attempts to kill, with a pause before the later ones."""
    for number in range(MAX_ATTEMPTS):
        if number >= _UNDELAYED_ATTEMPTS:
            time.sleep(_ATTEMPT_SECONDS)
        yield number


def _stop(search: Search, is_member: Check) -> dict[int, int]:
    """Stop processes as soon as they are found, until a search finds no other ones."""
    stopped: dict[int, int] = {}
    family = {os.getpid()}
    for _ in range(MAX_SEARCHES):
        before = len(stopped)
        for pid, parent in search():
            if pid not in stopped:
                stopped[pid] = parent
                family |= {pid, parent}
                _signal_member(pid, signal.SIGSTOP, is_member, family)
        if len(stopped) == before:
            break
    return stopped


def _kill(parents: Mapping[int, int], is_member: Check) -> None:
    family = {os.getpid(), *parents, *parents.values()}
    for pid in parents:
        _signal_member(pid, signal.SIGKILL, is_member, family)


def _signal_member(
    pid: int, number: signal.Signals, is_member: Check, family: Container[int]
) -> None:
    """Send a signal to the process that has this pid now, if it is a member of the family."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if is_member(pid, family):
            signal.pidfd_send_signal(descriptor, number)
    except OSError:
        pass  # ended meanwhile, or a process that gained other rights
    finally:
        os.close(descriptor)


def _has_parent_in(pid: int, family: Container[int]) -> bool:
    return parent_of(pid) in family


def _stat_fields(pid: int) -> list[bytes] | None:
    """Fields of /proc/PID/stat after the command name: state, parent, group, session, …

    None for a process that has ended or that /proc does not show. With its option hidepid, /proc
    does not show an ordinary user the own processes that are not dumpable, like ssh-agent.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2].split()
    except OSError:
        return None


def is_zombie(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    fields = _stat_fields(pid)
    if fields is not None:
        return fields[0] in (b"Z", b"X")
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # no descriptor is left
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(descriptor)


def parent_of(pid: int) -> int:
    """The parent of a process; 0 if that is not known."""
    fields = _stat_fields(pid)
    if fields is not None:
        return int(fields[1])
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:
        return 0
    return os.getpid()


def start_of(pid: int) -> int:
    """When a process was started, in clock ticks since the boot.

    0 if it has ended; for a living process that /proc does not show, later than all others.
    """
    fields = _stat_fields(pid)
    if fields is not None:
        return int(fields[19])
    return 0 if is_zombie(pid) else sys.maxsize
