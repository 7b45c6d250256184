"""A budget of bytes that connections share: order, waiting, giving back."""

from __future__ import annotations

from exec_server.net.inbox import ByteBudget, Reservation


def test_bytes_are_granted_while_there_are_any() -> None:
    budget = ByteBudget(10)
    assert budget.try_acquire(6)
    assert not budget.try_acquire(5)
    assert budget.try_acquire(4)
    budget.release(10)
    assert budget.try_acquire(10)


def test_waiters_are_served_in_order_and_not_overtaken() -> None:
    budget = ByteBudget(10)
    granted: list[str] = []
    assert budget.acquire(8, lambda: granted.append("never"))
    assert not budget.acquire(5, lambda: granted.append("first"))
    assert not budget.acquire(1, lambda: granted.append("second"))
    assert budget.has_waiters
    assert not budget.try_acquire(1)
    budget.release(2)
    assert granted == []
    budget.release(6)
    assert granted == ["first", "second"]
    assert not budget.has_waiters
    assert budget.try_acquire(4)


def test_waiter_that_leaves_makes_way_for_the_next() -> None:
    budget = ByteBudget(10)
    granted: list[str] = []

    def large() -> None:
        granted.append("large")

    assert budget.try_acquire(5)
    assert not budget.acquire(8, large)
    assert not budget.acquire(3, lambda: granted.append("small"))
    budget.cancel(large)
    assert granted == ["small"]
    assert not budget.has_waiters


def test_reservation_is_held_until_it_is_released() -> None:
    budget = ByteBudget(10)
    reservation = Reservation(budget, lambda: None)
    reservation.release()
    reservation.acquire(10)
    assert (reservation.size, reservation.is_waiting) == (10, False)
    assert not budget.try_acquire(1)
    reservation.release()
    assert reservation.size == 0
    assert budget.try_acquire(10)


def test_reservation_waits_for_others() -> None:
    budget = ByteBudget(10)
    granted: list[int] = []
    first = Reservation(budget, lambda: granted.append(1))
    second = Reservation(budget, lambda: granted.append(2))
    first.acquire(8)
    second.acquire(8)
    assert (granted, second.is_waiting) == ([], True)
    first.release()
    assert (granted, second.is_waiting, second.size) == ([2], False, 8)


def test_waiting_reservation_may_be_given_up() -> None:
    budget = ByteBudget(10)
    granted: list[int] = []
    first = Reservation(budget, lambda: granted.append(1))
    second = Reservation(budget, lambda: granted.append(2))
    first.acquire(8)
    second.acquire(8)
    second.release()
    assert (second.size, second.is_waiting, budget.has_waiters) == (0, False, False)
    first.release()
    assert granted == []
    assert budget.try_acquire(10)


def test_reservation_grows_and_shrinks() -> None:
    budget = ByteBudget(10)
    reservation = Reservation(budget, lambda: None)
    assert reservation.resize(6)
    assert reservation.resize(6)
    assert not reservation.resize(11)
    assert reservation.size == 6
    assert reservation.resize(2)
    assert not budget.try_acquire(9)
    assert budget.try_acquire(8)
