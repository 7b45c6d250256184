"""DetachedProcesses with a fake table: names, limits, timers and the end of the server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
import pytest

from exec_server.errors import InvalidParams, InvalidRequest
from exec_server.process.command import Command
from exec_server.process.output import OutputLog
from exec_server.process.process import Emit, Process
from exec_server.process.table import LaunchMode, ProcessTable, TableLimits, TableObserver
from exec_server.protocol.decoding import Notice
from exec_server.protocol.process import (
    CLOSED,
    EXITED,
    ClosedParams,
    Detach,
    ExitedParams,
    ProcessId,
    ProcessInfo,
)
from exec_server.server import detached
from exec_server.server.detached import DetachedProcesses


class FakeProcess:
    """A process that records its signals."""

    def __init__(self, name: str) -> None:
        self.id = ProcessId(name)
        self.pid = 7
        self.log = OutputLog()
        self.exit_code: int | None = None
        self.closed = False
        self.signals: list[str] = []
        self.may_signal = True

    def signal(self, name: str) -> None:
        self.signals.append(name)
        if not self.may_signal:
            raise PermissionError

    def summary(self) -> ProcessInfo:
        running = self.exit_code is None
        seq = self.log.next_seq
        return ProcessInfo(
            self.id, ["x"], False, running, self.exit_code, self.closed, seq, self.pid
        )


class FakeTable:
    """A ProcessTable whose processes the test ends."""

    def __init__(self, emit: Emit, limits: TableLimits, observer: TableObserver) -> None:
        self._emit = emit
        self.limits = limits
        self.observer = observer
        self.processes: dict[str, FakeProcess] = {}
        self.reserved: list[str] = []
        self.terminated: list[str] = []
        self.may_end = True
        self.ended = False

    @property
    def live_count(self) -> int:
        return sum(not process.closed for process in self.processes.values()) + len(self.reserved)

    def reserve(self, name: ProcessId) -> None:
        self.reserved.append(name)

    async def start(self, name: ProcessId, command: Command, launch_mode: LaunchMode) -> None:
        self.reserved.remove(name)
        if command.argv == ["missing"]:
            self.observer.start_failed(name)
            raise InvalidRequest("missing")
        self.processes[name] = FakeProcess(name)
        self.observer.started(cast(Process, self.processes[name]))

    def finish(self, name: str) -> None:
        process = self.processes[name]
        process.exit_code = 0
        exited = ExitedParams(process.id, process.log.number_event(), 0, False)
        self._emit(cast(Notice[msgspec.Struct], EXITED), exited)
        process.closed = True
        closed = ClosedParams(process.id, process.log.number_event())
        self._emit(cast(Notice[msgspec.Struct], CLOSED), closed)

    def forget(self, name: ProcessId) -> bool:
        process = self.processes.get(name)
        if process is None or not process.closed:
            return False
        del self.processes[name]
        self.observer.forgotten(cast(Process, process))
        return True

    def terminate(self, name: ProcessId) -> bool:
        self.terminated.append(name)
        return name in self.processes

    async def end(self) -> None:
        while not self.may_end:
            await asyncio.sleep(3600)
        self.ended = True


class World:
    """Detached processes on a fake table."""

    def __init__(self) -> None:
        self.tables: list[FakeTable] = []
        self.detached = DetachedProcesses(self._make_table)
        self.table = self.tables[0]

    def _make_table(self, emit: Emit, limits: TableLimits, observer: TableObserver) -> ProcessTable:
        self.tables.append(FakeTable(emit, limits, observer))
        return cast(ProcessTable, self.tables[-1])

    async def start(
        self, name: str | None = None, *, program: str = "/bin/web", **limits: int
    ) -> FakeProcess:
        broadcast = self.detached.reserve(Detach(name, **cast(Any, limits)), program)
        await self.detached.start(broadcast.name, Command([program], "/", {}), LaunchMode())
        return self.table.processes[broadcast.name]

    def names(self) -> list[str]:
        return [each.name for each in self.detached.listed()]


def _run(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(20):
            world = World()
            await scenario(world)
            await world.detached.end_all()
            assert world.table.ended

    asyncio.run(run())


class Channel:
    """A session that takes nothing."""

    is_writable = False

    def __init__(self) -> None:
        self.ended: list[str] = []

    def notify(self, notice: Notice[msgspec.Struct], params: msgspec.Struct) -> None:
        raise AssertionError("it is not writable")

    def attachment_ended(self, process_id: ProcessId) -> None:
        self.ended.append(process_id)


async def _until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_names_are_given_or_chosen_from_the_program() -> None:
    async def scenario(world: World) -> None:
        await world.start("web-2")
        await world.start()
        await world.start()
        await world.start(program="/opt/a b!c")
        await world.start(program="/opt/!")
        assert world.names() == ["web-2", "web-1", "web-3", "a-b-c-4", "process-5"]

    _run(scenario)


@pytest.mark.parametrize("name", ["", "-x", ".x", "a b", "a/b", "x" * 65, "x\n"])
def test_other_names_are_refused(name: str) -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(InvalidParams, match="1 to 64 letters, digits"):
            await world.start(name)

    _run(scenario)


def test_a_name_is_free_again_after_the_close() -> None:
    async def scenario(world: World) -> None:
        await world.start("web")
        with pytest.raises(InvalidRequest, match="the name web is in use"):
            await world.start("web")
        channel = Channel()
        world.detached.find("web").attach(ProcessId("mine"), channel)
        world.table.finish("web")
        # Its last event, which the channel lacks, is sent in any case.
        channel.notify = lambda notice, params: None  # type: ignore[method-assign]
        await world.start("web")
        assert (world.names(), channel.ended) == (["web"], ["mine"])

    _run(scenario)


def test_a_failed_start_frees_the_name_and_ends_the_attachment() -> None:
    async def scenario(world: World) -> None:
        broadcast = world.detached.reserve(Detach("web"), "missing")
        channel = Channel()
        broadcast.attach(ProcessId("mine"), channel)
        with pytest.raises(InvalidRequest, match="detached process web is starting"):
            world.detached.find("web")
        assert world.names() == []
        with pytest.raises(InvalidRequest, match="missing"):
            await world.detached.start("web", Command(["missing"], "/", {}), LaunchMode())
        with pytest.raises(InvalidRequest, match="unknown detached process web"):
            world.detached.find("web")
        assert channel.ended == ["mine"]

    _run(scenario)


def test_their_number_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detached, "MAX_RUNNING", 2)

    async def scenario(world: World) -> None:
        await world.start("one")
        await world.start("two")
        with pytest.raises(InvalidRequest, match="at most 2 detached processes may run"):
            await world.start("three")
        world.table.finish("one")
        await world.start("three")
        with pytest.raises(InvalidRequest, match="at most 2 detached processes may run"):
            await world.start("one")
        assert "one" in world.names()  # a start that is refused forgets nothing
        assert world.table.limits == TableLimits(2, 64, 64 * 1_048_576, 3600.0)

    _run(scenario)


@pytest.mark.parametrize("member", ["max_lifetime_ms", "idle_timeout_ms"])
@pytest.mark.parametrize("value", [0, 365 * 86_400_000 + 1])
def test_limits_that_no_timer_takes_are_refused(member: str, value: int) -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(InvalidParams, match="Ms must be 1 to 31536000000"):
            await world.start("web", **cast(Any, {member: value}))

    _run(scenario)


def test_limits_are_listed_as_they_were_given() -> None:
    async def scenario(world: World) -> None:
        await world.start("a", max_lifetime_ms=86_400_000, idle_timeout_ms=3_600_000)
        await world.start("b")
        limits = [(each.max_lifetime_ms, each.idle_timeout_ms) for each in world.detached.listed()]
        assert limits == [(86_400_000, 3_600_000), (None, None)]
        loop = asyncio.get_running_loop()
        delays = [
            cast(asyncio.TimerHandle, timer).when() - loop.time()
            for timer in world.detached._by_name["a"].timers.values()
        ]
        assert [round(delay, -1) for delay in delays] == [86_400, 3_600]

    _run(scenario)


def test_the_end_of_a_lifetime_is_sigterm_and_then_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detached, "GRACE_SECONDS", 0.01)

    async def scenario(world: World) -> None:
        web = await world.start("web", max_lifetime_ms=10)
        await _until(lambda: world.table.terminated)
        assert (web.signals, world.table.terminated) == (["SIGTERM"], ["web"])
        [listed] = world.detached.listed()
        assert (listed.ended_by, listed.max_lifetime_ms, listed.pid) == ("maxLifetime", 10, 7)

    _run(scenario)


def test_a_process_that_cannot_be_signalled_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detached, "GRACE_SECONDS", 0.001)

    async def scenario(world: World) -> None:
        web = await world.start("web", max_lifetime_ms=1, idle_timeout_ms=1)
        web.may_signal = False
        await _until(lambda: world.table.terminated)
        assert web.signals == ["SIGTERM"]  # of one limit, not of both

    _run(scenario)


def test_a_process_that_has_closed_reaches_no_limit() -> None:
    async def scenario(world: World) -> None:
        web = await world.start("web", max_lifetime_ms=1, idle_timeout_ms=1)
        world.table.finish("web")
        await asyncio.sleep(0.01)
        assert (web.signals, world.detached.listed()[0].ended_by) == ([], None)

    _run(scenario)


def test_a_process_is_idle_without_output_and_without_a_client() -> None:
    async def scenario(world: World) -> None:
        web = await world.start("web", idle_timeout_ms=20)
        broadcast = world.detached.find("web")
        attachment = broadcast.attach(ProcessId("mine"), Channel())
        await asyncio.sleep(0.05)
        assert web.signals == []
        attachment.close()
        loop = asyncio.get_running_loop()
        left = loop.time()
        await _until(lambda: web.signals)
        assert loop.time() - left >= 0.02
        assert world.detached.listed()[0].ended_by == "idleTimeout"

    _run(scenario)


def test_terminating_is_left_to_the_table() -> None:
    async def scenario(world: World) -> None:
        await world.start("web")
        assert world.detached.terminate("web")
        assert world.table.terminated == ["web"]

    _run(scenario)


def test_processes_that_cannot_be_killed_do_not_keep_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(detached, "END_SECONDS", 0.01)

    async def scenario(world: World) -> None:
        await world.start("web", max_lifetime_ms=1000)
        world.table.may_end = False
        with caplog.at_level(logging.ERROR):
            await world.detached.end_all()
        assert "could not be killed" in caplog.text
        world.table.may_end = True

    _run(scenario)
