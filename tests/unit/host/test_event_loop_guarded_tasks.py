"""GuardedTasks: an exception of one task reaches neither its siblings nor the group."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable

import pytest

from exec_server.host.event_loop import GuardedTasks, guarded_call


class _Panic(BaseException):
    """Like the panic of a library that is written in Rust."""


def _run(scenario: Callable[[GuardedTasks], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            await scenario(GuardedTasks(group))

    asyncio.run(run())


_UNENCODABLE = UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed")


@pytest.mark.parametrize("error", [_UNENCODABLE, MemoryError(), _Panic(), OSError(5, "x")])
def test_an_exception_ends_its_task_alone(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []

    async def fail() -> None:
        raise error

    async def scenario(tasks: GuardedTasks) -> None:
        goes_on = asyncio.Event()

        async def sibling() -> None:
            await goes_on.wait()
            told.append("sibling")

        other = tasks.create_task(sibling())
        await tasks.create_task(fail(), lambda: told.append("owner"))
        goes_on.set()
        await other

    _run(scenario)
    assert told == ["owner", "sibling"]
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[1] is error


def test_an_owner_that_fails_too(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError

    async def scenario(tasks: GuardedTasks) -> None:
        await tasks.create_task(fail(), [].pop)

    _run(scenario)
    assert len(caplog.records) == 2


def test_cancelled_tasks(caplog: pytest.LogCaptureFixture) -> None:
    steps: list[str] = []

    async def work() -> None:
        steps.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            steps.append("cleaned up")

    async def scenario(tasks: GuardedTasks) -> None:
        never_begun = tasks.create_task(work(), lambda: steps.append("owner"))
        never_begun.cancel()
        begun = tasks.create_task(work(), lambda: steps.append("owner"))
        await asyncio.sleep(0)
        begun.cancel()
        await asyncio.wait([begun, never_begun])
        assert begun.cancelled()
        assert never_begun.cancelled()

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a coroutine that was never awaited
        _run(scenario)
    assert steps == ["begun", "cleaned up"]
    assert not caplog.records


def test_finish_cancels_what_does_not_end(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[str] = []

    async def scenario(tasks: GuardedTasks) -> None:
        async def work() -> None:
            await asyncio.sleep(0)
            ended.append("work")

        async def hang() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("hang")

        await tasks.finish(1)
        tasks.create_task(work())
        await tasks.finish(20)
        tasks.create_task(hang())
        await tasks.finish(0)

    _run(scenario)
    assert ended == ["work", "hang"]
    assert "did not end by itself" in caplog.text


def test_guarded_calls(caplog: pytest.LogCaptureFixture) -> None:
    told: list[int] = []
    assert guarded_call(told.append, 5)
    assert not guarded_call([].pop)
    assert told == [5]
    assert [record.exc_info is not None for record in caplog.records] == [True]

    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        guarded_call(leave)
