"""ProcessTable with fake children: limits, retention, and the space of recent output."""

from __future__ import annotations

import asyncio
import gc
import os
import tracemalloc
from collections.abc import Iterable
from contextlib import suppress
from typing import cast

import msgspec
import pytest
from tests.support.clock import Clock
from tests.support.memory_processes import COMMAND, Run, World

from exec_server.errors import InternalError, InvalidRequest
from exec_server.process import output, table
from exec_server.process.command import Command
from exec_server.process.orphans import Owner
from exec_server.process.process import CLOSED_COST, Process
from exec_server.process.spawn import Child
from exec_server.process.table import (
    CLOSED_BYTES,
    MAX_CLOSED,
    RETENTION_SECONDS,
    LaunchMode,
    ProcessTable,
)
from exec_server.protocol.process import ProcessId

# ---- limits ---------------------------------------------------------------------------


def test_live_processes_are_limited(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MAX_LIVE", 2)

    async def test(world: World) -> None:
        await world.start("a")
        world.table.reserve(ProcessId("b"))  # a start under way counts
        with pytest.raises(InvalidRequest, match="at most 2 processes may run per session"):
            world.table.reserve(ProcessId("c"))
        await world.finish("a")
        await world.start("c")
        with suppress(InvalidRequest):
            world.table.terminate(ProcessId("b"))
            await world.table.start(ProcessId("b"), COMMAND, world.mode(ProcessId("b")))

    run(test)


def test_closed_processes_are_forgotten_after_their_retention(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "RETENTION_SECONDS", 0.01)

    async def test(world: World) -> None:
        await world.start("a")
        await world.start("b")
        await world.finish("a")
        while world.table.get(ProcessId("a")) is not None:
            await asyncio.sleep(0.001)
        assert world.ids() == ["b"]
        world.table.reserve(ProcessId("a"))  # free again
        world.table._starting.clear()

    run(test)


def test_one_timer_forgets_all_closed_processes(run: Run) -> None:
    async def test(world: World) -> None:
        clock = Clock()
        world.table._loop = cast(asyncio.AbstractEventLoop, clock)
        for name in ("a", "b", "c"):
            await world.start(name)
        await world.finish("b")
        clock.advance(10)
        await world.finish("a")
        assert [timer.when for timer in clock.waiting] == [80]
        clock.advance(80)
        assert world.ids() == ["a", "c"]
        assert [timer.when for timer in clock.waiting] == [90]
        clock.advance(90)
        assert (world.ids(), clock.waiting) == (["c"], [])

    run(test)


def test_closed_processes_are_kept_while_the_client_is_away(run: Run) -> None:
    async def test(world: World) -> None:
        clock = Clock()
        world.table._loop = cast(asyncio.AbstractEventLoop, clock)
        for name in ("a", "b", "c"):
            await world.start(name)
        await world.finish("a")
        world.table.connection_lost(keeps_closed=True)
        clock.advance(50)
        await world.finish("b")
        clock.advance(30_000)
        assert (world.ids(), clock.waiting) == (["a", "b", "c"], [])
        world.table.connection_opened()
        clock.advance(30_079)
        assert world.ids() == ["a", "b", "c"]
        clock.advance(30_080)
        assert (world.ids(), clock.waiting) == (["c"], [])
        world.table.connection_lost(keeps_closed=True)
        world.table.connection_opened()  # there is nothing to forget
        assert clock.waiting == []

    run(test)


# At 100 starts a second this many have closed within RETENTION_SECONDS.
_CLOSED = 8000
# A text with one such character has 4 bytes for each of its characters.
_EMOJI = "\U0001f600"


async def _finish_many(world: World, names: Iterable[str], *words: str) -> None:
    """Start and finish commands that print a line; the test keeps nothing of them."""
    for name in names:
        # Copies, as each request has its own words.
        command = Command(["cmd", *(word + str(len(word)) for word in words)], "/", {})
        process = await world.start(name, command=command)
        msgspec.json.encode(process.summary())  # the encoded form of an id stays in memory
        os.write(world.stdout[process.id], b"one line of output\n")
        await world.finish(name)
        del world.pids[process.id], world.owners[process.id]
        world.reaper.orphans.owners.clear()
        world.events.clear()


def test_all_quick_commands_of_the_retention_are_kept(run: Run) -> None:
    async def test(world: World) -> None:
        names = [f"{number:05}-0123456789abcdef" for number in range(_CLOSED)]
        await _finish_many(world, names)
        assert [name for name in names if world.table.get(ProcessId(name)) is None] == []
        first = world.table.get(ProcessId(names[0]))
        assert first is not None
        assert [chunk.chunk for chunk in first.read(0, None).chunks] == [b"one line of output\n"]
        assert world.table._closed_bytes < CLOSED_BYTES // 2

    assert 100 * RETENTION_SECONDS <= _CLOSED <= MAX_CLOSED
    run(test)


@pytest.mark.parametrize(
    ("suffix", "words"),
    [
        ("0123456789abcdef", []),
        (_EMOJI + 4085 * "a", []),
        ("a", ["Ā"] * 511),
        ("a", [_EMOJI + 1000 * "a"]),
    ],
    ids=["usual", "wide id", "many words", "wide word"],
)
def test_a_closed_process_costs_no_more_than_is_counted_and_no_descriptor(
    run: Run, suffix: str, words: list[str]
) -> None:
    async def test(world: World) -> None:
        await _finish_many(world, (f"warm-up-{number}" for number in range(10)))
        gc.collect()
        descriptors = os.listdir("/proc/self/fd")
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            await _finish_many(world, (f"{number}-{suffix}" for number in range(200)), *words)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert grown < sum(list(world.table._closed_sizes.values())[10:])
        assert os.listdir("/proc/self/fd") == descriptors

    run(test)


def test_the_process_that_closed_first_is_forgotten_first(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "MAX_CLOSED", 2)

    async def test(world: World) -> None:
        for name in ("a", "b", "c", "d"):
            await world.start(name)
        for name in ("c", "a", "d"):
            await world.finish(name)
        assert world.ids() == ["a", "b", "d"]

    run(test)


def test_the_output_of_closed_processes_is_limited(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "CLOSED_BYTES", 5 * CLOSED_COST // 2)

    async def test(world: World) -> None:
        for name in ("a", "b", "c"):
            await world.start(name)
            os.write(world.stdout[ProcessId(name)], bytes(100))
            await world.finish(name)
        assert world.ids() == ["b", "c"]
        sizes = [process.memory_bytes() for process in world.table._closed]
        assert world.table._closed_bytes == sum(sizes)

    run(test)


def test_a_list_leaves_out_the_processes_that_closed_first(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "MAX_LISTED", 2)

    async def test(world: World) -> None:
        for name in ("a", "b", "c"):
            await world.start(name)
        assert (world.ids(), world.table.summaries()[1]) == (["a", "b", "c"], False)
        await world.finish("b")
        assert (world.ids(), world.table.summaries()[1]) == (["a", "c"], True)

    run(test)


# ---- tables of other owners -----------------------------------------------------------


class Observer:
    """Records the events of a table."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def started(self, process: Process) -> None:
        self.seen.append(f"started {process.id}")

    def start_failed(self, process_id: ProcessId) -> None:
        self.seen.append(f"failed {process_id}")

    def forgotten(self, process: Process) -> None:
        self.seen.append(f"forgotten {process.id}")


def test_an_observer_learns_of_starts_failures_and_of_forgotten_processes(run: Run) -> None:
    async def test(world: World) -> None:
        observer = world.table._observer = Observer()
        await world.start("a")
        missing = ProcessId("missing")

        def fail(command: Command, owner: Owner) -> Child:
            raise OSError(2, "nothing there")

        world.table.reserve(missing)
        with pytest.raises(InternalError):
            await world.table.start(missing, COMMAND, LaunchMode(fail))
        cancelled = ProcessId("cancelled")
        world.table.reserve(cancelled)
        world.table.terminate(cancelled)
        with pytest.raises(InvalidRequest):
            await world.table.start(cancelled, COMMAND, world.mode(cancelled))
        assert not world.table.forget(ProcessId("a"))  # it has not closed
        assert not world.table.forget(ProcessId("unknown"))
        await world.finish("a")
        assert world.table.forget(ProcessId("a"))
        assert observer.seen == ["started a", "failed missing", "failed cancelled", "forgotten a"]

    run(test)


def test_a_table_may_have_other_limits(run: Run) -> None:
    async def test(world: World) -> None:
        world.table._limits = table.TableLimits(2, 1, 65_536, 1000.0)
        await world.start("a")
        await world.start("b")
        with pytest.raises(InvalidRequest, match="at most 2 processes"):
            world.table.reserve(ProcessId("c"))
        await world.finish("a")
        await world.finish("b")
        assert (world.ids(), world.table.live_count) == (["b"], 0)

    run(test)


# ---- recent output ---------------------------------------------------------------------

_MIB = 1_048_576


async def _print(world: World, process: Process, size: int) -> None:
    """Write output of the child and wait until it is read."""
    descriptor = world.stdout[process.id]
    os.set_blocking(descriptor, False)
    target = process.log._total_bytes + size  # some of it may be dropped already
    left = size
    while process.log._total_bytes < target:
        try:
            left -= os.write(descriptor, bytes(min(left, 65_536)))
        except BlockingIOError:
            pass
        await asyncio.sleep(0)


def test_recent_output_is_dropped_after_its_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "RECENT_SECONDS", 0.01)

    async def test(world: World) -> None:
        process = await world.start("a")
        process.read(0, None)
        await _print(world, process, 3 * _MIB)
        await world.finish("a")
        while process.log.reserved_bytes:
            await asyncio.sleep(0)
        assert process.log.retained_bytes == _MIB

    run(test)


def test_recent_output_of_a_client_that_does_not_read_is_dropped_soon(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "UNREAD_SECONDS", 0.01)

    async def test(world: World) -> None:
        process = await world.start("a")
        await _print(world, process, 2 * _MIB)
        while process.log.reserved_bytes:
            await asyncio.sleep(0)
        assert process.log.retained_bytes == _MIB

    run(test)


def test_forgotten_process_gives_the_space_of_its_recent_output_back(run: Run) -> None:
    async def test(world: World) -> None:
        process = await world.start("a")
        await _print(world, process, 2 * _MIB)
        await world.finish("a")
        assert process.log.reserved_bytes == _MIB
        assert world.table.forget(process.id)
        assert process.log.reserved_bytes == 0

    run(test)


def test_no_recent_output_is_kept_for_a_client_that_is_away(run: Run) -> None:
    async def test(world: World) -> None:
        process = await world.start("a")
        world.table.connection_lost()
        await _print(world, process, 2 * _MIB)
        assert process.log.reserved_bytes == 0
        world.table.connection_opened()
        await _print(world, process, _MIB)
        assert process.log.reserved_bytes > 0

    run(test)


def test_end_of_a_session_gives_the_space_of_recent_output_back(run: Run) -> None:
    processes = []

    async def test(world: World) -> None:
        processes.append(await world.start("a"))
        await _print(world, processes[0], 2 * _MIB)

    run(test)
    assert processes[0].log.reserved_bytes == 0


def test_detached_processes_keep_no_recent_output(run: Run) -> None:
    async def test(world: World) -> None:
        session = world.table
        world.table = ProcessTable(
            world._emit,
            session._reaper,
            session._spawn_threads,
            session._cleanup_threads,
            limits=table.TableLimits(4, 4, _MIB, 1.0),
        )
        world.table.connection_opened()
        process = await world.start("a")
        await _print(world, process, _MIB)
        os.write(world.stdout[process.id], b"x")
        while process.log.retained_bytes == _MIB:
            await asyncio.sleep(0)
        assert process.log.retained_bytes < _MIB

    run(test)
