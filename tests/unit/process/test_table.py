"""ProcessTable with fake children: starts, back-pressure, and the end of a session."""

from __future__ import annotations

import asyncio
import os

import msgspec
import pytest
from tests.support.memory_processes import COMMAND, Run, World

from exec_server.errors import InternalError, InvalidRequest
from exec_server.process.command import Command
from exec_server.process.orphans import Owner
from exec_server.process.spawn import Child
from exec_server.process.table import LaunchMode
from exec_server.protocol.process import (
    ClosedParams,
    ExitedParams,
    OutputChunk,
    OutputParams,
    ProcessId,
)

# ---- starting -------------------------------------------------------------------------


def test_an_id_is_reserved_from_the_start_until_it_is_forgotten(run: Run) -> None:
    async def test(world: World) -> None:
        name = ProcessId("p")
        assert world.table.is_empty
        world.table.reserve(name)
        assert world.table.is_starting(name)
        assert not world.table.is_empty
        assert world.table.get(name) is None
        with pytest.raises(InvalidRequest, match="process p already exists"):
            world.table.reserve(name)
        world.table.release(name)
        assert world.table.is_empty
        world.table.reserve(name)
        await world.table.start(name, COMMAND, world.mode(name))
        assert not world.table.is_starting(name)
        with pytest.raises(InvalidRequest, match="process p already exists"):
            world.table.reserve(name)
        await world.finish("p")
        with pytest.raises(InvalidRequest, match="process p already exists"):
            world.table.reserve(name)
        assert not world.table.is_empty  # its output is kept

    run(test)


def test_the_output_is_read_after_the_start_has_returned(run: Run) -> None:
    async def test(world: World) -> None:
        name = ProcessId("p")
        mode = world.mode(name)
        assert mode.spawn is not None

        def spawn(command: Command, owner: Owner) -> Child:
            assert mode.spawn is not None
            child = mode.spawn(command, owner)
            os.write(world.stdout[name], b"early")
            return child

        world.table.reserve(name)
        await world.table.start(name, COMMAND, LaunchMode(spawn))
        assert world.events == []  # a response sent now is the first message
        process = world.table.get(name)
        assert process is not None
        await process.next_event()
        assert world.events == [OutputParams(name, 1, "stdout", b"early")]

    run(test)


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (FileNotFoundError(2, "No such file or directory"), "No such file or directory (os error"),
        (InternalError("nul byte found in provided data"), "nul byte found in provided data"),
        (InvalidRequest("sandbox cwd is not valid"), "sandbox cwd is not valid"),
    ],
    ids=["OSError", "InternalError", "InvalidRequest"],
)
def test_a_failed_start_frees_its_id(run: Run, failure: Exception, text: str) -> None:
    def refuse(command: Command, owner: Owner) -> Child:
        raise failure

    async def test(world: World) -> None:
        world.table.reserve(ProcessId("p"))
        with pytest.raises((InternalError, InvalidRequest)) as failed:
            await world.table.start(ProcessId("p"), COMMAND, LaunchMode(refuse))
        assert failed.value.message.startswith(text)
        assert world.reaper.expected == set()
        await world.start("p")

    run(test)


def test_every_start_gets_an_owner_of_its_own(run: Run) -> None:
    async def test(world: World) -> None:
        for name in ("a", "b", "c"):
            await world.start(name)
        assert len(set(world.owners.values())) == 3
        assert all(owner.session is world.table for owner in world.owners.values())

    run(test)


def test_a_start_outlives_its_connection(run: Run) -> None:
    async def test(world: World) -> None:
        name = ProcessId("p")
        world.table.reserve(name)
        async with asyncio.TaskGroup() as tasks:
            start = tasks.create_task(world.table.start(name, COMMAND, world.mode(name)))
            await asyncio.sleep(0)
            start.cancel()
        assert start.cancelled()
        while world.table.get(name) is None:
            await asyncio.sleep(0.001)
        assert not world.table.is_starting(name)

    run(test)


def test_a_failed_start_without_a_connection_frees_its_id(run: Run) -> None:
    def refuse(command: Command, owner: Owner) -> Child:
        raise FileNotFoundError

    async def test(world: World) -> None:
        name = ProcessId("p")
        world.table.reserve(name)
        async with asyncio.TaskGroup() as tasks:
            start = tasks.create_task(world.table.start(name, COMMAND, LaunchMode(refuse)))
            await asyncio.sleep(0)
            start.cancel()
        while world.table.is_starting(name):
            await asyncio.sleep(0.001)
        assert world.table.get(name) is None

    run(test)


def test_a_start_that_is_terminated_meanwhile_fails(run: Run) -> None:
    async def test(world: World) -> None:
        name = ProcessId("p")
        world.table.reserve(name)
        assert world.table.terminate(name)
        with pytest.raises(InvalidRequest, match="process p start was cancelled"):
            await world.table.start(name, COMMAND, world.mode(name))
        assert world.killed == [world.pids[name]]
        world.reaper.exit(world.pids[name], 137)
        assert world.events == []  # the client never got this process
        os.close(world.stdout.pop(name))
        await world.start("p")

    run(test)


def test_a_terminate_wakes_a_start_that_waits(run: Run) -> None:
    async def test(world: World) -> None:
        name = ProcessId("p")
        assert not world.table.can_cancel(name)
        world.table.reserve(name)
        cancellation = world.table.cancellation(name)
        assert world.table.cancellation(name) is cancellation
        assert world.table.can_cancel(name)
        assert not cancellation.done()
        assert world.table.terminate(name)
        assert cancellation.done()
        assert not world.table.can_cancel(name)
        world.table.release(name)
        assert world.table.is_empty

    run(test)


def test_a_start_that_no_longer_waits_cannot_be_cancelled(run: Run) -> None:
    async def test(world: World) -> None:
        for name in (ProcessId("started"), ProcessId("given up")):
            world.table.reserve(name)
            world.table.cancellation(name)
        await world.table.start(ProcessId("started"), COMMAND, world.mode(ProcessId("started")))
        world.table.release(ProcessId("given up"))
        assert not world.table.can_cancel("started")
        assert not world.table.can_cancel("given up")

    run(test)


def test_the_denial_check_of_a_terminated_start_is_called(run: Run) -> None:
    """It owns a descriptor until then."""

    async def test(world: World) -> None:
        checked: list[int] = []

        def check(code: int, output: list[OutputChunk]) -> tuple[bool, None]:
            checked.append(code)
            return False, None

        name = ProcessId("p")
        world.table.reserve(name)
        world.table.terminate(name)
        mode = msgspec.structs.replace(world.mode(name), check_denial=check)
        with pytest.raises(InvalidRequest, match="start was cancelled"):
            await world.table.start(name, COMMAND, mode)
        world.reaper.exit(world.pids[name], 137)
        assert (checked, world.events) == ([137], [])
        os.close(world.stdout.pop(name))

    run(test)


def test_what_belongs_to_a_process_is_released_when_it_has_closed(run: Run) -> None:
    released: list[str] = []

    def refuse(command: Command, owner: Owner) -> Child:
        raise FileNotFoundError

    async def start(world: World, name: str, mode: LaunchMode) -> None:
        owned = msgspec.structs.replace(mode, on_closed=lambda: released.append(name))
        await world.table.start(ProcessId(name), COMMAND, owned)

    async def test(world: World) -> None:
        for name in ("runs", "fails", "cancelled"):
            world.table.reserve(ProcessId(name))
        await start(world, "runs", world.mode(ProcessId("runs")))
        with pytest.raises(InternalError):
            await start(world, "fails", LaunchMode(refuse))
        world.table.terminate(ProcessId("cancelled"))
        with pytest.raises(InvalidRequest):
            await start(world, "cancelled", world.mode(ProcessId("cancelled")))
        assert released == ["fails", "cancelled"]
        os.close(world.stdout.pop(ProcessId("cancelled")))
        world.reaper.exit(world.pids[ProcessId("cancelled")])
        await world.finish("runs")
        assert released == ["fails", "cancelled", "runs"]

    run(test)


# ---- back-pressure --------------------------------------------------------------------


def test_a_paused_session_reads_no_process(run: Run) -> None:
    async def test(world: World) -> None:
        await world.start("old")
        await world.start("closed")
        await world.finish("closed")
        world.events.clear()
        world.table.pause_reading()
        await world.start("new")
        for name in ("old", "new"):
            os.write(world.stdout[ProcessId(name)], b"x")
        for _ in range(3):
            await asyncio.sleep(0)
        assert world.events == []
        world.table.resume_reading()
        while len(world.events) < 2:
            await asyncio.sleep(0)
        assert {each.process_id for each in world.events if isinstance(each, OutputParams)} == {
            "old",
            "new",
        }

    run(test)


# ---- the end --------------------------------------------------------------------------


def test_terminate_kills_the_leader_and_its_orphans(run: Run) -> None:
    async def test(world: World) -> None:
        assert not world.table.terminate(ProcessId("unknown"))
        for name in ("a", "b"):
            await world.start(name)
        a = ProcessId("a")
        assert world.table.terminate(a)
        assert world.killed == [world.pids[a]]
        while not world.reaper.orphans.killed:
            await asyncio.sleep(0.001)
        assert world.reaper.orphans.killed == [[world.owners[a]]]
        world.reaper.exit(world.pids[a], 137)
        assert not world.table.terminate(a)

    run(test)


def test_terminate_all_kills_every_leader_and_orphan_and_later_ones_too(run: Run) -> None:
    async def test(world: World) -> None:
        first, second = [await world.start(name) for name in ("a", "b")]
        world.table.terminate_all()
        assert world.killed == [first.pid, second.pid]
        while not world.reaper.orphans.killed:
            await asyncio.sleep(0.001)
        assert world.reaper.orphans.killed == [[first.owner, second.owner]]
        late = await world.start("late")
        assert world.killed == [first.pid, second.pid, late.pid]
        assert world.ids() == ["a", "b", "late"]

    run(test)


def test_clean_up_precedes_the_exit(run: Run) -> None:
    async def test(world: World) -> None:
        process = await world.start("p", with_clean_up=True)
        world.reaper.exit(process.pid, 3)
        assert process.has_ended
        assert process.exit_code is None
        while process.exit_code is None:
            await process.next_event()
        assert world.cleaned_up == ["p"]
        assert world.events == [ExitedParams(ProcessId("p"), 1, 3, False, None)]

    run(test)


class _Report:
    """An ExitReport whose other end the test holds: one byte is an exit code."""

    def __init__(self) -> None:
        self.is_at_end = False
        self._reader, self.writer = os.pipe()

    def fileno(self) -> int:
        return self._reader

    def read(self) -> int | None:
        data = os.read(self._reader, 1)
        self.is_at_end = not data
        return data[0] if data else None

    def close(self) -> None:
        os.close(self._reader)


def test_a_reported_exit_is_published_before_the_child_is_reaped(run: Run) -> None:
    async def test(world: World) -> None:
        report = _Report()
        process = await world.start("p", with_clean_up=True, exit_report=report)
        os.write(report.writer, bytes([3]))
        os.close(report.writer)
        while process.exit_code is None:
            await process.next_event()
        assert process.has_ended
        assert world.cleaned_up == ["p"]
        report.close()
        world.reaper.exit(process.pid, 9)
        assert world.events == [ExitedParams(ProcessId("p"), 1, 3, False, None)]

    run(test)


def test_without_a_report_the_reaper_reports_the_exit(run: Run) -> None:
    async def test(world: World) -> None:
        report = _Report()
        process = await world.start("p", exit_report=report)
        os.close(report.writer)
        while not report.is_at_end:
            await asyncio.sleep(0)
        assert not process.has_ended
        world.reaper.exit(process.pid, 9)
        report.close()
        assert world.events == [ExitedParams(ProcessId("p"), 1, 9, False, None)]

    run(test)


def test_a_session_that_never_started_a_process_looks_for_no_orphans(run: Run) -> None:
    async def test(world: World) -> None:
        world.table.reserve(ProcessId("never started"))
        world.table.terminate_all()
        await world.table.end()
        assert world.reaper.orphans.killed == []

    run(test)


def test_the_end_of_a_session_waits_until_all_are_dead(run: Run) -> None:
    async def test(world: World) -> None:
        process = await world.start("p")
        name = ProcessId("late")
        world.table.reserve(name)
        async with asyncio.TaskGroup() as tasks:
            end = tasks.create_task(world.table.end())
            while not world.killed:
                await asyncio.sleep(0)
            assert not end.done()
            world.reaper.exit(process.pid, 137)  # its output is still open, and abandoned
        assert [type(each) for each in world.events] == [ExitedParams, ClosedParams]
        assert world.ids() == []
        assert world.reaper.orphans.killed == [[process.owner]]
        with pytest.raises(InvalidRequest, match="start was cancelled"):
            await world.table.start(name, COMMAND, world.mode(name))

    run(test)
