"""OutputLog: its memory in the account of its session, while the client is away."""

from __future__ import annotations

import pytest

from exec_server.process import output
from exec_server.process.output import (
    CHARGE_STEP,
    CHUNK_COST,
    DROPPED_SIZES,
    FREE_BYTES,
    RETAINED_BYTES,
    SESSION_RECENT_BYTES,
    Charges,
    OutputLog,
    RecentOutputBudget,
)
from exec_server.process.retention import RetentionBudget
from exec_server.protocol.process import CHUNK_BYTES

_MIB = 1_048_576
_PIECE = bytes(CHUNK_BYTES)


class Session:
    """An account whose logs give way."""

    def __init__(self, budget: RetentionBudget) -> None:
        self.account = budget.open_account(self._evict)
        self.charges = Charges(self.account)

    def _evict(self) -> None:
        self.charges.give_back()

    def log(self, pieces: int = 0) -> OutputLog:
        log = OutputLog()
        _grow(log, pieces)
        log.charge(self.charges)
        return log


def _grow(log: OutputLog, pieces: int) -> None:
    for _ in range(pieces):
        log.append("stdout", _PIECE)


def _is_bounded(log: OutputLog) -> bool:
    return log.memory_bytes() <= FREE_BYTES + log.charged_bytes


def test_output_is_counted_from_the_charge_to_the_discharge() -> None:
    budget = RetentionBudget(_MIB)
    log = Session(budget).log(5)
    assert log.charged_bytes == budget.used == CHARGE_STEP
    _grow(log, 10)
    assert log.charged_bytes == budget.used == 2 * CHARGE_STEP
    assert log.loss(0) is None
    log.discharge()
    assert log.charged_bytes == budget.used == 0
    _grow(log, 100)
    assert budget.used == 0
    log.discharge()  # once more changes nothing
    assert budget.used == 0


def test_little_output_is_not_counted() -> None:
    budget = RetentionBudget(0)
    session = Session(budget)
    log = session.log(3)
    assert (budget.used, log.loss(0)) == (0, None)
    log.append("stdout", bytes(FREE_BYTES - 3 * CHUNK_BYTES - 4 * CHUNK_COST))
    assert (budget.used, log.loss(0)) == (0, None)
    assert log.memory_bytes() == FREE_BYTES
    log.discharge()
    assert budget.used == 0


def test_output_beyond_the_budget_loses_its_oldest_chunks_and_says_so() -> None:
    budget = RetentionBudget(4 * CHARGE_STEP)
    log = Session(budget).log()
    for count in range(1, 200):
        log.append("stdout", _PIECE)
        chunks, next_seq = log.read(0, None)
        assert (next_seq, chunks[-1].seq) == (count + 1, count)
        lost = count - len(chunks)
        assert log.loss(0) == ((lost + 1, lost * CHUNK_BYTES) if lost else None)
        assert _is_bounded(log)
        assert budget.used <= 4 * CHARGE_STEP
    assert log.retained_bytes > 3 * CHARGE_STEP


def test_without_a_budget_the_newest_chunk_is_kept_and_losses_are_declared() -> None:
    log = Session(RetentionBudget(0)).log()
    for size in [1] * 50_000 + [CHUNK_BYTES] * 20:
        log.append("stdout", bytes(size))
        assert log.next_chunks(log.next_seq - 2, 1)
        assert log.memory_bytes() <= FREE_BYTES
    first = log.newest()[0].seq
    assert log.loss(0) == (first, 50_000 + 20 * CHUNK_BYTES - log.retained_bytes)
    assert log.loss(1) == (first, None)  # these sizes are forgotten
    assert log.loss(first - 2) == (first, CHUNK_BYTES)


def test_sizes_of_dropped_chunks_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "RETAINED_CHUNKS", 1)
    log = OutputLog()
    for _ in range(DROPPED_SIZES):
        log.append("stdout", b"x")
    log.append("stdout", _PIECE)
    log.charge(Session(RetentionBudget(CHARGE_STEP)).charges)
    assert log.charged_bytes <= CHARGE_STEP
    assert _is_bounded(log)
    assert log.newest()[0].chunk == _PIECE


def test_the_log_that_is_charged_most_gives_way() -> None:
    budget = RetentionBudget(10 * CHARGE_STEP)
    session = Session(budget)
    large, small = session.log(64), session.log(8)
    assert (large.charged_bytes, small.charged_bytes) == (8 * CHARGE_STEP, CHARGE_STEP)
    _grow(small, 16)
    assert small.loss(0) is None
    assert large.loss(0) is not None
    assert large.charged_bytes + small.charged_bytes == budget.used <= 10 * CHARGE_STEP


def test_the_session_that_keeps_most_gives_way() -> None:
    budget = RetentionBudget(10 * CHARGE_STEP)
    greedy, modest = Session(budget), Session(budget)
    logs = [greedy.log(36), greedy.log(36)]
    kept = modest.log(16)
    assert kept.loss(0) is None
    assert [log.loss(0) is None for log in logs] != [True, True]
    assert greedy.account.size + modest.account.size == budget.used <= 10 * CHARGE_STEP


def test_a_discharged_log_does_not_give_way() -> None:
    budget = RetentionBudget(4 * CHARGE_STEP)
    session = Session(budget)
    back, away = session.log(24), session.log(8)
    back.discharge()
    _grow(back, 24)
    _grow(away, 100)
    assert back.loss(0) is None
    assert away.loss(0) is not None


def test_recent_output_is_reserved_again_after_the_discharge() -> None:
    recent = RecentOutputBudget(SESSION_RECENT_BYTES)
    log = OutputLog(recent)
    _grow(log, 2 * _MIB // CHUNK_BYTES)
    assert log.reserved_bytes == _MIB
    recent.is_open = False
    log.charge(Session(RetentionBudget(SESSION_RECENT_BYTES)).charges)
    _grow(log, _MIB // CHUNK_BYTES)
    assert (log.retained_bytes, log.reserved_bytes) == (2 * _MIB, _MIB)
    log.release_recent()
    assert (log.retained_bytes, log.reserved_bytes) == (RETAINED_BYTES, 0)
    log.discharge()
    recent.is_open = True
    _grow(log, 1)
    assert log.reserved_bytes == _MIB
