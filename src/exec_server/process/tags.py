"""Tags: numbers that descendants of a command inherit; orphans and strays are recognised by them.

A tag is the soft and hard RLIMIT_LOCKS, which fork and exec pass on, every user can read, and Linux
has not enforced since 2.4; RLIMIT_RSS where that is limited already, and none where both are. Only
root (CAP_SYS_RESOURCE) can raise a hard limit, so tags decrease. A program can lower its own and
lose its tag, but never gets back the unlimited one of other processes: this is the mark.

Hand-written because no library tags processes; the environment cookie of Jenkins' ProcessTreeKiller
is lost with `env -i`.
"""

from __future__ import annotations

import itertools
import os
import resource
from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import Final, NamedTuple

from exec_server.host import descriptor_limit

# Bits of a tag, from the highest: the server (random), the command. A server has more tags than it
# can start commands in a hundred years.
_SERVER_BITS = 20
_COMMAND_BITS = 42
_RANGE_SIZE = 1 << _COMMAND_BITS
_ALL_TAGS = 1 << (_SERVER_BITS + _COMMAND_BITS)

_RLIMIT_LOCKS = 10  # has no name in the resource module
UNLIMITED: Final = 1 << 64
NO_TAG: Final = -1


# The soft and the hard value of a limit; UNLIMITED if there is none.
Limits = tuple[int, int]


class TagCarrier(NamedTuple):
    """The limit that holds the tags."""

    number: int
    title: bytes  # of its line in /proc/PID/limits


LOCKS: Final = TagCarrier(_RLIMIT_LOCKS, b"Max file locks ")
RSS: Final = TagCarrier(resource.RLIMIT_RSS, b"Max resident set ")


class Plan(NamedTuple):
    """How processes are tagged and marked."""

    carrier: TagCarrier
    tags_below: int  # 0: there is no room for tags
    marks_below: int  # 0: marks do not tell descendants of this server from other processes


def choose_plan(
    hard_limit: Callable[[TagCarrier], int], can_raise: Callable[[TagCarrier], bool]
) -> Plan | None:
    """The best plan for the hard limits of this process; None if both are 0."""
    for carrier in (LOCKS, RSS):
        if hard_limit(carrier) == UNLIMITED:
            return Plan(carrier, _ALL_TAGS, UNLIMITED)
    for carrier in (LOCKS, RSS):
        # In a command of another server, whose other commands may have lower limits.
        if hard_limit(carrier) >= 2 * _RANGE_SIZE:
            return Plan(carrier, min(hard_limit(carrier), _ALL_TAGS), 0)
    for carrier in (LOCKS, RSS):
        if can_raise(carrier):
            return Plan(carrier, _ALL_TAGS, 0)
    for carrier in (LOCKS, RSS):
        if hard_limit(carrier) > 0:
            return Plan(carrier, 0, hard_limit(carrier))
    return None


def _own_hard_limit(carrier: TagCarrier) -> int:
    return _from_kernel(resource.getrlimit(carrier.number))[1]


def _can_raise(carrier: TagCarrier) -> bool:
    soft, hard = resource.getrlimit(carrier.number)
    try:
        resource.setrlimit(carrier.number, (soft, resource.RLIM_INFINITY))
    except (OSError, ValueError):
        return False
    resource.setrlimit(carrier.number, (soft, hard))
    return True


def _random_range(below: int) -> range:
    """A range for a server; never the lowest, which has the limits that people set."""
    number = 1 + int.from_bytes(os.urandom(8), "big") % (below // _RANGE_SIZE - 1)
    return range(number * _RANGE_SIZE, (number + 1) * _RANGE_SIZE)


def _from_kernel(limits: tuple[int, int]) -> Limits:
    soft, hard = (UNLIMITED if value == resource.RLIM_INFINITY else value for value in limits)
    return soft, hard


# Computed at import, so that the watchdog, which is forked afterwards, has the same numbers.
_PLAN: Final = choose_plan(_own_hard_limit, _can_raise)
_HAS_TAGS: Final = _PLAN is not None and _PLAN.tags_below > 0
# All tags of this server.
SERVER_TAGS: Final = _random_range(_PLAN.tags_below if _PLAN and _HAS_TAGS else _ALL_TAGS)
# The tag of the server itself and of its helpers: the highest, so that no command can take it.
SERVER_TAG: Final = SERVER_TAGS[-1]
# Names of helpers, which tell them from commands where there is no room for tags.
_HELPERS: Final = frozenset(
    {b"exec-guardian\n", b"exec-launcher\n", b"exec-worker\n", b"exec-init\n", b"exec-search\n"}
)


# Children inherit the limit of the whole server process: only one start at a time may set it.
_tagging_lock: Final = Lock()
# A start that hangs on a dead disk delays other starts by no more than this.
_TAGGING_SECONDS = 1.0
_unused_tags = itertools.count(SERVER_TAG - 1, -1)
# Tags of helpers that were started after the first command. A helper is started again if it was
# killed; its predecessors but this many have ended.
_helper_tags: Final[deque[int]] = deque(maxlen=64)
_is_server = False  # limits of other processes are left alone


def mark_this_process() -> None:
    """Make this process a server: its later children have tags, and a mark that stays."""
    global _is_server
    _is_server = True
    if _PLAN is not None:
        value = SERVER_TAG if _HAS_TAGS else _PLAN.marks_below - 1
        resource.setrlimit(_PLAN.carrier.number, (value, value))


def tag_this_process() -> None:
    """Give this process SERVER_TAG but no mark: for a helper that outlives the server."""
    if _PLAN is not None and _HAS_TAGS:
        hard = resource.RLIM_INFINITY if _PLAN.marks_below else SERVER_TAG
        resource.setrlimit(_PLAN.carrier.number, (SERVER_TAG, hard))


def allocate() -> int:
    """A new tag, lower than all others."""
    return next(_unused_tags)


class Tagged:
    """Allocates a tag that children of a server inherit if they are started in this context.

    Call `tag_running` for them, because another start may hang and prevent the inheritance.
    """

    def __enter__(self) -> int:
        can_inherit = _is_server and _HAS_TAGS
        self._has_lock = can_inherit and _tagging_lock.acquire(timeout=_TAGGING_SECONDS)
        tag = allocate()
        if self._has_lock and _PLAN is not None:
            try:
                resource.setrlimit(_PLAN.carrier.number, (tag, tag))
                descriptor_limit.lower_for_child()
            except BaseException:
                _tagging_lock.release()
                raise
        elif can_inherit:
            # The start that hangs has its child, and the server needs its descriptors.
            descriptor_limit.restore()
        return tag

    def __exit__(self, *_: object) -> None:
        if self._has_lock:
            descriptor_limit.restore()
            _tagging_lock.release()


class TaggedAsHelper(Tagged):
    """Like `Tagged`, for helpers of the server, which are not commands."""

    def __enter__(self) -> int:
        tag = super().__enter__()
        _helper_tags.append(tag)
        return tag


def forget_helper(tag: int) -> None:
    """A helper has ended, so that its tag leaves room for others."""
    try:
        _helper_tags.remove(tag)
    except ValueError:
        pass


def tag_running(pid: int, tag: int) -> None:
    """Tag a running child for good, and set its descriptor limit; its own children keep theirs."""
    descriptor_limit.limit_child(pid)
    if _PLAN is not None and _HAS_TAGS:
        try:
            resource.prlimit(pid, _PLAN.carrier.number, (tag, tag))
        except (OSError, ValueError):
            pass  # ended, or a program with other rights


def tag_of(pid: int) -> int:
    """The tag of a process: SERVER_TAG for helpers of the server, NO_TAG if it is lost."""
    if not _HAS_TAGS:
        return SERVER_TAG if _name_of(pid) in _HELPERS else NO_TAG
    limits = _limits_of(pid)
    if limits is None:
        return NO_TAG
    soft, hard = limits
    # A soft limit can be changed at will, a hard limit only be lowered.
    tag = soft if soft in SERVER_TAGS else hard
    if tag not in SERVER_TAGS:
        return NO_TAG
    return SERVER_TAG if tag in _helper_tags else tag


def is_of_this_server(pid: int) -> bool:
    """Whether a process has a tag of this server, as one of its two limits."""
    limits = _limits_of(pid) if _HAS_TAGS else None
    return limits is not None and any(limit in SERVER_TAGS for limit in limits)


def is_marked(pid: int) -> bool:
    """Whether a process is a server or descends from one; False where marks do not tell."""
    limits = _limits_of(pid)
    return limits is not None and _PLAN is not None and limits[1] < _PLAN.marks_below


def _limits_of(pid: int) -> Limits | None:
    """The limits of a process that hold its tag; None if it has ended."""
    if _PLAN is None:
        return None
    try:
        return _from_kernel(resource.prlimit(pid, _PLAN.carrier.number))
    except PermissionError:
        return _limits_in_proc(pid, _PLAN.carrier)  # slower, but readable for all users
    except OSError:
        return None


def _limits_in_proc(pid: int, carrier: TagCarrier) -> Limits | None:
    try:
        with open(f"/proc/{pid}/limits", "rb") as file:
            line = next(line for line in file if line.startswith(carrier.title))
    except (OSError, StopIteration):
        return None
    words = line[len(carrier.title) :].split()
    soft, hard = (UNLIMITED if word == b"unlimited" else int(word) for word in words[:2])
    return soft, hard


def _name_of(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read()
    except OSError:
        return b""
