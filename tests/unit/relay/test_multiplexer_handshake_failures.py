"""The allowance of failed handshakes: how it is used up, grows back, and differs by source."""

from __future__ import annotations

from itertools import pairwise

import pytest

from exec_server.relay import multiplexer
from exec_server.relay.multiplexer import (
    BURST_FAILURES,
    FAILURES_A_SECOND,
    REPORT_SECONDS,
    HandshakeFailures,
)


@pytest.fixture
def failures() -> HandshakeFailures:
    return HandshakeFailures()


def test_allowance_is_used_up_and_grows_back(failures: HandshakeFailures) -> None:
    assert not failures.is_exhausted("a", 0.0)
    reports = [failures.record("a", 0.0) for _ in range(BURST_FAILURES)]
    assert reports == [False] * (BURST_FAILURES - 1) + [True]
    assert failures.is_exhausted("a", 0.0)
    assert not failures.is_exhausted("b", 0.0)
    assert failures.is_exhausted("a", 0.9 / FAILURES_A_SECOND)
    assert not failures.is_exhausted("a", 1.0 / FAILURES_A_SECOND)
    # After a long time the whole of it is there, and not more.
    later = 1000.0
    for _ in range(BURST_FAILURES):
        assert not failures.is_exhausted("a", later)
        failures.record("a", later)
    assert failures.is_exhausted("a", later)


def test_flood_is_reported_once_in_a_while(failures: HandshakeFailures) -> None:
    step = 0.5 / FAILURES_A_SECOND  # twice as fast as the allowance grows
    times = [number * step for number in range(int(3.5 * REPORT_SECONDS / step))]
    reported = [
        now for now in times if not failures.is_exhausted("a", now) and failures.record("a", now)
    ]
    assert len(reported) == 4
    assert all(second - first >= REPORT_SECONDS for first, second in pairwise(reported))


def test_source_with_the_oldest_failure_is_forgotten(
    failures: HandshakeFailures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiplexer, "MAX_SOURCES", 2)
    for source in ("a", "b", "a", "c"):
        for _ in range(BURST_FAILURES):
            failures.record(source, 0.0)
    assert [failures.is_exhausted(source, 0.0) for source in "abc"] == [True, False, True]
