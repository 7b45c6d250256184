"""Who reads and who waits."""

from __future__ import annotations

import asyncio
import contextvars

from exec_server.client.parties import (
    MAX_DEPTH,
    Party,
    be_one_party,
    reading_party,
    waiting_parties,
)


def test_tasks_that_a_reader_begins_are_of_its_party() -> None:
    async def begun() -> tuple[Party, ...]:
        return waiting_parties()

    async def reader() -> None:
        before = asyncio.get_running_loop().create_task(begun())
        party = reading_party()
        assert reading_party() is party
        assert party in waiting_parties()
        assert party in await asyncio.get_running_loop().create_task(begun())
        assert party not in await before

    async def scene() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(reader())
            tasks.create_task(reader())
        assert waiting_parties() == ()

    asyncio.run(scene())


def test_a_reader_within_a_reader_is_a_party_of_its_own() -> None:
    async def nest(depth: int, outer: Party | None) -> int:
        party = reading_party()
        assert party is not outer
        assert outer is None or outer in waiting_parties()
        if depth:
            return await asyncio.get_running_loop().create_task(nest(depth - 1, party))
        return len(waiting_parties())

    assert asyncio.run(nest(3, None)) == 4
    assert asyncio.run(nest(3 * MAX_DEPTH, None)) == MAX_DEPTH


def test_a_thread_is_one_party_whatever_its_tasks() -> None:
    async def read() -> Party:
        return reading_party()

    def thread() -> None:
        be_one_party()
        be_one_party()
        assert asyncio.run(read()) is asyncio.run(read()) is waiting_parties()[0]

    contextvars.Context().run(thread)
