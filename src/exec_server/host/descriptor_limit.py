"""The limit of open descriptors of this process, and that of its children.

A server raises its soft limit. Children get the former one, because `select` fails above 1023 and
some programs close every possible descriptor: it is lowered for the moment of each start.
"""

from __future__ import annotations

import fcntl
import os
import resource
from typing import NamedTuple

# The soft limit of a server, unless the hard limit is lower: more than its own limits allow it.
SERVER_DESCRIPTORS = 65_536
# Numbers below the limit of children that must be unused before it is lowered: meanwhile other
# threads open files, and accept connections.
UNUSED_DESCRIPTORS = 64


def raise_descriptor_limit(wanted: int) -> int:
    """Raise the soft limit to `wanted`, or to the hard limit if it is lower; returns the limit.

    Children inherit the raised limit: a server calls `raise_server_limit` instead.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if limit > soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        except (OSError, ValueError):  # macOS: a limit of the kernel below the hard limit
            return soft
    return max(soft, limit)


class _Limits(NamedTuple):
    """The limits of a server that has raised its own."""

    children: int
    server: int
    hard: int


_limits: _Limits | None = None  # None: children have the limit of this process


def raise_server_limit() -> None:
    """Raise the soft limit of this process, and remember the former one for its children."""
    global _limits
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = raise_descriptor_limit(SERVER_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and raised > soft:
        _limits = _Limits(soft, raised, hard)


def lower_for_child() -> None:
    """Lower the soft limit for a child that is about to be started.

    Not if this process uses about as many descriptors as a child may: other threads could open no
    file meanwhile. `limit_child` limits such a child.
    """
    if _limits is not None and _has_unused(_limits.children):
        resource.setrlimit(resource.RLIMIT_NOFILE, (_limits.children, _limits.hard))


def restore() -> None:
    """End what `lower_for_child` has begun: the child exists, or could not be started."""
    if _limits is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_limits.server, _limits.hard))


def limit_child(pid: int) -> None:
    """Lower the soft limit of a running child, if it has inherited that of the server."""
    if _limits is None:
        return
    try:
        if resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] == _limits.server:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (_limits.children, _limits.hard))
    except (OSError, ValueError):
        pass  # ended, or a program with other rights


def _has_unused(limit: int) -> bool:
    """Whether the last numbers below a limit are unused; the kernel takes the lowest ones first."""
    lowest = limit - min(UNUSED_DESCRIPTORS, limit // 4)
    try:
        unused = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, lowest)
    except OSError:
        return False
    os.close(unused)
    return unused == lowest
