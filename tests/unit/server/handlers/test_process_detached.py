"""process/attach, process/detach and process/listDetached, and starts with `detach`."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from exec_server.errors import InvalidParams, InvalidRequest
from exec_server.process.command import Command
from exec_server.process.output import OutputLog
from exec_server.process.process import Process
from exec_server.process.table import LaunchMode, ProcessTable
from exec_server.protocol.decoding import EmptyResult, decode
from exec_server.protocol.process import (
    AttachParams,
    AttachResult,
    Detach,
    DetachParams,
    ProcessId,
    ProcessInfo,
    SignalParams,
    StartParams,
    StartResult,
    TerminateParams,
    TerminateResult,
    WriteParams,
    WriteResult,
)
from exec_server.server.context import ConnectionContext
from exec_server.server.detached import Broadcast
from exec_server.server.handlers import process
from exec_server.server.session import Session


class FakeProcess:
    """A detached process that records its input and signals."""

    tty = False
    has_stdin = True
    pid = 7

    def __init__(self) -> None:
        self.id = ProcessId("web")
        self.log = OutputLog()
        self.writes: list[str | None] = []
        self.signals: list[str] = []

    def summary(self) -> ProcessInfo:
        return ProcessInfo(self.id, ["web", "-x"], False, True, None, False, self.log.next_seq)

    def accepts_write(self, write_id: str | None) -> bool:
        return True

    def write(self, data: bytes, write_id: str | None) -> None:
        self.writes.append(write_id)

    def signal(self, name: str) -> None:
        self.signals.append(name)


class Table:
    """A session's ProcessTable without processes."""

    def get(self, process_id: ProcessId) -> Process | None:
        return None

    def is_starting(self, process_id: ProcessId) -> bool:
        return False


class World:
    """A server with one detached process, and a session without a connection."""

    def __init__(self) -> None:
        self.process = FakeProcess()
        self.broadcast = Broadcast("web")
        self.broadcast.process = cast(Process, self.process)
        self.session = Session(lambda emit: cast(ProcessTable, Table()))
        self.server = self.detached = self
        self.started: list[tuple[str, list[str]]] = []
        self.terminated: list[str] = []
        self.context = cast(ConnectionContext, self)

    def find(self, name: str) -> Broadcast:
        assert name == "web"
        return self.broadcast

    def reserve(self, detach: Detach, program: str) -> Broadcast:
        assert (detach, program) == (Detach("web"), "x")
        self.broadcast.process = None
        return self.broadcast

    async def start(self, name: str, command: Command, launch_mode: LaunchMode) -> None:
        self.started.append((name, command.argv))

    def terminate(self, name: str) -> bool:
        self.terminated.append(name)
        return True

    def listed(self) -> list[Any]:
        return []

    def attach(self, process_id: str = "mine", after: int | None = None) -> AttachResult:
        return process.attach(self.context, AttachParams(ProcessId(process_id), "web", after))


_MINE = ProcessId("mine")


def test_attaching_twice_is_one_attachment_that_begins_again() -> None:
    async def scenario() -> None:
        world = World()
        for _ in range(3):
            world.process.log.append("stdout", b"x")
        assert world.attach() == AttachResult(_MINE, 0, ["web", "-x"], False, True, 7)
        assert world.attach(after=2) == AttachResult(_MINE, 2, ["web", "-x"], False, True, 7)
        assert len(world.broadcast.attachments) == 1
        world.broadcast = Broadcast("web")  # another process of this name
        world.broadcast.process = cast(Process, world.process)
        with pytest.raises(InvalidRequest, match="process mine already exists"):
            world.attach()
        with pytest.raises(InvalidParams, match="processId must not exceed 4096 bytes"):
            world.attach("x" * 5000)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("tty", "has_stdin", "is_piped"),
    [(False, True, True), (False, False, False), (True, True, False)],
)
def test_only_a_piped_stdin_can_be_closed(tty: bool, has_stdin: bool, is_piped: bool) -> None:
    async def scenario() -> None:
        world = World()
        world.process.tty, world.process.has_stdin = tty, has_stdin
        result = world.attach()
        assert (result.tty, result.pipe_stdin) == (tty, is_piped)

    asyncio.run(scenario())


def test_detaching_is_no_error_without_an_attachment() -> None:
    async def scenario() -> None:
        world = World()
        world.attach()
        for _ in range(2):
            assert process.detach(world.context, DetachParams(_MINE)) == EmptyResult()
        assert not world.session.attachments
        assert not world.broadcast.attachments
        assert process.list_detached(world.context, None).processes == []

    asyncio.run(scenario())


def test_methods_of_processes_reach_an_attached_one() -> None:
    async def scenario() -> None:
        world = World()
        world.attach()
        params = WriteParams(_MINE, cast(Any, b"x"), "1")
        assert process.write(world.context, params) == WriteResult("accepted")
        assert world.process.writes == ["1:1"]
        process.signal(world.context, SignalParams(_MINE, "SIGHUP"))
        assert world.process.signals == ["SIGHUP"]
        ended = process.terminate(world.context, TerminateParams(_MINE))
        assert (ended, world.terminated) == (TerminateResult(True), ["web"])

    asyncio.run(scenario())


def test_a_detached_start_attaches_its_session() -> None:
    async def scenario() -> None:
        world = World()
        params = {"processId": "mine", "argv": ["x"], "cwd": "/", "env": {}, "tty": False}
        decoded = decode(StartParams, params | {"detach": {"name": "web"}})
        outcome = process.start(world.context, decoded)
        write = process.write(world.context, WriteParams(_MINE, cast(Any, b"x"), None))
        assert write == WriteResult("starting")
        assert await cast(Any, outcome) == StartResult(_MINE, "none", "web")
        assert world.started == [("web", ["x"])]
        assert list(world.session.attachments) == ["mine"]
        with pytest.raises(InvalidRequest, match="process mine already exists"):
            process.start(world.context, decoded)

    asyncio.run(scenario())
