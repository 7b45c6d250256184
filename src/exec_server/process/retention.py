"""RetentionBudget: how much memory all sessions of a server keep for clients that may come back.

An account belongs to one session. The budget takes from the account with most, so what one session
keeps is never lost for one that keeps more than twice as much. Accounts of about one size give way
in the order in which they reached it: a client that was cut off just now is more likely to come
back than one that left a minute ago.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

# Finished processes of all sessions, and output of running ones whose client is away. All that
# eight sessions may keep, or the output of 450 commands that print a megabyte within the retention;
# the 8,000 small commands that a client starts meanwhile at 100 a second take 20 MiB. Above this
# the session that keeps most loses its finished processes, the one that closed first before others,
# and then the oldest output of its running ones.
SERVER_RETAINED_BYTES = 512 * 1_048_576
# Entries of a heap that are out of date, beyond as many as are valid, before they are dropped.
STALE_ENTRIES = 64


class LargestFirst(Generic[T]):
    """Items by size, in O(log n).

    An item that shrinks keeps its entry, which is corrected when it comes first; one that grows
    gets another. An entry that is not valid any more holds no item, which may have megabytes.
    """

    __slots__ = ("_entries", "_heap", "_serials", "_size_of")

    def __init__(self, size_of: Callable[[T], int]) -> None:
        self._size_of = size_of
        self._entries: dict[T, _Entry[T]] = {}  # the valid ones, never smaller than their items
        self._heap: list[_Entry[T]] = []
        self._serials = itertools.count()  # of equal items the one that was entered first is first

    def grew(self, item: T) -> None:
        """Enter an item, or note that its size is larger."""
        size, entry = self._size_of(item), self._entries.get(item)
        if entry is not None and size <= entry.size:
            return
        self._enter(item, size)
        if len(self._heap) > 2 * len(self._entries) + STALE_ENTRIES:
            self._heap = [each for each in self._heap if each.item is not None]
            heapq.heapify(self._heap)

    def discard(self, item: T) -> None:
        """Forget an item that has no size any more."""
        entry = self._entries.pop(item, None)
        if entry is not None:
            entry.item = None

    def largest(self) -> T:
        """The item with the largest size; raises IndexError if none has a size."""
        while True:
            entry = self._heap[0]
            item = entry.item
            if item is None:
                heapq.heappop(self._heap)
                continue
            size = self._size_of(item)
            if entry.size == size:
                return item
            heapq.heappop(self._heap)
            self._enter(item, size)

    def _enter(self, item: T, size: int) -> None:
        self.discard(item)
        if size:
            entry = _Entry(size, next(self._serials), item)
            self._entries[item] = entry
            heapq.heappush(self._heap, entry)


class _Entry(Generic[T]):
    """The size of an item, and its place among those of the same size."""

    __slots__ = ("item", "serial", "size")

    def __init__(self, size: int, serial: int, item: T) -> None:
        self.size = size
        self.serial = serial
        self.item: T | None = item

    def __lt__(self, other: _Entry[T]) -> bool:
        return (-self.size, self.serial) < (-other.size, other.serial)


class RetentionAccount:
    """The memory that one session keeps; `evict` makes it smaller."""

    __slots__ = ("_budget", "evict", "size")

    def __init__(self, budget: RetentionBudget, evict: Callable[[], None]) -> None:
        self._budget = budget
        self.evict = evict
        self.size = 0

    def add(self, size: int) -> None:
        """Count more memory, and free as much elsewhere or here if the budget is used up."""
        self.size += size
        self._budget.added(self, size)

    def remove(self, size: int) -> None:
        """Count less memory."""
        self.size -= size
        self._budget.removed(self, size)


class RetentionBudget:
    """The memory of all accounts."""

    def __init__(self, size: int) -> None:
        self.used = 0
        self._size = size
        self._accounts = LargestFirst[RetentionAccount](_size_class)

    def open_account(self, evict: Callable[[], None]) -> RetentionAccount:
        """An account of nothing; `evict` is called only while it has a size, and must reduce it."""
        return RetentionAccount(self, evict)

    def added(self, account: RetentionAccount, size: int) -> None:
        """Count an addition to an account, and have the largest ones evict the excess."""
        self.used += size
        self._accounts.grew(account)
        while self.used > self._size:
            largest = self._accounts.largest()
            before = largest.size
            largest.evict()
            assert largest.size < before

    def removed(self, account: RetentionAccount, size: int) -> None:
        self.used -= size
        if not account.size:
            self._accounts.discard(account)


def _size_class(account: RetentionAccount) -> int:
    """Equal for sizes of which neither is twice the other, more or less."""
    return account.size.bit_length()
