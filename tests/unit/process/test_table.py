"""ProcessTable with fake children: starts, limits, retention, and the end of a session."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import cast

import msgspec
import pytest

from exec_server.errors import InternalError, InvalidRequest
from exec_server.host.threads import ThreadPool
from exec_server.process import descendants, table
from exec_server.process.command import Command
from exec_server.process.orphans import Owner
from exec_server.process.process import Process
from exec_server.process.reaper import Reaper
from exec_server.process.spawn import Child
from exec_server.process.table import LaunchMode, ProcessTable
from exec_server.protocol.method import Notice
from exec_server.protocol.process import Chunk, ClosedParams, ExitedParams, OutputParams, ProcessId

_COMMAND = Command(["cmd"], "/", {})
_FIRST_PID = 2**22 + 1  # above the largest pid of Linux


class FakeOrphans:
    """Records whose orphans are to be killed, among the owners that were expected."""

    def __init__(self) -> None:
        self.owners: list[Owner] = []
        self.killed: list[list[Owner]] = []

    def kill(self, has_ended: Callable[[Owner], bool]) -> None:
        self.killed.append([owner for owner in self.owners if has_ended(owner)])


class FakeReaper:
    """A Reaper that reports the exits which the test asks for."""

    def __init__(self) -> None:
        self.orphans = FakeOrphans()
        self.expected: set[Owner] = set()
        self.callbacks: dict[int, Callable[[int], None]] = {}

    def expect(self, owner: Owner) -> None:
        self.expected.add(owner)
        self.orphans.owners.append(owner)

    def unexpect(self, owner: Owner) -> None:
        self.expected.remove(owner)

    def watch(self, pid: int, owner: Owner, callback: Callable[[int], None]) -> None:
        self.callbacks[pid] = callback
        self.expected.remove(owner)

    def exit(self, pid: int, code: int = 0) -> None:
        self.callbacks.pop(pid)(code)


class World:
    """A table whose children are pipes: the test holds the child's ends."""

    def __init__(self, threads: ThreadPool, killed: list[int]) -> None:
        self.events: list[msgspec.Struct] = []
        self.reaper = FakeReaper()
        self.stdout: dict[ProcessId, int] = {}
        self.pids: dict[ProcessId, int] = {}
        self.owners: dict[ProcessId, Owner] = {}
        self.killed = killed
        self.cleaned_up: list[ProcessId] = []
        reaper = cast(Reaper, self.reaper)
        self.table = ProcessTable(self._emit, reaper, threads, threads)

    def _emit(self, notice: Notice[msgspec.Struct], params: msgspec.Struct) -> None:
        self.events.append(params)

    def mode(self, name: ProcessId, *, with_clean_up: bool = False) -> LaunchMode:
        def spawn(command: Command, owner: Owner) -> Child:
            reader, self.stdout[name] = os.pipe()
            os.set_blocking(reader, False)
            pid = self.pids[name] = _FIRST_PID + len(self.pids)
            self.owners[name] = owner
            clean_up = (lambda: self.cleaned_up.append(name)) if with_clean_up else None
            return Child(pid, None, (("stdout", reader),), clean_up)

        return LaunchMode(spawn)

    async def start(self, text: str, *, with_clean_up: bool = False) -> Process:
        name = ProcessId(text)
        self.table.reserve(name)
        await self.table.start(name, _COMMAND, self.mode(name, with_clean_up=with_clean_up))
        process = self.table.get(name)
        assert process is not None
        return process

    async def finish(self, text: str) -> None:
        """End the output and the child, and wait for the close."""
        name = ProcessId(text)
        process = self.table.get(name)
        assert process is not None
        os.close(self.stdout.pop(name))
        self.reaper.exit(self.pids[name])
        while not process.closed:
            await process.next_event()

    def ids(self) -> list[str]:
        return [each.process_id for each in self.table.summaries()[0]]


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


Run = Callable[[Callable[[World], Awaitable[None]]], None]


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
        await world.table.start(name, _COMMAND, world.mode(name))
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
        await world.table.start(name, _COMMAND, LaunchMode(spawn))
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
            await world.table.start(ProcessId("p"), _COMMAND, LaunchMode(refuse))
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
            start = tasks.create_task(world.table.start(name, _COMMAND, world.mode(name)))
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
            start = tasks.create_task(world.table.start(name, _COMMAND, LaunchMode(refuse)))
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
            await world.table.start(name, _COMMAND, world.mode(name))
        assert world.killed == [world.pids[name]]
        world.reaper.exit(world.pids[name], 137)
        assert world.events == []  # the client never got this process
        os.close(world.stdout.pop(name))
        await world.start("p")

    run(test)


def test_the_denial_check_of_a_terminated_start_is_called(run: Run) -> None:
    """It owns a descriptor until then."""

    async def test(world: World) -> None:
        checked: list[int] = []

        def check(code: int, output: list[Chunk]) -> tuple[bool, None]:
            checked.append(code)
            return False, None

        name = ProcessId("p")
        world.table.reserve(name)
        world.table.terminate(name)
        mode = dataclasses.replace(world.mode(name), check_denial=check)
        with pytest.raises(InvalidRequest, match="start was cancelled"):
            await world.table.start(name, _COMMAND, mode)
        world.reaper.exit(world.pids[name], 137)
        assert (checked, world.events) == ([137], [])
        os.close(world.stdout.pop(name))

    run(test)


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
            await world.table.start(ProcessId("b"), _COMMAND, world.mode(ProcessId("b")))

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
    monkeypatch.setattr(table, "CLOSED_BYTES", 250)

    async def test(world: World) -> None:
        for name in ("a", "b", "c"):
            await world.start(name)
            os.write(world.stdout[ProcessId(name)], bytes(100))
            await world.finish(name)
        assert world.ids() == ["b", "c"]
        assert world.table._closed_bytes == 200

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


def test_clean_up_precedes_the_exit(run: Run) -> None:
    async def test(world: World) -> None:
        process = await world.start("p", with_clean_up=True)
        world.reaper.exit(process.pid, 3)
        assert process.is_reaped
        assert process.exit_code is None
        while process.exit_code is None:
            await process.next_event()
        assert world.cleaned_up == ["p"]
        assert world.events == [ExitedParams(ProcessId("p"), 1, 3, False, None)]

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
            await world.table.start(name, _COMMAND, world.mode(name))

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
            await world.table.start(missing, _COMMAND, LaunchMode(fail))
        cancelled = ProcessId("cancelled")
        world.table.reserve(cancelled)
        world.table.terminate(cancelled)
        with pytest.raises(InvalidRequest):
            await world.table.start(cancelled, _COMMAND, world.mode(cancelled))
        assert not world.table.forget(ProcessId("a"))  # it has not closed
        assert not world.table.forget(ProcessId("unknown"))
        await world.finish("a")
        assert world.table.forget(ProcessId("a"))
        assert observer.seen == ["started a", "failed missing", "failed cancelled", "forgotten a"]

    run(test)


def test_a_table_may_have_other_limits(run: Run) -> None:
    async def test(world: World) -> None:
        world.table._limits = table.TableLimits(2, 1, 1000, 1000.0)
        await world.start("a")
        await world.start("b")
        with pytest.raises(InvalidRequest, match="at most 2 processes"):
            world.table.reserve(ProcessId("c"))
        await world.finish("a")
        await world.finish("b")
        assert (world.ids(), world.table.live_count) == (["b"], 0)

    run(test)
