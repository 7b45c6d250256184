"""Several commands at a time: bounded, in order, and ended by the first failure."""

from __future__ import annotations

import asyncio
import inspect

import pytest
from tests.support.memory_session import play

from exec_server.client.commands import RunOptions, run_many
from exec_server.client.environment import Environment
from exec_server.client.results import Result, RunProgress


def result(number: int) -> Result:
    return Result((str(number),), b"", b"", 0, 0.1)


class Runner:
    """Runs numbers; the larger ones end first."""

    def __init__(self, failing: int = -1) -> None:
        self.running = self.most = 0
        self.begun: list[int] = []
        self.cancelled: list[int] = []
        self._failing = failing

    async def run(self, number: int) -> Result:
        self.begun.append(number)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for _ in range(10 - number % 10):
                await asyncio.sleep(0)
            if number == self._failing:
                raise KeyError(number)
            return result(number)
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        finally:
            self.running -= 1


def test_results_are_in_order() -> None:
    async def run() -> None:
        runner = Runner()
        told: list[RunProgress] = []
        numbers = list(range(20))
        results = await run_many(runner.run, numbers, concurrency=3, progress=told.append)
        assert results == [result(number) for number in numbers]
        assert (runner.most, runner.begun) == (3, numbers)
        assert [(each.done, each.total) for each in told] == [(n + 1, 20) for n in numbers]
        assert {each.index: each.result for each in told} == dict(enumerate(results))
        assert await run_many(runner.run, [], concurrency=3, progress=None) == []
        with pytest.raises(ValueError, match="concurrency must be at least 1"):
            await run_many(runner.run, [1], concurrency=0, progress=None)

    play(run())


def test_a_failure_ends_the_others() -> None:
    async def run() -> None:
        runner = Runner(failing=9)
        with pytest.raises(KeyError, match="9"):
            await run_many(runner.run, [1, 2, 9, 3, 4, 5], concurrency=3, progress=None)
        assert (runner.begun, sorted(runner.cancelled)) == ([1, 2, 9], [1, 2])

        def fail(progress: RunProgress) -> None:
            raise LookupError("mine")

        with pytest.raises(LookupError, match="mine"):
            await run_many(Runner().run, [1, 2], concurrency=1, progress=fail)

    play(run())


def test_cancelling_cancels_all() -> None:
    async def run() -> None:
        runner = Runner()
        work = run_many(runner.run, [1, 2, 3], concurrency=2, progress=None)
        running = asyncio.get_running_loop().create_task(work)
        while runner.running < 2:
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()
        assert (runner.begun, runner.cancelled) == ([1, 2], [1, 2])

    play(run())


def test_an_error_that_is_no_exception_is_raised_as_it_is() -> None:
    async def leave(number: int) -> Result:
        raise GeneratorExit

    async def run() -> None:
        with pytest.raises(BaseExceptionGroup):
            await run_many(leave, [1], concurrency=1, progress=None)

    play(run())


def test_the_options_are_those_of_run() -> None:
    of_run = inspect.signature(Environment.run).parameters.values()
    names = {each.name for each in of_run if each.kind is inspect.Parameter.KEYWORD_ONLY}
    assert names == RunOptions.__annotations__.keys()
