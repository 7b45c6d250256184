"""Who reads and who waits: whether the one might be waiting for the other.

A task that takes output is a party, and so is everything that it begins from then on: when one of
these waits for an answer, so perhaps does the one that takes the output. Context variables go to
new tasks by themselves, so each context has the chain of parties that it descends from.
"""

from __future__ import annotations

import asyncio
import weakref
from contextvars import ContextVar
from typing import Final

# Parties within parties that are remembered. Deeper ones are rare, and forgetting the outermost
# only means that it may have to be found out by its standing still.
MAX_DEPTH: Final = 16


class Party:
    """A task that takes output, or a thread that does so through tasks that are not its own."""

    __slots__ = ("__weakref__", "_task")

    def __init__(self, task: asyncio.Task[object] | None) -> None:
        self._task = None if task is None else weakref.ref(task)

    def is_current(self) -> bool:
        """Whether the task that runs is its own."""
        return self._task is None or self._task() is asyncio.current_task()


_chain: ContextVar[tuple[Party, ...]] = ContextVar("exec_server_parties", default=())


def reading_party() -> Party:
    """The party that takes output now."""
    chain = _chain.get()
    if not chain or not chain[-1].is_current():
        chain = (*chain[1 - MAX_DEPTH :], Party(asyncio.current_task()))
        _chain.set(chain)
    return chain[-1]


def waiting_parties() -> tuple[Party, ...]:
    """Every party that may be waiting if whoever runs now is."""
    return _chain.get()


def be_one_party() -> None:
    """Make the context of this thread, and all tasks that are begun from it, one party."""
    if not _chain.get():
        _chain.set((Party(None),))
