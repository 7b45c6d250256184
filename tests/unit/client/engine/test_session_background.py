"""Work in the background: its result, its error, its cancellation, and work that is refused."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.memory_session import play

from exec_server.client.engine import session


async def _answer() -> int:
    await asyncio.sleep(0)
    return 7


async def _fail() -> None:
    raise ValueError("no")


def test_the_future_has_the_result_or_the_error() -> None:
    async def scene() -> None:
        async with asyncio.TaskGroup() as tasks:
            assert await session.start_background(tasks, _answer()) == 7
            with pytest.raises(ValueError, match="no"):
                await session.start_background(tasks, _fail())

    play(scene())


def test_cancelling_the_future_ends_the_work() -> None:
    async def scene() -> None:
        ended = asyncio.Event()

        async def wait() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        async with asyncio.TaskGroup() as tasks:
            future = session.start_background(tasks, wait())
            await asyncio.sleep(0)
            future.cancel()
            await ended.wait()

    play(scene())


def test_a_result_after_the_end_is_discarded() -> None:
    async def scene() -> None:
        go_on = asyncio.Event()

        async def ignore_cancellation(error: Exception | None) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await go_on.wait()
            if error is not None:
                raise error

        async with asyncio.TaskGroup() as tasks:
            futures = [
                session.start_background(tasks, ignore_cancellation(e)) for e in (None, OSError())
            ]
            await asyncio.sleep(0)
            for future in futures:
                future.cancel()
            await asyncio.sleep(0)
            go_on.set()
        assert all(future.cancelled() for future in futures)

    play(scene())


def test_refused_work_is_not_begun() -> None:
    async def scene() -> None:
        with pytest.raises(ValueError, match="closed"):
            await session.refuse_background(_answer(), ValueError("closed"))

    play(scene())
