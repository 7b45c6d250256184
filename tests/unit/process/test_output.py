"""OutputLog: numbering, retention and the rules of process/read."""

from __future__ import annotations

import pytest

from exec_server.process import output
from exec_server.process.output import (
    CHUNK_COST,
    COMPACTED_CHUNKS,
    DROPPED_SIZES,
    RECENT_BYTES,
    RETAINED_BYTES,
    RETAINED_CHUNKS,
    SESSION_RECENT_BYTES,
    OutputLog,
    RecentOutputBudget,
)
from exec_server.protocol.process import CHUNK_BYTES, OutputChunk


@pytest.fixture
def log() -> OutputLog:
    """Chunks 1, 2 and 4 of 3, 4 and 1 bytes; 3 and 5 are other events."""
    log = OutputLog()
    assert log.append("stdout", b"abc") == 1
    assert log.append("stderr", b"defg") == 2
    assert log.number_event() == 3
    assert log.append("stdout", b"h") == 4
    assert log.number_event() == 5
    return log


_ONE, _TWO, _FOUR = (
    OutputChunk(1, "stdout", b"abc"),
    OutputChunk(2, "stderr", b"defg"),
    OutputChunk(4, "stdout", b"h"),
)


@pytest.mark.parametrize(
    ("after", "max_bytes", "chunks", "next_seq"),
    [
        (0, None, [_ONE, _TWO, _FOUR], 6),
        (1, None, [_TWO, _FOUR], 6),
        (2, None, [_FOUR], 6),
        (3, None, [_FOUR], 6),
        (4, None, [], 6),
        (99, None, [], 6),
        (0, 0, [_ONE], 2),
        (0, 1, [_ONE], 2),
        (0, 3, [_ONE], 2),
        (0, 6, [_ONE], 2),
        (0, 7, [_ONE, _TWO], 3),
        (0, 8, [_ONE, _TWO, _FOUR], 5),
        (0, 1000, [_ONE, _TWO, _FOUR], 5),
        (1, 4, [_TWO], 3),
        (4, 1000, [], 6),
        (4, 0, [], 6),
    ],
)
def test_read(
    log: OutputLog, after: int, max_bytes: int | None, chunks: list[OutputChunk], next_seq: int
) -> None:
    assert log.read(after, max_bytes) == (chunks, next_seq)


@pytest.mark.parametrize(("max_bytes", "count"), [(5, 1), (6, 2), (8, 2), (9, 3)])
def test_chunks_of_equal_size_are_added_up(max_bytes: int, count: int) -> None:
    log = OutputLog()
    chunks = [OutputChunk(log.append("stdout", b"abc"), "stdout", b"abc") for _ in range(3)]
    assert log.read(0, max_bytes) == (chunks[:count], count + 1)


def test_all_chunks_are_retained_at_first(log: OutputLog) -> None:
    assert log.newest() == [_ONE, _TWO, _FOUR]


def test_numbers_start_at_one() -> None:
    log = OutputLog()
    assert log.read(0, None) == ([], 1)
    assert log.read(0, 10) == ([], 1)
    assert log.number_event() == 1


def test_oldest_chunks_are_dropped_beyond_the_bytes() -> None:
    log = OutputLog()
    count = RETAINED_BYTES // CHUNK_BYTES
    for _ in range(count):
        log.append("pty", bytes(CHUNK_BYTES))
    assert log.retained_bytes == RETAINED_BYTES
    assert log.read(0, 0) == ([OutputChunk(1, "pty", bytes(CHUNK_BYTES))], 2)
    log.append("pty", b"x")
    assert log.retained_bytes == RETAINED_BYTES - CHUNK_BYTES + 1
    chunks, next_seq = log.read(0, None)
    assert [chunk.seq for chunk in chunks] == list(range(2, count + 2))
    assert next_seq == count + 2


def test_oldest_chunks_are_dropped_beyond_their_number() -> None:
    log = OutputLog()
    for _ in range(RETAINED_CHUNKS + 5):
        log.append("stdout", b"x")
    chunks, _ = log.read(0, None)
    assert (len(chunks), chunks[0].seq) == (RETAINED_CHUNKS, 6)
    assert log.retained_bytes == RETAINED_CHUNKS
    assert log.read(3, 1) == ([OutputChunk(6, "stdout", b"x")], 7)


@pytest.fixture
def short_log(monkeypatch: pytest.MonkeyPatch) -> OutputLog:
    """Of chunks 1 to 4 and 6 to 7, sized as their numbers, only the last two are kept."""
    monkeypatch.setattr(output, "RETAINED_CHUNKS", 2)
    log = OutputLog()
    for _ in range(4):
        log.append("stdout", bytes(log.next_seq))
    assert log.number_event() == 5
    for _ in range(2):
        log.append("stdout", bytes(log.next_seq))
    return log


def test_nothing_is_lost_before_anything_is_dropped(log: OutputLog) -> None:
    assert [log.loss(after) for after in (0, 1, 5, 99)] == [None] * 4
    assert log.memory_bytes() == 8 + 3 * CHUNK_COST


def test_loss_is_what_was_dropped_of_the_chunks_asked_for(short_log: OutputLog) -> None:
    expected = {0: (6, 10), 1: (6, 9), 2: (6, 7), 3: (6, 4), 4: None, 5: None, 6: None, 99: None}
    assert {after: short_log.loss(after) for after in expected} == expected
    assert short_log.memory_bytes() == 13 + 2 * 4 + 2 * CHUNK_COST


def test_numbers_of_other_events_are_no_loss(short_log: OutputLog) -> None:
    short_log.append("stdout", bytes(8))
    expected = {0: (7, 16), 3: (7, 10), 4: (7, 6), 5: (7, 6), 6: None}
    assert {after: short_log.loss(after) for after in expected} == expected


def test_loss_is_exact_or_unknown_but_never_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "RETAINED_CHUNKS", 1)
    monkeypatch.setattr(output, "DROPPED_SIZES", 8)
    log = OutputLog()
    sizes = [seq * 7 % 11 + 1 for seq in range(40)]
    for last, size in enumerate(sizes, 1):
        log.append("pty", bytes(size))
        for after in range(last):
            dropped = sizes[after : last - 1]
            loss = log.loss(after)
            if not dropped:
                assert loss is None
            elif loss != (last, None):
                assert loss == (last, sum(dropped))
            else:  # sizes may be forgotten, their total is not
                assert len(dropped) > 4
                assert after > 0
        assert log.memory_bytes() <= size + 2 * 8 + CHUNK_COST


def test_sizes_of_dropped_chunks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "RETAINED_CHUNKS", 1)
    log = OutputLog()
    for _ in range(DROPPED_SIZES + 1):
        log.append("stdout", b"x")
    assert log.memory_bytes() == 1 + 2 * DROPPED_SIZES + CHUNK_COST
    assert log.loss(1) == (DROPPED_SIZES + 1, DROPPED_SIZES - 1)
    log.append("stdout", b"x")
    assert log.memory_bytes() == 1 + 2 * (DROPPED_SIZES // 2 + 1) + CHUNK_COST
    kept = DROPPED_SIZES // 2 + 1
    first = DROPPED_SIZES + 2
    assert log.loss(first - 1 - kept) == (first, kept)
    assert log.loss(first - 2 - kept) == (first, None)
    assert log.loss(0) == (first, DROPPED_SIZES + 1)


@pytest.mark.parametrize("chunks", [COMPACTED_CHUNKS - 1, COMPACTED_CHUNKS])
def test_compact_log_reads_and_releases_as_before(chunks: int) -> None:
    log = OutputLog(RecentOutputBudget(SESSION_RECENT_BYTES))
    for number in range(chunks):
        log.append("stdout", bytes([number]) * (3 * _MIB // chunks))
    expected = log.read(0, None), log.read(chunks // 2, 1), log.next_chunks(1, 5), log.newest()
    log.compact()
    assert expected == (
        *(log.read(0, None), log.read(chunks // 2, 1), log.next_chunks(1, 5), log.newest()),
    )
    log.release_recent()
    assert log.reserved_bytes == 0
    assert log.loss(0) == (log.newest()[0].seq, 3 * _MIB // chunks * chunks - log.retained_bytes)


def test_limits_are_those_of_the_reference() -> None:
    assert (CHUNK_BYTES, output.RETAINED_BYTES) == (8192, 1_048_576)
    assert output.RETAINED_CHUNKS == 50_000


# ---- recent output ---------------------------------------------------------------------

_MIB = 1_048_576
_PIECE = bytes(CHUNK_BYTES)


def _grow(log: OutputLog, size: int) -> None:
    for _ in range(size // CHUNK_BYTES):
        log.append("stdout", _PIECE)


def test_limits_of_recent_output() -> None:
    assert (output.RECENT_BYTES, output.SESSION_RECENT_BYTES) == (16 * _MIB, 64 * _MIB)
    assert output.SERVER_RECENT_BYTES == 256 * _MIB
    assert (output.RECENT_SECONDS, output.UNREAD_SECONDS) == (5.0, 1.0)


def test_bursts_are_read_whole_by_a_late_client() -> None:
    budget = RecentOutputBudget(SESSION_RECENT_BYTES)
    log = OutputLog(budget)
    seen = total = 0
    for _ in range(100):
        _grow(log, 8 * _MIB)
        chunks, next_seq = log.read(seen, None)
        seen, total = next_seq - 1, total + sum(len(chunk.chunk) for chunk in chunks)
        assert log.loss(seen) is None
        log.age()
    assert total == 800 * _MIB


def test_recent_output_is_bounded_by_its_bytes() -> None:
    log = OutputLog(RecentOutputBudget(SESSION_RECENT_BYTES))
    _grow(log, 20 * _MIB)
    assert (log.retained_bytes, log.reserved_bytes) == (RECENT_BYTES, RECENT_BYTES - RETAINED_BYTES)
    assert log.loss(0) == (4 * _MIB // CHUNK_BYTES + 1, 4 * _MIB)


def test_recent_output_is_bounded_by_the_number_of_its_chunks() -> None:
    log = OutputLog(RecentOutputBudget(SESSION_RECENT_BYTES))
    for _ in range(RETAINED_CHUNKS + 5):
        log.append("stdout", b"x" * 100)
    assert len(log.read(0, None)[0]) == RETAINED_CHUNKS


def test_recent_output_of_a_session_and_of_a_server_is_bounded() -> None:
    server = RecentOutputBudget(5 * _MIB)
    first, second = (OutputLog(RecentOutputBudget(size * _MIB, server)) for size in (3, 4))
    _grow(first, 8 * _MIB)
    assert (first.retained_bytes, server.free) == (4 * _MIB, 2 * _MIB)
    _grow(second, 8 * _MIB)
    assert (second.retained_bytes, server.free) == (3 * _MIB, 0)
    first.release_recent()
    assert (first.retained_bytes, first.reserved_bytes, server.free) == (_MIB, 0, 3 * _MIB)
    _grow(second, _MIB)
    assert second.retained_bytes == 4 * _MIB
    second.release_recent()
    second.release_recent()
    assert server.free == 5 * _MIB


def test_output_that_grows_old_is_dropped_down_to_the_usual() -> None:
    budget = RecentOutputBudget(SESSION_RECENT_BYTES)
    log = OutputLog(budget)
    assert log.recent_seconds() == output.UNREAD_SECONDS
    log.read(0, None)
    assert log.recent_seconds() == output.RECENT_SECONDS
    _grow(log, 3 * _MIB)
    log.age()
    assert log.retained_bytes == 3 * _MIB
    _grow(log, 2 * _MIB)
    log.age()
    assert (log.retained_bytes, log.reserved_bytes) == (2 * _MIB, _MIB)
    log.age()
    assert (log.retained_bytes, log.reserved_bytes) == (_MIB, 0)
    assert budget.free == SESSION_RECENT_BYTES
    log.age()
    assert log.retained_bytes == _MIB


def test_output_of_a_client_that_does_not_read_is_dropped_at_once() -> None:
    budget = RecentOutputBudget(SESSION_RECENT_BYTES)
    log = OutputLog(budget)
    _grow(log, 3 * _MIB)
    assert log.retained_bytes == 3 * _MIB
    log.age()
    assert (log.retained_bytes, log.reserved_bytes, budget.free) == (_MIB, 0, SESSION_RECENT_BYTES)
    _grow(log, 3 * _MIB)
    assert log.retained_bytes == _MIB
    log.read(0, 1)  # from now on it is known to read
    _grow(log, 3 * _MIB)
    assert log.retained_bytes == 4 * _MIB


def test_space_of_output_that_was_read_is_taken_back_when_it_is_needed() -> None:
    budget = RecentOutputBudget(4 * _MIB)
    first, second, third = (OutputLog(budget) for _ in range(3))
    _grow(first, 3 * _MIB)
    assert first.read(0, None)[1] == first.next_seq
    assert first.read(0, None)[1] == first.next_seq  # still there, for a client that asks again
    _grow(second, 3 * _MIB)
    second.read(0, _MIB)
    assert (first.retained_bytes, second.retained_bytes, budget.free) == (3 * _MIB, 3 * _MIB, 0)
    _grow(third, 2 * _MIB)
    assert (first.retained_bytes, second.retained_bytes, budget.free) == (_MIB, 3 * _MIB, _MIB)
    _grow(third, 3 * _MIB)  # all but the first MiB of the second is not read
    assert (second.retained_bytes, third.retained_bytes, budget.free) == (2 * _MIB, 4 * _MIB, 0)
    assert third.loss(0) == (_MIB // CHUNK_BYTES + 1, _MIB)
    assert second.loss(second._read_seq) is None


def test_no_recent_output_is_kept_for_a_client_that_is_away() -> None:
    budget = RecentOutputBudget(4 * _MIB)
    log = OutputLog(budget)
    budget.is_open = False
    _grow(log, 2 * _MIB)
    assert log.retained_bytes == _MIB
    budget.is_open = True
    _grow(log, 2 * _MIB)
    assert log.retained_bytes == 3 * _MIB


def test_log_without_recent_output_is_not_looked_at_again() -> None:
    budget = RecentOutputBudget(2 * _MIB)
    first, second = OutputLog(budget), OutputLog(budget)
    _grow(first, 3 * _MIB)
    first.read(0, None)
    assert list(budget._read_logs) == [first]
    first.release_recent()
    assert not budget._read_logs  # which would keep the log of a forgotten process
    _grow(second, 4 * _MIB)
    assert (first.retained_bytes, second.retained_bytes) == (_MIB, 3 * _MIB)


def test_memory_and_newest_chunks_do_not_count_recent_bytes() -> None:
    log = OutputLog(RecentOutputBudget(SESSION_RECENT_BYTES))
    _grow(log, 3 * _MIB)
    assert log.memory_bytes() == _MIB + CHUNK_COST * (3 * _MIB // CHUNK_BYTES)
    newest = log.newest()
    assert (len(newest), newest[-1].seq) == (_MIB // CHUNK_BYTES, log.next_seq - 1)
    assert [chunk.seq for chunk in newest] == list(range(newest[0].seq, log.next_seq))


def test_log_without_a_budget_has_no_recent_output_to_release() -> None:
    log = OutputLog()
    _grow(log, 2 * _MIB)
    log.release_recent()
    assert log.retained_bytes == _MIB


@pytest.mark.parametrize("after", [0, 1, 40, 59, 60, 61, 99, 100, 101, 2**64 - 1])
@pytest.mark.parametrize("max_bytes", [0, 1, 5, 1000])
def test_limited_read_from_either_end_is_that_of_all_chunks(after: int, max_bytes: int) -> None:
    log = OutputLog()
    for number in range(100):
        log.append("stdout", bytes([number]))
    newer, _ = log.read(after, None)
    wanted = newer[: max(1, max_bytes)]
    assert log.read(after, max_bytes) == (wanted, wanted[-1].seq + 1 if wanted else 101)


# ---- next_chunks ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("after", "count", "chunks"),
    [
        (0, 10, [_ONE, _TWO, _FOUR]),
        (0, 2, [_ONE, _TWO]),
        (1, 1, [_TWO]),
        (2, 10, [_FOUR]),
        (3, 10, [_FOUR]),
        (4, 10, []),
        (5, 10, []),
        (99, 10, []),
    ],
)
def test_next_chunks(log: OutputLog, after: int, count: int, chunks: list[OutputChunk]) -> None:
    assert log.next_chunks(after, count) == chunks


def test_next_chunks_begin_with_the_oldest_retained_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "RETAINED_CHUNKS", 3)
    monkeypatch.setattr(output, "DROPPED_SIZES", 4)
    log = OutputLog()
    for number in range(1, 21):
        log.append("stdout", bytes([number]))
        for after in range(number + 2):
            expected = [seq for seq in range(1, number + 1) if seq > max(after, number - 3)]
            assert [chunk.seq for chunk in log.next_chunks(after, 100)] == expected
