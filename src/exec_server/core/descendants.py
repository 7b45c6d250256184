"""Finds and kills every descendant of a process, also those that left its group and session.

Theory of operation. The server is a subreaper: a descendant whose parent ends becomes a
child of the server, never of the machine's init, so everything that a client's command
started is somewhere below the server. What an orphan belonged to cannot be seen from its
parent any more; it can be seen from a tag, a number that fork and exec pass on. The tag is
the soft limit of RLIMIT_LOCKS: Linux keeps and inherits that limit but has not enforced it
since 2.4, and anybody may read it in /proc/PID/limits, whereas timer slack, which is as
harmless, is shown to the privileged only. Only a program that sets this very limit loses
its tag; as an orphan it then lives until the server ends.

Killing takes several passes, because what is being killed may fork meanwhile. A pid is
pinned with a pidfd before it is looked at a second time, so that a number that the kernel
has given to a stranger is never signalled.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

# Bits of a tag, from the highest: the server, chosen by chance; the session; the process.
# Numbers start again at 0 when they are used up: by then their first carriers are long gone.
_SERVER_BITS = 20
_SESSION_BITS = 22
_PROCESS_BITS = 20
# A fork bomb can outrun the killer for a while; SIGKILL to whole generations wins in the end.
MAX_PASSES = 200
# What was killed is seen in /proc until it has ended: later passes give it time for that.
_PATIENT_AFTER = 10
_PASS_SECONDS = 0.01
# Of a larger family the event loop kills only the first of them itself: see `kill_tree`.
INLINE_FAMILY = 100

_RLIMIT_LOCKS = 10  # has no name in the resource module
_TAG_LINE = re.compile(rb"Max file locks +(\d+) ")

# Chosen when the module is loaded, so before the guardian forks: it and the server agree.
_SERVER = int.from_bytes(os.urandom(4), "big") % (1 << _SERVER_BITS)
# All tags that this server gives.
SERVER_TAGS = range(
    _SERVER << (_SESSION_BITS + _PROCESS_BITS), (_SERVER + 1) << (_SESSION_BITS + _PROCESS_BITS)
)

# The limit that children inherit belongs to our whole process: one start at a time sets it.
_tagging = threading.Lock()
# A start that hangs on a dead disk keeps the others waiting no longer than this.
_TAGGING_SECONDS = 1.0


class SessionTags:
    """The tags of one session: `all` of them as a range, and the next one by `take`."""

    def __init__(self, first: int) -> None:
        self.all = range(first, first + (1 << _PROCESS_BITS))
        self._taken = 0

    def take(self) -> int:
        tag = self.all[self._taken % len(self.all)]
        self._taken += 1
        return tag


class TagPool:
    """Gives each session tags of its own."""

    def __init__(self) -> None:
        self._sessions = 0

    def for_session(self) -> SessionTags:
        number = self._sessions % (1 << _SESSION_BITS)
        self._sessions += 1
        return SessionTags(SERVER_TAGS.start + (number << _PROCESS_BITS))


@contextmanager
def tagged(tag: int) -> Iterator[bool]:
    """What is started in this context carries the tag, unless False comes out: see `tag_late`."""
    if not _tagging.acquire(timeout=_TAGGING_SECONDS):
        yield False
        return
    try:
        soft, hard = resource.getrlimit(_RLIMIT_LOCKS)
        if hard != resource.RLIM_INFINITY and hard < tag:
            yield False
            return
        resource.setrlimit(_RLIMIT_LOCKS, (tag, hard))
        try:
            yield True
        finally:
            resource.setrlimit(_RLIMIT_LOCKS, (soft, hard))
    finally:
        _tagging.release()


def tag_late(pid: int, tag: int) -> None:
    """Tag a child that runs already; what it has started before may not carry the tag.

    Not possible where our own hard limit is lower: orphans then live until the server ends.
    """
    try:
        resource.prlimit(pid, _RLIMIT_LOCKS, (tag, resource.getrlimit(_RLIMIT_LOCKS)[1]))
    except (OSError, ValueError):
        pass


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


def subtree(roots: Collection[int], limit: int | None = None) -> dict[int, int]:
    """Children of ours and everything below them, parents first: pid and parent of each."""
    found = dict.fromkeys(roots, os.getpid())
    queue = list(roots)
    while queue and (limit is None or len(found) < limit):
        parent = queue.pop()
        for child in children_of(parent):
            if child not in found:
                found[child] = parent
                queue.append(child)
    return found


def kill_tree(leader: int) -> None:
    """SIGKILL to a child of ours that is not reaped yet, its group and what is below it.

    Never takes long: what is beyond INLINE_FAMILY, or is forked meanwhile, is an orphan
    afterwards and left to `kill_carriers`.
    """
    kill_all(subtree([leader], INLINE_FAMILY))
    try:
        os.killpg(leader, signal.SIGKILL)
    except OSError:
        pass  # nobody left


def carriers(tags: range, others: Collection[int]) -> dict[int, int]:
    """Living descendants that are orphans with one of the tags, or below such an orphan.

    `others` are children known to belong elsewhere; they are not even looked at.
    """
    mine = children_of(os.getpid())
    roots = [pid for pid in mine if pid not in others and _tag_of(pid) in tags]
    return {pid: parent for pid, parent in subtree(roots).items() if not _is_zombie(pid)}


def kill_carriers(tags: range, others: Collection[int]) -> None:
    """Kill all that `carriers` finds, until it finds nothing. Blocking."""
    for _ in passes():
        found = carriers(tags, others)
        if not found:
            return
        kill_all(found)


def passes() -> Iterator[int]:
    """Count the attempts to kill a family, and wait a little before the later ones."""
    for number in range(MAX_PASSES):
        if number >= _PATIENT_AFTER:
            time.sleep(_PASS_SECONDS)
        yield number


def kill_all(found: Mapping[int, int]) -> None:
    """SIGKILL to each process whose parent still is of the family, or is us.

    An orphan in a sandbox becomes a child of its init. Were it spared for that, it could go on
    when its own child is killed, before init's end reaches it.
    """
    family = {os.getpid(), *found, *found.values()}
    for pid in found:
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            if _parent_of(pid) in family:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        except OSError:
            pass  # ended meanwhile, or a process that gained other rights
        finally:
            os.close(descriptor)


def kill_below(spared: int) -> None:
    """Kill all that is below this process, tagged or not, except one child. Blocking."""
    for _ in passes():
        roots = [pid for pid in children_of(os.getpid()) if pid != spared and not _is_zombie(pid)]
        if not roots:
            return
        kill_all(subtree(roots))


def kill_strays() -> None:
    """Kill everything on this machine that carries a tag of this server, whose child it may be.

    For the guardian, when the server is dead and nothing is below it any more. Blocking.
    """
    for _ in passes():
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        strays = [pid for pid in pids if _tag_of(pid) in SERVER_TAGS and not _is_zombie(pid)]
        if not strays:
            return
        for pid in strays:
            _kill_carrier(pid)


def _kill_carrier(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if _tag_of(pid) in SERVER_TAGS:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError:
        pass  # ended meanwhile, or a process that gained other rights
    finally:
        os.close(descriptor)


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
        with open(f"/proc/{pid}/limits", "rb") as file:
            match = _TAG_LINE.search(file.read())
    except OSError:
        return -1
    return int(match[1]) if match is not None else -1
