"""The rules of flatness: how a server may differ from itself after the warm-up. Pure."""

from collections import Counter

from soak.footprint import Footprint

# Caches that fill up once more, and fragmentation: memory goes up and down after equal rounds of
# traffic. A leak of 40 KB for each scenario exceeds it in three minutes, a smaller one later.
MEMORY_SHARE = 0.10
MEMORY_BYTES = 32 * 1024 * 1024
# Threads of pools that the warm-up did not need.
MORE_THREADS = 4
# Helpers that a server keeps for the next request, as docs/architecture.md lists them.
MAX_HELPERS = {"exec-guardian": 1, "exec-launcher": 1, "exec-worker": 16, "exec-init": 5}
# Descriptors for these helpers: a socket each, and files that pin the inodes of their views. The
# one inotify instance of a server is opened by its first watch.
POOLED_DESCRIPTORS = {"socket": 32, "file": 400, "inotify": 1}
_MEGABYTE = 1_000_000


def not_flat(warm: Footprint, end: Footprint, *, is_quick: bool) -> list[str]:
    """One line for each way in which the end differs from the moment after the warm-up.

    The warm-up of a quick run fills neither caches nor pools, so memory and threads may grow.
    """
    lines = [] if is_quick else _growth(warm, end)
    lines += [f"process {each.pid} {each.name} is left" for each in end.others]
    for name, count in sorted(end.helpers.items()):
        if count > MAX_HELPERS.get(name, 0):
            lines.append(f"{count} processes {name}, at most {MAX_HELPERS.get(name, 0)}")
    if warm.descriptors is not None and end.descriptors is not None:
        lines += _more_descriptors(warm.descriptors, end.descriptors)
    return lines


def not_drained(fresh: Footprint, drained: Footprint) -> list[str]:
    """One line for each thing that a server has not released after it was idle for long."""
    lines = [f"process {each.pid} {each.name} is left" for each in drained.others]
    if drained.helpers - fresh.helpers:
        lines.append(f"helpers are left: {dict(drained.helpers - fresh.helpers)}")
    if fresh.descriptors is not None and drained.descriptors is not None:
        more = drained.descriptors - fresh.descriptors
        lines += [f"{count} more descriptors of kind {kind}" for kind, count in more.items()]
    return lines


def _growth(warm: Footprint, end: Footprint) -> list[str]:
    lines = []
    allowed = warm.resident * (1 + MEMORY_SHARE) + MEMORY_BYTES
    if end.resident > allowed:
        lines.append(
            f"memory grew from {warm.resident / _MEGABYTE:.1f} to "
            f"{end.resident / _MEGABYTE:.1f} MB, allowed are {allowed / _MEGABYTE:.1f} MB"
        )
    if end.threads > warm.threads + MORE_THREADS:
        lines.append(f"threads grew from {warm.threads} to {end.threads}")
    return lines


def _more_descriptors(warm: Counter[str], end: Counter[str]) -> list[str]:
    lines = []
    for kind, count in sorted(end.items()):
        if count > max(warm[kind], POOLED_DESCRIPTORS.get(kind, 0)):
            lines.append(f"descriptors of kind {kind} grew from {warm[kind]} to {count}")
    return lines
