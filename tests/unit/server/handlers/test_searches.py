"""fs/grep: the slots that all clients share."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from exec_server.protocol import file_changes as wire
from exec_server.protocol.paths import PathUri
from exec_server.server.context import CONCURRENT_SEARCHES
from exec_server.server.handlers import searches


def test_further_searches_wait() -> None:
    async def scene() -> None:
        running: list[asyncio.Future[wire.GrepResult]] = []

        def in_thread(*_: object) -> asyncio.Future[wire.GrepResult]:
            running.append(asyncio.get_running_loop().create_future())
            return running[-1]

        server = SimpleNamespace(
            variables={},
            sandboxes=SimpleNamespace(files=None),
            search_slots=asyncio.Semaphore(CONCURRENT_SEARCHES),
        )
        context = cast(Any, SimpleNamespace(server=server, in_thread=in_thread))
        params = wire.GrepParams(PathUri.from_wire("/"), "x")
        async with asyncio.TaskGroup() as tasks:
            for _ in range(CONCURRENT_SEARCHES + 1):
                tasks.create_task(searches.grep(context, params))
            while len(running) < CONCURRENT_SEARCHES:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert len(running) == CONCURRENT_SEARCHES
            for each in list(running):
                each.set_result(wire.GrepResult([], False))
            while len(running) == CONCURRENT_SEARCHES:
                await asyncio.sleep(0)
            running[-1].set_result(wire.GrepResult([], False))

    asyncio.run(scene())
