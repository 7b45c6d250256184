"""WatchedDirectories: the directories of one watch, by descriptor and in the order of their names.

The name of a directory ends with a slash, and that of the root is empty. Those below a directory
are neighbours in this order, so that the event loop finds them without a look at all others: a
client that deletes a tree causes an event for each directory of it.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort


def remove_below(names: list[str], directory: str) -> None:
    """Remove a directory, and those below it, from names in their order."""
    del names[bisect_left(names, directory) : bisect_left(names, _after(directory))]


def _after(directory: str) -> str:
    """The first text in order that is not below a directory."""
    return f"{directory.removesuffix('/')}{chr(ord('/') + 1)}"


class WatchedDirectories:
    """Threads add and remove directories, the event loop removes them: each call is short."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # never held during a lookup of a path
        self._names: dict[int, str] = {}  # by watch descriptor
        self._sorted: list[tuple[str, int]] = []

    def __len__(self) -> int:
        return len(self._names)

    def names(self) -> list[str]:
        """All names in order."""
        with self._lock:
            return [name for name, _ in self._sorted]

    def get(self, descriptor: int) -> str | None:
        return self._names.get(descriptor)

    def add(self, descriptor: int, name: str) -> None:
        """Add a directory, or give it another name."""
        with self._lock:
            self._remove(descriptor)
            self._names[descriptor] = name
            insort(self._sorted, (name, descriptor))

    def remove(self, descriptor: int) -> None:
        with self._lock:
            self._remove(descriptor)

    def _remove(self, descriptor: int) -> None:
        name = self._names.pop(descriptor, None)
        if name is not None:
            del self._sorted[bisect_left(self._sorted, (name, descriptor))]

    def remove_below(self, directory: str) -> list[int]:
        """Remove a directory and those below it; returns their descriptors."""
        with self._lock:
            start = bisect_left(self._sorted, (directory,))
            end = bisect_left(self._sorted, (_after(directory),), start)
            below = [descriptor for _, descriptor in self._sorted[start:end]]
            del self._sorted[start:end]
            for descriptor in below:
                del self._names[descriptor]
            return below
