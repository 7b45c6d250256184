"""OutputLog: numbering, retention and the rules of process/read."""

from __future__ import annotations

import pytest

from exec_server.process import output
from exec_server.process.output import (
    CHUNK_BYTES,
    DROPPED_SIZES,
    RETAINED_BYTES,
    RETAINED_CHUNKS,
    OutputLog,
)
from exec_server.protocol.process import Chunk


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
    Chunk(1, "stdout", b"abc"),
    Chunk(2, "stderr", b"defg"),
    Chunk(4, "stdout", b"h"),
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
    log: OutputLog, after: int, max_bytes: int | None, chunks: list[Chunk], next_seq: int
) -> None:
    assert log.read(after, max_bytes) == (chunks, next_seq)


def test_all_chunks_are_retained_at_first(log: OutputLog) -> None:
    assert log.retained() == [_ONE, _TWO, _FOUR]


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
    assert log.read(0, 0) == ([Chunk(1, "pty", bytes(CHUNK_BYTES))], 2)
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
    assert log.read(3, 1) == ([Chunk(6, "stdout", b"x")], 7)


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
    assert log.memory_bytes() == 8


def test_loss_is_what_was_dropped_of_the_chunks_asked_for(short_log: OutputLog) -> None:
    expected = {0: (6, 10), 1: (6, 9), 2: (6, 7), 3: (6, 4), 4: None, 5: None, 6: None, 99: None}
    assert {after: short_log.loss(after) for after in expected} == expected
    assert short_log.memory_bytes() == 13 + 2 * 4


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
        assert log.memory_bytes() <= size + 2 * 8


def test_sizes_of_dropped_chunks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "RETAINED_CHUNKS", 1)
    log = OutputLog()
    for _ in range(DROPPED_SIZES + 1):
        log.append("stdout", b"x")
    assert log.memory_bytes() == 1 + 2 * DROPPED_SIZES
    assert log.loss(1) == (DROPPED_SIZES + 1, DROPPED_SIZES - 1)
    log.append("stdout", b"x")
    assert log.memory_bytes() == 1 + 2 * (DROPPED_SIZES // 2 + 1)
    kept = DROPPED_SIZES // 2 + 1
    first = DROPPED_SIZES + 2
    assert log.loss(first - 1 - kept) == (first, kept)
    assert log.loss(first - 2 - kept) == (first, None)
    assert log.loss(0) == (first, DROPPED_SIZES + 1)


def test_limits_are_those_of_the_reference() -> None:
    assert (output.CHUNK_BYTES, output.RETAINED_BYTES) == (8192, 1_048_576)
    assert output.RETAINED_CHUNKS == 50_000


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
def test_next_chunks(log: OutputLog, after: int, count: int, chunks: list[Chunk]) -> None:
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
