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
    gets another.
    """

    __slots__ = ("_entered", "_heap", "_serials", "_size_of")

    def __init__(self, size_of: Callable[[T], int]) -> None:
        self._size_of = size_of
        self._entered: dict[T, int] = {}  # the sizes of valid entries, never less than the items'
        self._heap: list[tuple[int, int, T]] = []
        self._serials = itertools.count()  # of equal items the one that was entered first is first

    def grew(self, item: T) -> None:
        """Enter an item, or note that its size is larger."""
        size = self._size_of(item)
        if size <= self._entered.get(item, 0):
            return
        self._enter(item, size)
        if len(self._heap) > 2 * len(self._entered) + STALE_ENTRIES:
            items = list(self._entered)
            self._heap.clear()
            self._entered.clear()
            for each in items:
                self._enter(each, self._size_of(each))

    def discard(self, item: T) -> None:
        """Forget an item that has no size any more."""
        self._entered.pop(item, None)

    def largest(self) -> T:
        """The item with the largest size; raises IndexError if none has a size."""
        while True:
            entry, _, item = self._heap[0]
            size = self._size_of(item)
            if -entry == size:
                return item
            heapq.heappop(self._heap)
            if -entry == self._entered.get(item):
                del self._entered[item]
                self._enter(item, size)

    def _enter(self, item: T, size: int) -> None:
        if size:
            self._entered[item] = size
            heapq.heappush(self._heap, (-size, next(self._serials), item))


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
