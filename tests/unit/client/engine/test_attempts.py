"""Attempts: their delays, their end, and a machine that was suspended meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.support.clock import run_in_virtual_time

from exec_server.client.engine.attempts import MAX_DELAY_SECONDS, Attempts


class Boot:
    """A clock that runs with the loop, and jumps when the machine sleeps."""

    def __init__(self) -> None:
        self.slept = 0.0

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() + self.slept


def play(scene: Callable[[Boot], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        await scene(Boot())

    run_in_virtual_time(run())


def test_delays_grow_with_the_time_of_the_loss() -> None:
    async def scene(boot: Boot) -> None:
        attempts = Attempts(28_800, 3, boot)
        delays = []
        for slept in (0, 10, 60, 1000, 28_796.5, 28_799):
            boot.slept = slept
            delays.append(attempts.delay(0.1))
        assert delays == [0.1, 0.5, 3.0, MAX_DELAY_SECONDS, 0.5, MAX_DELAY_SECONDS]
        assert attempts.remaining == 1
        boot.slept = 0
        assert attempts.delay(30) == 30  # of a dialer that is more patient

    play(scene)


def test_the_end_ends_an_attempt() -> None:
    async def scene(boot: Boot) -> None:
        attempts = Attempts(10, 3, boot)
        async with attempts.limit():
            await asyncio.sleep(9.5)
        with pytest.raises(TimeoutError):
            async with attempts.limit():
                await asyncio.sleep(100)
        assert asyncio.get_running_loop().time() == pytest.approx(10)
        assert attempts.remaining == pytest.approx(0)

    play(scene)


@pytest.mark.parametrize("slept", [3600.0, 30_000.0])
def test_a_machine_that_wakes_up_waits_no_longer(slept: float) -> None:
    async def scene(boot: Boot) -> None:
        attempts = Attempts(28_800, 3, boot)

        async def attempt() -> None:
            async with attempts.limit():
                await asyncio.sleep(20)
                boot.slept = slept
                await asyncio.sleep(100)

        with pytest.raises(TimeoutError):
            await attempt()
        assert asyncio.get_running_loop().time() <= 22
        assert attempts.remaining == pytest.approx(28_800 - 21 - slept, abs=1)

    play(scene)


def test_a_sleep_between_attempts_ends_no_attempt() -> None:
    async def scene(boot: Boot) -> None:
        attempts = Attempts(28_800, 3, boot)
        boot.slept = 3600
        async with attempts.limit():
            await asyncio.sleep(30)

    play(scene)
