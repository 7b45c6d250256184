"""The limit of open descriptors of this process."""

from __future__ import annotations

import resource


def raise_descriptor_limit(wanted: int) -> int:
    """Raise the soft limit to `wanted`, or to the hard limit if it is lower; returns the limit.

    Children inherit the raised limit, so this is for programs that start none: a command that uses
    `select` fails with descriptors above 1023, which is why the usual soft limit is 1024.
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
