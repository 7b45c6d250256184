"""The deadlines of a relay's socket: a peer that takes nothing, and one that answers no ping."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest

from exec_server.transports.client_socket import ClientSocket
from exec_server.transports.relay_socket import (
    PING_SECONDS,
    PONG_SECONDS,
    WRITE_SECONDS,
    RelaySocket,
)


@dataclass
class Timer:
    """A TimerHandle of the clock."""

    when: float
    run: Callable[[], Any]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """The part of an event loop that a RelaySocket uses; time passes when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[Timer] = []

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> Timer:
        timer = Timer(self.now + delay, lambda: callback(*args))
        self._timers.append(timer)
        return timer

    def create_future(self) -> asyncio.Future[str]:
        return asyncio.Future(loop=cast(asyncio.AbstractEventLoop, self))

    def get_debug(self) -> bool:  # a Future asks its loop
        return False

    @property
    def waiting(self) -> list[Timer]:
        """What is still to come, in order."""
        self._timers = [timer for timer in self._timers if not timer.cancelled]
        return sorted(self._timers, key=lambda timer: timer.when)

    def advance(self, until: float) -> None:
        """Let it become this late, and everything happen that is due by then."""
        assert until >= self.now
        while (waiting := self.waiting) and waiting[0].when <= until:
            self._timers.remove(waiting[0])
            self.now = waiting[0].when
            waiting[0].run()
        self.now = until


class Socket:
    """A ClientSocket whose peer is the test."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.queued = 0
        self.pings: list[float] = []  # when each was sent
        self.aborts: list[tuple[float, str]] = []

    def unsent(self) -> int:
        return self.queued

    def ping(self) -> None:
        self.pings.append(self._clock.now)

    def abort(self, reason: str) -> None:
        self.aborts.append((self._clock.now, reason))


class Link(RelaySocket):
    """What a role adds, as little as possible."""

    losses = 0

    def streams_lost(self) -> None:
        self.losses += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
    return clock


@pytest.fixture
def socket(clock: Clock) -> Socket:
    return Socket(clock)


@pytest.fixture
def link(socket: Socket) -> Link:
    return Link(cast(ClientSocket, socket))


# ---- the write watchdog ---------------------------------------------------------------


@pytest.fixture
def writer(link: Link) -> Link:
    """A link that pings nobody, so that only writing can end it."""
    link.is_held = True
    return link


@pytest.mark.parametrize("more", [0, 1, 1_000_000])
def test_peer_that_takes_nothing_is_given_up(
    writer: Link, socket: Socket, clock: Clock, more: int
) -> None:
    """However much is queued meanwhile: that is not the peer's doing."""
    clock.advance(7)
    socket.queued = 1000
    writer.sending_slow()
    socket.queued += more
    clock.advance(7 + WRITE_SECONDS - 1)
    assert socket.aborts == []
    clock.advance(7 + WRITE_SECONDS)
    assert socket.aborts == [(7 + WRITE_SECONDS, "write timeout")]


def test_peer_that_takes_a_little_gets_as_long_again(
    writer: Link, socket: Socket, clock: Clock
) -> None:
    socket.queued = 1000
    writer.sending_slow()
    for count in range(1, 6):
        socket.queued -= 1
        clock.advance(count * WRITE_SECONDS)
        assert socket.aborts == []
    assert writer.is_slow
    # Each time counts from what was left before: 995 is less than 1000, but no progress any more.
    clock.advance(6 * WRITE_SECONDS - 1)
    assert socket.aborts == []
    clock.advance(6 * WRITE_SECONDS)
    assert socket.aborts == [(6 * WRITE_SECONDS, "write timeout")]


def test_peer_that_has_taken_everything_is_not_watched(
    writer: Link, socket: Socket, clock: Clock
) -> None:
    socket.queued = 1000
    writer.sending_slow()
    clock.advance(WRITE_SECONDS - 1)
    writer.sending_ready()
    assert not writer.is_slow
    clock.advance(10 * WRITE_SECONDS)
    assert socket.aborts == []


def test_what_is_sent_after_the_peer_was_ready_has_its_own_time(
    writer: Link, socket: Socket, clock: Clock
) -> None:
    socket.queued = 1000
    writer.sending_slow()
    clock.advance(WRITE_SECONDS - 2)
    writer.sending_ready()
    socket.queued = 5000
    writer.sending_slow()
    clock.advance(2 * WRITE_SECONDS - 3)
    assert socket.aborts == []
    clock.advance(2 * WRITE_SECONDS - 2)
    assert socket.aborts == [(2 * WRITE_SECONDS - 2, "write timeout")]


def test_being_told_again_that_it_is_slow_gives_no_more_time(
    writer: Link, socket: Socket, clock: Clock
) -> None:
    socket.queued = 1000
    writer.sending_slow()
    clock.advance(WRITE_SECONDS - 1)
    socket.queued = 2000
    writer.sending_slow()
    clock.advance(3 * WRITE_SECONDS)
    assert socket.aborts == [(WRITE_SECONDS, "write timeout")]


def test_being_told_again_that_it_is_slow_forgets_no_progress(
    writer: Link, socket: Socket, clock: Clock
) -> None:
    socket.queued = 1000
    writer.sending_slow()
    clock.advance(WRITE_SECONDS - 1)
    socket.queued = 500
    writer.sending_slow()
    clock.advance(WRITE_SECONDS)
    assert socket.aborts == []  # it has taken half of it


# ---- the ping and its pong ------------------------------------------------------------


def test_silent_peer_is_given_up(link: Link, socket: Socket, clock: Clock) -> None:
    clock.advance(PING_SECONDS - 1)
    assert socket.pings == []
    clock.advance(PING_SECONDS + PONG_SECONDS - 1)
    assert socket.aborts == []
    clock.advance(PING_SECONDS + PONG_SECONDS)
    assert socket.aborts == [(PING_SECONDS + PONG_SECONDS, "pong timeout")]


def test_no_second_ping_while_an_answer_is_outstanding(
    link: Link, socket: Socket, clock: Clock
) -> None:
    clock.advance(PING_SECONDS + PONG_SECONDS - 1)
    assert socket.pings == [PING_SECONDS]


def test_peer_that_answers_is_pinged_again_and_again(
    link: Link, socket: Socket, clock: Clock
) -> None:
    for count in range(1, 11):
        clock.advance(count * PING_SECONDS)
        assert socket.pings == [number * PING_SECONDS for number in range(1, count + 1)]
        link.pong_received()
    clock.advance(11 * PING_SECONDS - 1)
    assert socket.aborts == []


def test_pong_at_the_last_moment_counts_and_the_next_ping_has_its_own_time(
    link: Link, socket: Socket, clock: Clock
) -> None:
    clock.advance(PING_SECONDS + PONG_SECONDS - 1)
    link.pong_received()
    clock.advance(PING_SECONDS + PONG_SECONDS)
    [_, second] = socket.pings
    clock.advance(second + PONG_SECONDS - 1)
    assert socket.aborts == []
    clock.advance(second + PONG_SECONDS)
    assert socket.aborts == [(second + PONG_SECONDS, "pong timeout")]


def test_pong_that_nobody_asked_for_answers_no_later_ping(
    link: Link, socket: Socket, clock: Clock
) -> None:
    link.pong_received()
    clock.advance(PING_SECONDS + PONG_SECONDS)
    assert socket.pings == [PING_SECONDS]
    assert socket.aborts == [(PING_SECONDS + PONG_SECONDS, "pong timeout")]


def test_link_that_is_held_expects_no_pong(link: Link, socket: Socket, clock: Clock) -> None:
    link.is_held = True
    clock.advance(10 * PING_SECONDS)
    assert (socket.pings, socket.aborts) == ([], [])
    link.is_held = False
    clock.advance(11 * PING_SECONDS + PONG_SECONDS)
    assert socket.pings == [11 * PING_SECONDS]
    assert socket.aborts == [(11 * PING_SECONDS + PONG_SECONDS, "pong timeout")]


def test_taking_what_is_sent_is_no_answer_to_a_ping(
    link: Link, socket: Socket, clock: Clock
) -> None:
    socket.queued = 1000
    link.sending_slow()
    clock.advance(WRITE_SECONDS - 1)
    socket.queued = 500
    clock.advance(PING_SECONDS + PONG_SECONDS)
    assert socket.pings == [PING_SECONDS]
    assert socket.aborts == [(PING_SECONDS + PONG_SECONDS, "pong timeout")]


# ---- the end --------------------------------------------------------------------------


def test_lost_socket_has_no_deadlines(link: Link, socket: Socket, clock: Clock) -> None:
    clock.advance(PING_SECONDS)
    link.sending_slow()
    assert len(clock.waiting) == 3  # the next ping, this one's pong, the writing
    link.socket_lost("closed by the peer")
    assert clock.waiting == []
    assert (link.losses, link.ended.result()) == (1, "closed by the peer")


def test_lost_socket_of_a_quiet_link(link: Link, clock: Clock) -> None:
    link.socket_lost("gone")
    assert clock.waiting == []
    assert link.ended.result() == "gone"
