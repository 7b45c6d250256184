"""RetentionBudget: the session that keeps most gives way, in O(log n)."""

from __future__ import annotations

import random
import weakref

import pytest

from exec_server.process.retention import (
    SERVER_RETAINED_BYTES,
    STALE_ENTRIES,
    LargestFirst,
    RetentionBudget,
)
from exec_server.process.table import CLOSED_BYTES


class Keeper:
    """A session that keeps things of some sizes, and forgets the oldest first."""

    def __init__(self, budget: RetentionBudget) -> None:
        self.sizes: list[int] = []
        self.account = budget.open_account(self._evict)

    def keep(self, *sizes: int) -> None:
        for size in sizes:
            self.sizes.append(size)
            self.account.add(size)

    def release(self) -> None:
        self.account.remove(self.sizes.pop(0))

    def _evict(self) -> None:
        self.release()


def test_eight_sessions_may_keep_all_that_one_may() -> None:
    assert SERVER_RETAINED_BYTES == 8 * CLOSED_BYTES


def test_of_accounts_of_about_one_size_the_older_one_gives_way() -> None:
    budget = RetentionBudget(50)
    old, new = Keeper(budget), Keeper(budget)
    old.keep(20)
    new.keep(21)
    Keeper(budget).keep(10)
    assert (old.sizes, new.sizes) == ([], [21])


def test_nothing_is_evicted_up_to_the_size() -> None:
    budget = RetentionBudget(10)
    one, two = Keeper(budget), Keeper(budget)
    one.keep(3, 3)
    two.keep(4)
    assert (one.sizes, two.sizes, budget.used) == ([3, 3], [4], 10)


def test_the_largest_account_gives_way_whoever_adds() -> None:
    budget = RetentionBudget(100)
    greedy, modest = Keeper(budget), Keeper(budget)
    greedy.keep(*[10] * 9)
    modest.keep(10)
    modest.keep(5)
    assert (greedy.sizes, modest.sizes) == ([10] * 8, [10, 5])
    greedy.keep(10)
    assert (greedy.sizes, modest.sizes, budget.used) == ([10] * 8, [10, 5], 95)


def test_a_single_account_gives_way_itself() -> None:
    budget = RetentionBudget(10)
    only = Keeper(budget)
    only.keep(4, 5, 6, 11)
    assert (only.sizes, only.account.size, budget.used) == ([], 0, 0)
    only.keep(10)
    assert only.sizes == [10]


def test_of_equal_accounts_the_first_gives_way() -> None:
    budget = RetentionBudget(6)
    keepers = [Keeper(budget) for _ in range(3)]
    for keeper in keepers:
        keeper.keep(1, 1)
    Keeper(budget).keep(1)
    assert [len(keeper.sizes) for keeper in keepers] == [1, 2, 2]


def test_many_sessions_take_nothing_from_one_that_keeps_less() -> None:
    budget = RetentionBudget(1000)
    modest = Keeper(budget)
    modest.keep(5, 5)
    greedy = [Keeper(budget) for _ in range(50)]
    for _ in range(20):
        for keeper in greedy:
            keeper.keep(10)
    assert modest.sizes == [5, 5]
    assert {len(keeper.sizes) for keeper in greedy} <= {1, 2, 3}  # 20 and 30 are of one class
    assert 980 < budget.used <= 1000


def test_an_item_that_is_forgotten_is_freed() -> None:
    """Output of megabytes must not wait in the order until something else comes."""

    class Item:
        size = 3

    order = LargestFirst[Item](lambda each: each.size)
    items = [Item() for _ in range(3)]
    for item in items:
        order.grew(item)
        item.size += 1
        order.grew(item)
    gone = [weakref.ref(item) for item in items]
    for item in items:
        order.discard(item)
    del item, items
    assert [ref() for ref in gone] == [None] * 3


def test_an_eviction_that_frees_nothing_is_a_defect() -> None:
    account = RetentionBudget(0).open_account(lambda: None)
    with pytest.raises(AssertionError):
        account.add(1)


def test_sessions_that_have_ended_leave_no_entries() -> None:
    budget = RetentionBudget(1000)
    for _ in range(10 * STALE_ENTRIES):
        keeper = Keeper(budget)
        keeper.keep(1, 2)
        keeper.account.remove(3)
    assert budget.used == 0
    assert len(budget._accounts._heap) <= STALE_ENTRIES + 1
    assert not budget._accounts._entries


def test_the_largest_item_is_found_whatever_happens() -> None:
    chance = random.Random(1)
    sizes = dict.fromkeys(range(20), 0)
    heap = LargestFirst[int](sizes.__getitem__)
    for _ in range(20_000):
        item = chance.randrange(20)
        sizes[item] = chance.choice((0, sizes[item] // 2, chance.randrange(1000)))
        if sizes[item]:
            heap.grew(item)
        elif chance.random() < 0.5:  # else it is noticed when it comes first
            heap.discard(item)
        if chance.random() < 0.2 and any(sizes.values()):
            assert sizes[heap.largest()] == max(sizes.values())
        assert len(heap._heap) <= 2 * 20 + STALE_ENTRIES


def test_without_items_there_is_no_largest() -> None:
    heap = LargestFirst[str](len)
    heap.grew("")
    heap.discard("a")
    with pytest.raises(IndexError):
        heap.largest()
