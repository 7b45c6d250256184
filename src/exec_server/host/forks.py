"""ForkGuard: whether the process is another one than that in which an object was made.

The child of a fork has copies of connections and event loops that its parent goes on using, and no
thread of its parent but the one that forked. Whatever it did with them would reach the server, or
wait for a thread that does not exist.
"""

from __future__ import annotations

import os
from typing import Final

_forks: Final = [0]  # how often the process was forked, counted in the child


def _count() -> None:
    _forks[0] += 1


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_count)


class ForkGuard:
    """Remembers the process in which it was made."""

    def __init__(self) -> None:
        self._forks = _forks[0]

    @property
    def is_forked(self) -> bool:
        """Whether this is the child of a fork since then."""
        return self._forks != _forks[0]

    def check(self) -> None:
        """Raise RuntimeError in the child of a fork."""
        if self.is_forked:
            raise RuntimeError(
                "this connection belongs to the parent of this process: connect again after a fork"
            )
