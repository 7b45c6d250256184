"""The loop polls while polling pays, and sleeps otherwise."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

import pytest

from exec_server.net.websocket.server import POLL_SECONDS, RETRY_ANSWERS, VAIN_POLLS, BusyPoll


class World:
    """An event loop, its time, and answers to a client."""

    def __init__(self) -> None:
        self.now = 100.0
        self._due: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._due.append(callback)

    def open(self) -> None:
        self._poll = BusyPoll()

    def answer(self) -> bool:
        """Answer a request; returns whether the loop polls afterwards."""
        self._poll.extend()
        return bool(self._due)

    def wait(self, seconds: float) -> bool:
        """Let the loop poll for a while; returns whether it goes on."""
        self.now += seconds
        due, self._due = self._due, []
        for callback in due:
            callback()
        return bool(self._due)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: world)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(time, "monotonic", lambda: world.now)
    world.open()
    return world


def _give_up(world: World) -> None:
    for _ in range(VAIN_POLLS):
        assert world.answer()
        assert not world.wait(2 * POLL_SECONDS)
    assert not world.answer()


def test_the_loop_polls_for_a_moment_after_each_answer(world: World) -> None:
    assert world.answer()
    assert world.wait(POLL_SECONDS / 2)
    assert world.answer()
    assert world.wait(POLL_SECONDS * 0.9)
    assert not world.wait(POLL_SECONDS)


def test_requests_that_come_in_time_keep_it_polling(world: World) -> None:
    for _ in range(10 * VAIN_POLLS):
        assert world.answer()
        assert world.wait(POLL_SECONDS / 2)


def test_one_request_in_time_makes_up_for_vain_polls(world: World) -> None:
    for _ in range(5):
        for _ in range(VAIN_POLLS - 2):
            assert world.answer()
            assert not world.wait(2 * POLL_SECONDS)
        assert world.answer()
        assert world.wait(POLL_SECONDS / 2)
        assert world.answer()
        assert not world.wait(2 * POLL_SECONDS)


def test_vain_polls_are_given_up_and_rarely_tried_again(world: World) -> None:
    _give_up(world)
    polls = [world.answer() and not world.wait(2 * POLL_SECONDS) for _ in range(10 * RETRY_ANSWERS)]
    assert sum(polls) == 10


def test_a_try_that_succeeds_resumes_polling(world: World) -> None:
    _give_up(world)
    while not world.answer():
        pass
    assert world.answer()
    assert not world.wait(2 * POLL_SECONDS)
    assert world.answer()


def test_one_processor_is_never_kept_busy(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    world.open()
    assert not any(world.answer() for _ in range(2 * RETRY_ANSWERS))
