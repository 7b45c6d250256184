"""ProcessTable with fake children: what several sessions keep in one budget of the server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.support.memory_processes import Run, World

from exec_server.process import table
from exec_server.process.output import CHARGE_STEP, FREE_BYTES
from exec_server.process.process import CLOSED_COST, Process
from exec_server.process.retention import RetentionBudget
from exec_server.process.table import ProcessTable
from exec_server.protocol.process import ProcessId

_KIB = 1024
# Closed processes with one small chunk are counted as a little less.
_CLOSED_SIZE = CLOSED_COST + 250


@asynccontextmanager
async def _sessions(world: World, size: int, count: int = 2) -> AsyncIterator[list[ProcessTable]]:
    """Tables with a common budget of this size; they end before the world."""
    world.budget = RetentionBudget(size)
    tables = [world.make_table() for _ in range(count)]
    yield tables
    for pid in list(world.reaper.callbacks):
        world.reaper.exit(pid)
    for descriptor in world.stdout.values():
        os.close(descriptor)
    world.stdout.clear()
    for each in tables:
        await each.end()
    assert world.budget.used == 0


async def _print(world: World, owner: ProcessTable, name: str, size: int) -> Process:
    """Start a process in a table if need be, and have it print."""
    world.table = owner
    process = owner.get(ProcessId(name)) or await world.start(name)
    descriptor = world.stdout[process.id]
    os.set_blocking(descriptor, False)
    target = process.log._total_bytes + size
    while process.log._total_bytes < target:
        missing = target - process.log._total_bytes
        try:
            os.write(descriptor, bytes(min(missing, 8 * _KIB)))
        except BlockingIOError:
            pass
        before = process.log._total_bytes
        while process.log._total_bytes == before:
            await asyncio.sleep(0)
    return process


async def _finish(world: World, owner: ProcessTable, *names: str) -> None:
    for name in names:
        await _print(world, owner, name, 10)
        await world.finish(name)


def _known(owner: ProcessTable) -> list[str]:
    return [each.process_id for each in owner.summaries()[0]]


def test_the_session_with_most_forgets_what_closed_first(run: Run) -> None:
    async def test(world: World) -> None:
        async with _sessions(world, 6 * _CLOSED_SIZE) as (greedy, modest):
            await _finish(world, greedy, "a", "b", "c", "d", "e")
            await _finish(world, modest, "x", "y")
            assert (_known(greedy), _known(modest)) == (["b", "c", "d", "e"], ["x", "y"])
            await _finish(world, greedy, "f")
            assert (_known(greedy), _known(modest)) == (["c", "d", "e", "f"], ["x", "y"])
            assert 6 * CLOSED_COST < world.budget.used <= 6 * _CLOSED_SIZE

    run(test)


def test_what_a_session_forgets_itself_is_free_for_others(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "MAX_CLOSED", 2)

    async def test(world: World) -> None:
        async with _sessions(world, 4 * _CLOSED_SIZE) as (one, other):
            await _finish(world, one, "a", "b", "c", "d")
            await _finish(world, other, "x", "y")
            assert (_known(one), _known(other)) == (["c", "d"], ["x", "y"])
            assert one.forget(ProcessId("c"))
            assert one.forget(ProcessId("d"))
            assert world.budget.used < 2 * _CLOSED_SIZE

    run(test)


def test_output_of_a_session_counts_while_its_client_is_away(run: Run) -> None:
    async def test(world: World) -> None:
        async with _sessions(world, 8 * CHARGE_STEP, 1) as (session,):
            process = await _print(world, session, "a", 200 * _KIB)
            assert world.budget.used == 0
            session.connection_lost()
            assert world.budget.used == process.log.charged_bytes == 3 * CHARGE_STEP
            await _print(world, session, "a", 100 * _KIB)
            assert world.budget.used == 5 * CHARGE_STEP
            session.connection_opened()
            assert world.budget.used == 0
            await _print(world, session, "a", 600 * _KIB)
            assert (world.budget.used, process.log.loss(0)) == (0, None)

    run(test)


def test_a_start_that_ends_after_the_connection_counts(run: Run) -> None:
    async def test(world: World) -> None:
        async with _sessions(world, 2 * CHARGE_STEP, 1) as (session,):
            session.connection_lost()
            process = await _print(world, session, "a", 300 * _KIB)
            assert world.budget.used == 2 * CHARGE_STEP
            first, lost = process.log.loss(0) or (0, None)
            assert first > 1
            assert lost == 300 * _KIB - process.log.retained_bytes

    run(test)


def test_a_process_that_closes_while_its_client_is_away_counts_once(run: Run) -> None:
    async def test(world: World) -> None:
        async with _sessions(world, 8 * CHARGE_STEP, 1) as (session,):
            process = await _print(world, session, "a", 200 * _KIB)
            session.connection_lost()
            await world.finish("a")
            assert world.budget.used == process.memory_bytes()
            assert process.log.loss(0) is None

    run(test)


def test_finished_processes_give_way_before_output_of_running_ones(run: Run) -> None:
    async def test(world: World) -> None:
        async with _sessions(world, 4 * CHARGE_STEP, 1) as (session,):
            await _finish(world, session, "a", "b")
            running = await _print(world, session, "c", 100 * _KIB)
            session.connection_lost()
            assert _known(session) == ["a", "b", "c"]
            await _print(world, session, "c", 150 * _KIB)
            assert (_known(session), running.log.loss(0)) == (["c"], None)
            await _print(world, session, "c", 100 * _KIB)
            assert running.log.loss(0) is not None

    run(test)


def test_running_processes_of_a_modest_session_keep_their_output(run: Run) -> None:
    async def test(world: World) -> None:
        async with _sessions(world, 6 * CHARGE_STEP) as (greedy, modest):
            kept = await _print(world, modest, "x", 150 * _KIB)
            modest.connection_lost()
            greedy.connection_lost()
            flood = await _print(world, greedy, "a", 600 * _KIB)
            assert (kept.log.loss(0), flood.exit_code) == (None, None)
            assert flood.log.loss(0) is not None
            # Neither ends, and the newest output is there.
            assert flood.log.newest()[-1].seq == flood.log.next_seq - 1
            assert flood.log.memory_bytes() <= FREE_BYTES + 4 * CHARGE_STEP

    run(test)


def test_processes_of_a_lost_connection_are_counted_in_turns(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "BURST_SECONDS", 0.0)

    async def test(world: World) -> None:
        async with _sessions(world, 100 * CHARGE_STEP, 1) as (session,):
            for name in ("a", "b", "c"):
                await _print(world, session, name, 60 * _KIB)
            session.connection_lost()
            assert world.budget.used == CHARGE_STEP
            await world.finish("a")  # it is counted as a finished one
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert 2 * CHARGE_STEP < world.budget.used < 4 * CHARGE_STEP
            session.connection_opened()
            session.connection_lost()
            session.connection_opened()
            await asyncio.sleep(0)
            assert world.budget.used < 2 * CHARGE_STEP

    run(test)
