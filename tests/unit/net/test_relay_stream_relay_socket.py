"""The deadlines of a relay's socket: a peer that takes nothing, and one that answers no ping."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from tests.support.clock import Clock

from exec_server.net.relay_stream import PING_SECONDS, PONG_SECONDS, WRITE_SECONDS, RelaySocket
from exec_server.net.websocket.client import ClientSocket


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
    """Counts how often its streams are lost."""

    def __init__(self, socket: ClientSocket) -> None:
        super().__init__(socket)
        self.losses = 0

    def message_received(self, message: bytes, *, is_text: bool) -> None: ...

    def end_stream(self, stream_id: str) -> None: ...

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
    link.is_paused = True
    return link


@pytest.mark.parametrize("more", [0, 1, 1_000_000])
def test_peer_that_takes_nothing_is_given_up(
    writer: Link, socket: Socket, clock: Clock, more: int
) -> None:
    """However much is queued meanwhile: that is not the peer's doing."""
    clock.advance(7)
    socket.queued = 1000
    writer.pause_writing()
    socket.queued += more
    clock.advance(7 + WRITE_SECONDS - 1)
    assert socket.aborts == []
    clock.advance(7 + WRITE_SECONDS)
    assert socket.aborts == [(7 + WRITE_SECONDS, "write timeout")]


def test_peer_that_takes_a_little_gets_as_long_again(
    writer: Link, socket: Socket, clock: Clock
) -> None:
    socket.queued = 1000
    writer.pause_writing()
    for count in range(1, 6):
        socket.queued -= 1
        clock.advance(count * WRITE_SECONDS)
        assert socket.aborts == []
    assert writer.is_full
    # Each time counts from what was left before: 995 is less than 1000, but no progress any more.
    clock.advance(6 * WRITE_SECONDS - 1)
    assert socket.aborts == []
    clock.advance(6 * WRITE_SECONDS)
    assert socket.aborts == [(6 * WRITE_SECONDS, "write timeout")]


def test_peer_that_has_taken_everything_is_not_watched(
    writer: Link, socket: Socket, clock: Clock
) -> None:
    socket.queued = 1000
    writer.pause_writing()
    clock.advance(WRITE_SECONDS - 1)
    writer.resume_writing()
    assert not writer.is_full
    clock.advance(10 * WRITE_SECONDS)
    assert socket.aborts == []


def test_what_is_sent_after_the_peer_was_ready_has_its_own_time(
    writer: Link, socket: Socket, clock: Clock
) -> None:
    socket.queued = 1000
    writer.pause_writing()
    clock.advance(WRITE_SECONDS - 2)
    writer.resume_writing()
    socket.queued = 5000
    writer.pause_writing()
    clock.advance(2 * WRITE_SECONDS - 3)
    assert socket.aborts == []
    clock.advance(2 * WRITE_SECONDS - 2)
    assert socket.aborts == [(2 * WRITE_SECONDS - 2, "write timeout")]


def test_being_told_again_that_it_is_full_gives_no_more_time(
    writer: Link, socket: Socket, clock: Clock
) -> None:
    socket.queued = 1000
    writer.pause_writing()
    clock.advance(WRITE_SECONDS - 1)
    socket.queued = 2000
    writer.pause_writing()
    clock.advance(3 * WRITE_SECONDS)
    assert socket.aborts == [(WRITE_SECONDS, "write timeout")]


def test_being_told_again_that_it_is_full_forgets_no_progress(
    writer: Link, socket: Socket, clock: Clock
) -> None:
    socket.queued = 1000
    writer.pause_writing()
    clock.advance(WRITE_SECONDS - 1)
    socket.queued = 500
    writer.pause_writing()
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


def test_link_that_is_paused_expects_no_pong(link: Link, socket: Socket, clock: Clock) -> None:
    link.is_paused = True
    clock.advance(10 * PING_SECONDS)
    assert (socket.pings, socket.aborts) == ([], [])
    link.is_paused = False
    clock.advance(11 * PING_SECONDS + PONG_SECONDS)
    assert socket.pings == [11 * PING_SECONDS]
    assert socket.aborts == [(11 * PING_SECONDS + PONG_SECONDS, "pong timeout")]


def test_taking_what_is_sent_is_no_answer_to_a_ping(
    link: Link, socket: Socket, clock: Clock
) -> None:
    socket.queued = 1000
    link.pause_writing()
    clock.advance(WRITE_SECONDS - 1)
    socket.queued = 500
    clock.advance(PING_SECONDS + PONG_SECONDS)
    assert socket.pings == [PING_SECONDS]
    assert socket.aborts == [(PING_SECONDS + PONG_SECONDS, "pong timeout")]


# ---- the end --------------------------------------------------------------------------


def test_lost_socket_has_no_deadlines(link: Link, socket: Socket, clock: Clock) -> None:
    clock.advance(PING_SECONDS)
    link.pause_writing()
    assert len(clock.waiting) == 2  # the ping or its pong, the writing
    link.socket_lost("closed by the peer")
    assert clock.waiting == []
    assert (link.losses, link.ended.result()) == (1, "closed by the peer")


def test_lost_socket_of_a_quiet_link(link: Link, clock: Clock) -> None:
    link.socket_lost("gone")
    assert clock.waiting == []
    assert link.ended.result() == "gone"
