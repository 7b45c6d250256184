"""LazyEvent behaves as asyncio.Event."""

from __future__ import annotations

import asyncio

import pytest

from exec_server.server.context import LazyEvent


@pytest.mark.parametrize("make", [LazyEvent, asyncio.Event])
def test_tasks_wait_until_it_is_set(make: type[LazyEvent | asyncio.Event]) -> None:
    async def scenario() -> None:
        event = make()
        woken: list[str] = []

        async def wait(name: str) -> None:
            await event.wait()
            woken.append(name)

        async def settle() -> None:
            for _ in range(5):
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as tasks:
            assert not event.is_set()
            tasks.create_task(wait("a"))
            tasks.create_task(wait("b"))
            cancelled = tasks.create_task(wait("never"))
            await settle()
            cancelled.cancel()
            await settle()
            assert woken == []
            event.set()
            event.clear()
            await settle()
            assert (woken, event.is_set()) == (["a", "b"], False)
            tasks.create_task(wait("c"))
            await settle()
            event.set()
            event.set()
            await settle()
            assert (woken, event.is_set()) == (["a", "b", "c"], True)
            await wait("d")
            assert woken[-1] == "d"

    asyncio.run(scenario())
