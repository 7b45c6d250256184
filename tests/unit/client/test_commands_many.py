"""Several commands at a time: bounded, in order, and ended by the first failure."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest
from tests.support.memory_session import outcome, play, turns

from exec_server.client.commands import Command, ResultStream, RunOptions
from exec_server.client.environment import Environment
from exec_server.client.results import Result
from exec_server.errors import Cancelled


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


def of(runner: Runner, numbers: list[int], **options: Any) -> ResultStream:
    loop = asyncio.get_running_loop()
    return ResultStream(
        lambda index: runner.run(numbers[index]), loop.create_task, len(numbers), **options
    )


def test_results_come_as_they_are_there() -> None:
    async def run() -> None:
        runner, numbers = Runner(failing=9), [1, 2, 9, 3, 4]
        ended = [each async for each in of(runner, numbers, concurrency=3)]
        assert [(each.done, each.total) for each in ended] == [(n + 1, 5) for n in range(5)]
        assert ended[0].index == 2  # 9 is the first one to end
        assert {each.index: each.outcome for each in ended if each.index != 2} == {
            index: result(number) for index, number in enumerate(numbers) if number != 9
        }
        assert isinstance(ended[0].error, KeyError)
        with pytest.raises(KeyError):
            _ = ended[0].result
        assert (ended[1].error, ended[1].result) == (None, ended[1].outcome)
        assert (runner.most, runner.begun, runner.cancelled) == (3, numbers, [])
        assert [each async for each in of(runner, [], concurrency=3)] == []
        with pytest.raises(ValueError, match="concurrency must be at least 1"):
            of(runner, [1], concurrency=0)

    play(run())


def test_a_failure_ends_the_others() -> None:
    async def run() -> None:
        runner = Runner(failing=9)
        async with of(runner, [1, 2, 9, 3, 4, 5], concurrency=3, stops=True) as ended:
            with pytest.raises(KeyError, match="9"):
                _ = (await anext(ended)).result
        assert (runner.begun, sorted(runner.cancelled)) == ([1, 2, 9], [1, 2])

    play(run())


def test_a_slow_reader_holds_up_the_next_commands() -> None:
    async def run() -> None:
        runner = Runner()
        async with of(runner, [9] * 20, concurrency=2) as ended:
            await turns(100)
            assert len(runner.begun) == 4  # two results and two that wait for their place
            await anext(ended)
            await turns(100)
            assert len(runner.begun) == 5

    play(run())


def test_closing_cancels_all() -> None:
    async def run() -> None:
        runner = Runner()
        async with of(runner, [1, 2, 3], concurrency=2) as ended:
            reading = asyncio.get_running_loop().create_task(outcome(anext(ended)))
            while runner.running < 2:
                await asyncio.sleep(0)
            await ended.aclose()
            assert isinstance(await reading, Cancelled)
        assert (runner.begun, runner.cancelled) == ([1, 2], [1, 2])
        closed = await of(runner, [1], concurrency=1)
        await closed.aclose()  # before the command has begun
        assert runner.begun == [1, 2]

    play(run())


def test_a_command_with_options_of_its_own() -> None:
    command = Command(["make", Path("x")], cwd="/tmp", timeout=3)
    assert (command.argv, command.options) == (("make", "x"), {"cwd": "/tmp", "timeout": 3})
    assert repr(command) == "Command(argv=('make', 'x'), options={'cwd': '/tmp', 'timeout': 3})"
    with pytest.raises(AttributeError):
        command.argv = ()  # type: ignore[misc]
    with pytest.raises(TypeError, match="unexpected keyword argument 'cvd'"):
        Command(["make"], cvd="/")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="argv is a list of words"):
        Command("make")


def test_the_options_are_those_of_run() -> None:
    of_run = inspect.signature(Environment.run).parameters.values()
    names = {each.name for each in of_run if each.kind is inspect.Parameter.KEYWORD_ONLY}
    assert names == RunOptions.__annotations__.keys()
