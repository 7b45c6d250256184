"""When a peer is pinged, probed, given up, or found stalled."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.clock import Clock

from exec_server.net.liveness import Action, CheckTimer, KeepAlive, Probe, TransferProgress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
    return clock


# ---- pings ----------------------------------------------------------------------------


def test_silent_peer_is_pinged_once_then_given_up() -> None:
    keep_alive = KeepAlive(100, ping_seconds=30, pong_seconds=50)
    assert keep_alive.next_check() == 130
    assert keep_alive.check(129) is Action.WAIT
    assert keep_alive.check(130) is Action.PING
    assert keep_alive.next_check() == 160
    assert keep_alive.check(160) is Action.WAIT  # no second ping while one is unanswered
    assert keep_alive.next_check() == 180
    assert keep_alive.check(179) is Action.WAIT
    assert keep_alive.check(180) is Action.GIVE_UP


def test_received_bytes_answer_a_ping_and_postpone_the_next() -> None:
    keep_alive = KeepAlive(0, ping_seconds=30, pong_seconds=30)
    assert keep_alive.check(30) is Action.PING
    keep_alive.touch(50)
    assert keep_alive.next_check() == 80
    assert keep_alive.check(79) is Action.WAIT
    assert keep_alive.check(80) is Action.PING


def test_answer_postpones_nothing() -> None:
    keep_alive = KeepAlive(0, ping_seconds=30, pong_seconds=60)
    keep_alive.answered()
    assert keep_alive.check(30) is Action.PING
    keep_alive.answered()
    assert keep_alive.check(59) is Action.WAIT
    assert keep_alive.check(60) is Action.PING


def test_peer_that_cannot_answer_is_neither_pinged_nor_given_up() -> None:
    keep_alive = KeepAlive(0, ping_seconds=30, pong_seconds=30)
    assert keep_alive.check(30, can_answer=False) is Action.WAIT
    assert keep_alive.check(60) is Action.PING
    assert keep_alive.check(90, can_answer=False) is Action.WAIT
    assert keep_alive.check(91) is Action.WAIT
    assert keep_alive.check(120) is Action.PING


# ---- progress -------------------------------------------------------------------------


def test_progress_stalls_when_nothing_moves() -> None:
    progress = TransferProgress(30)
    progress.touch(100)
    assert progress.remaining(110) == 20
    progress.touch(110)
    assert progress.remaining(140) == 0
    assert progress.remaining(141) == -1


# ---- timers ---------------------------------------------------------------------------


def test_watchdog_runs_until_its_check_says_stop(clock: Clock) -> None:
    delays: list[float | None] = [10, 5, None, 1]
    runs: list[float] = []

    def check() -> float | None:
        runs.append(clock.now)
        return delays[len(runs) - 1]

    watchdog = CheckTimer(check)
    watchdog.cancel()
    watchdog.start(3)
    watchdog.start(1)  # is due already
    clock.advance(100)
    assert runs == [3, 13, 18]
    watchdog.start(2)
    clock.advance(102)
    assert runs == [3, 13, 18, 102]
    watchdog.cancel()
    clock.advance(200)
    assert len(runs) == 4
    assert clock.waiting == []


def test_silent_peer_is_given_up_when_probed(clock: Clock) -> None:
    reasons: list[str] = []
    probe = Probe(3, reasons.append)
    assert not probe.is_active
    probe.start()
    clock.advance(2)
    probe.start()  # gives no more time
    assert probe.is_active
    clock.advance(3)
    assert reasons == ["another connection asks for its session and it is silent"]


def test_living_peer_survives_a_probe_and_can_be_probed_again(clock: Clock) -> None:
    reasons: list[str] = []
    probe = Probe(3, reasons.append)
    probe.cancel()
    probe.start()
    clock.advance(2)
    probe.cancel()
    assert not probe.is_active
    clock.advance(10)
    assert reasons == []
    probe.start()
    clock.advance(13)
    assert len(reasons) == 1
