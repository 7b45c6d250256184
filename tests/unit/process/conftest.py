"""Shared by the tests of the process table."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

import pytest
from tests.support.memory_processes import World

from exec_server.host.threads import ThreadPool
from exec_server.process import descendants


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The leaders that were killed."""
    pids: list[int] = []
    monkeypatch.setattr(descendants, "kill_tree", pids.append)
    return pids


@pytest.fixture
def run(killed: list[int]) -> Callable[[Callable[[World], Awaitable[None]]], None]:
    """Run a test with a World; nothing may stay open."""

    def run(test: Callable[[World], Awaitable[None]]) -> None:
        async def limited() -> None:
            threads = ThreadPool(2, "test")
            world = World(threads, killed)
            before = len(os.listdir("/proc/self/fd"))
            async with asyncio.timeout(10):
                await test(world)
                for descriptor in world.stdout.values():
                    os.close(descriptor)
                for pid in list(world.reaper.callbacks):
                    world.reaper.exit(pid)
                await world.table.end()
            threads.close()
            assert len(os.listdir("/proc/self/fd")) == before
            assert world.reaper.expected == set()

        asyncio.run(limited())

    return run
