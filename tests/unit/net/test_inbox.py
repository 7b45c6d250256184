"""Delivery of received items to a receiver that pauses, resumes and closes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import pytest
from tests.support.clock import Clock

from exec_server.net.inbox import BURST, BURST_SECONDS, Inbox


class Stream:
    """A source of numbers with an inbox, and a receiver that may act on each number."""

    def __init__(self, burst: int = BURST) -> None:
        self.source: deque[int] = deque()
        self.seen: list[int] = []
        self.reading: list[bool] = []  # each change
        self.react: Callable[[int], None] = lambda item: None
        self.inbox: Inbox[int] = Inbox(self._next, self._receive, self._update, burst=burst)

    def _next(self) -> int | None:
        return self.source.popleft() if self.source else None

    def _receive(self, item: int) -> None:
        self.seen.append(item)
        self.react(item)

    def _update(self) -> None:
        self.reading.append(self.inbox.is_flowing)

    def feed(self, *items: int) -> None:
        self.source += items
        self.inbox.deliver()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
    return clock


@pytest.fixture
def stream(clock: Clock) -> Stream:
    return Stream()


def test_the_end_of_each_burst_is_reported(clock: Clock) -> None:
    source, seen = deque(range(7)), list[object]()

    def next_item() -> int | None:
        return source.popleft() if source else None

    inbox: Inbox[int] = Inbox(
        next_item, seen.append, lambda: None, burst=3, delivered=lambda: seen.append("end")
    )
    inbox.deliver()
    assert seen == [0, 1, 2, "end"]
    clock.run_soon()
    clock.run_soon()
    assert seen == [0, 1, 2, "end", 3, 4, 5, "end", 6, "end"]


def test_items_are_delivered_at_once(stream: Stream) -> None:
    stream.feed(1, 2)
    stream.feed()
    stream.feed(3)
    assert (stream.seen, stream.reading) == ([1, 2, 3], [])


def test_paused_receiver_gets_nothing_and_the_stream_is_not_read(
    stream: Stream, clock: Clock
) -> None:
    stream.inbox.pause()
    assert stream.inbox.is_paused
    stream.inbox.pause()
    stream.feed(1)
    clock.run_soon()
    assert (stream.seen, stream.reading) == ([], [False])


def test_resumed_receiver_gets_buffered_items_after_the_caller_has_returned(
    stream: Stream, clock: Clock
) -> None:
    stream.inbox.pause()
    stream.feed(1, 2)
    stream.inbox.resume()
    stream.inbox.resume()
    assert (stream.seen, stream.reading) == ([], [False])
    stream.feed(3)  # does not overtake the others
    assert stream.seen == []
    clock.run_soon()
    assert (stream.seen, stream.reading) == ([1, 2, 3], [False, True])


def test_receiver_may_pause_while_it_gets_an_item(stream: Stream, clock: Clock) -> None:
    stream.react = lambda item: stream.inbox.pause() if item == 1 else None
    stream.feed(1, 2)
    assert (stream.seen, stream.reading) == ([1], [False])
    stream.inbox.resume()
    clock.run_soon()
    assert (stream.seen, stream.reading) == ([1, 2], [False, True])


def test_stream_is_not_read_before_all_buffered_items_are_delivered(
    stream: Stream, clock: Clock
) -> None:
    stream.inbox.pause()
    stream.feed(1, 2)
    stream.react = lambda item: stream.inbox.pause() if item == 1 else None
    stream.inbox.resume()
    clock.run_soon()
    assert (stream.seen, stream.reading) == ([1], [False])


def test_receiver_may_pause_and_resume_while_it_gets_an_item(stream: Stream, clock: Clock) -> None:
    def react(item: int) -> None:
        stream.inbox.pause()
        stream.inbox.resume()

    stream.react = react
    stream.feed(1, 2)
    clock.run_soon()
    assert stream.seen == [1, 2]
    assert stream.inbox.is_flowing


def test_pause_before_the_resumed_delivery_begins(stream: Stream, clock: Clock) -> None:
    stream.inbox.pause()
    stream.feed(1)
    stream.inbox.resume()
    stream.inbox.pause()
    clock.run_soon()
    assert (stream.seen, stream.reading) == ([], [False])


def test_others_run_between_two_bursts(clock: Clock) -> None:
    stream = Stream(burst=2)
    between: list[int] = []
    clock.call_soon(lambda: between.append(len(stream.seen)))
    stream.feed(1, 2, 3, 4, 5)
    assert (stream.seen, stream.reading) == ([1, 2], [False])
    clock.call_soon(lambda: between.append(len(stream.seen)))
    clock.run_soon()
    assert between == [2, 4]
    assert (stream.seen, stream.reading) == ([1, 2, 3, 4, 5], [False, True])


def test_items_that_take_long_end_a_burst(
    stream: Stream, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = BURST_SECONDS * 0.6
    monkeypatch.setattr(clock, "time", lambda: each * len(stream.seen))
    between: list[int] = []
    stream.feed(1, 2, 3, 4, 5)
    clock.call_soon(lambda: between.append(len(stream.seen)))
    assert stream.seen == [1, 2]
    clock.run_soon()
    assert (between, stream.seen) == ([4], [1, 2, 3, 4, 5])
    assert stream.inbox.is_flowing


def test_closed_inbox_delivers_nothing(stream: Stream, clock: Clock) -> None:
    stream.inbox.pause()
    stream.feed(1)
    stream.inbox.resume()
    stream.inbox.close()
    stream.inbox.resume()
    stream.inbox.pause()
    clock.run_soon()
    stream.feed(2)
    assert stream.seen == []
    assert not stream.inbox.is_paused


def test_receiver_may_close_while_it_gets_an_item(stream: Stream, clock: Clock) -> None:
    stream.react = lambda item: stream.inbox.close()
    stream.feed(1, 2)
    clock.run_soon()
    assert (stream.seen, stream.reading) == ([1], [False])


def test_source_may_close_the_inbox(clock: Clock) -> None:
    """As a decoder does that meets a violation of the protocol."""

    def next_item() -> None:
        inbox.close()

    seen: list[int] = []
    inbox: Inbox[int] = Inbox(next_item, seen.append, lambda: None)
    inbox.deliver()
    assert (seen, inbox.is_flowing) == ([], False)
