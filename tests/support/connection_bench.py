"""A Connection over an in-memory stream, with fake methods.

The handlers wait until the test lets them continue, so every order can be produced.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from typing import Any, cast
from unittest import mock

from exec_server.errors import NotFound
from exec_server.filesystem.inotify import Inotify
from exec_server.host.event_loop import GuardedTasks
from exec_server.host.threads import ThreadPool
from exec_server.process.table import ProcessTable
from exec_server.protocol import process, session
from exec_server.protocol.decoding import Call, Params, Result
from exec_server.server import connection
from exec_server.server.connection import Connection
from exec_server.server.context import ConnectionContext, Encoded, ServerContext, Streamed
from exec_server.server.methods import Method
from exec_server.server.session import Retentions, SessionRegistry

_ENVIRONMENT = session.EnvironmentInfo(
    session.Shell("sh", "/bin/sh"),
    "0",
    "local",
    None,
    None,
    "linux",
    [],
    [],
    "/tmp",
    session.Capabilities(),
)


class _Name(Params, frozen=True):
    """Like the params of process methods: the name of a process, and anything else."""

    wire_name = "Name"
    omissible = ("pad",)
    process_id: str
    pad: str | None = None


class _Done(Result, frozen=True):
    name: str


class MemoryStream:
    """A MessageStream that records sent messages and delivers messages while reading."""

    is_strict = False
    origin = "message from memory"

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.parts: list[bytes] = []
        self.receiving = True
        self.unsent_bytes = 0
        self.closed: tuple[int, str] | None = None
        self.probed = 0
        self.receiver: Connection | None = None
        self._inbox: list[bytes] = []

    def send(self, message: bytes) -> None:
        self.sent.append(json.loads(message))

    async def send_parts(self, parts: AsyncIterator[bytes], size: int) -> None:
        self.parts = [part async for part in parts]
        if self.closed is None:
            assert sum(map(len, self.parts)) == size
            self.send(b"".join(self.parts))

    def unsent(self) -> int:
        return self.unsent_bytes

    def pause_reading(self) -> None:
        self.receiving = False

    def resume_reading(self) -> None:
        self.receiving = True
        asyncio.get_running_loop().call_soon(self._deliver)

    def probe(self) -> None:
        self.probed += 1

    def close(self, code: int, reason: str) -> None:
        if self.closed is None:
            self.closed = (code, reason)
            assert self.receiver is not None
            asyncio.get_running_loop().call_soon(self.receiver.connection_lost)

    def say(self, *messages: object) -> None:
        """Messages of the client; delivered unless reading is paused."""
        self._inbox += [m if isinstance(m, bytes) else json.dumps(m).encode() for m in messages]
        self._deliver()

    def _deliver(self) -> None:
        assert self.receiver is not None
        while self._inbox and self.receiving:
            self.receiver.message_received(self._inbox.pop(0))

    @property
    def answered(self) -> list[object]:
        return [message.get("id") for message in self.sent]

    @property
    def waiting(self) -> int:
        return len(self._inbox)


class _Table:
    """A ProcessTable without processes."""

    is_empty = True
    live_count = 0

    def __init__(self) -> None:
        self.calls: list[str] = []

    def connection_opened(self) -> None:
        """There is no output."""

    def connection_lost(self, *, keeps_closed: bool) -> None:
        """There is no output."""

    def pause_reading(self) -> None:
        self.calls.append("pause")

    def resume_reading(self) -> None:
        self.calls.append("resume")

    def terminate_all(self) -> None:
        self.calls.append("terminate")

    async def end(self) -> None:
        self.calls.append("end")


class ConnectionBench:
    """A connection with fake methods, and a record of the calls of their handlers."""

    def __init__(self, tasks: asyncio.TaskGroup, threads: ThreadPool, slots: int) -> None:
        self.tables: list[_Table] = []
        self.ran: list[str] = []
        self.gates: dict[str, asyncio.Future[None]] = {}
        self.sessions = SessionRegistry(
            self._make_table, GuardedTasks(tasks), Retentions(1000.0, 2000.0)
        )
        self.server = ServerContext(
            environment=_ENVIRONMENT,
            variables={},
            login_shell="/bin/sh",
            file_threads=threads,
            decode_threads=threads,
            inotify=lambda: Inotify(threads.run),
            sandboxes=cast(Any, None),
            sessions=self.sessions,
            detached=cast(Any, None),
            tasks=GuardedTasks(tasks),
            concurrent_requests=slots,
        )
        self.stream = MemoryStream()
        self.connection = self.connect(self.stream)

    def _make_table(self, emit: object) -> ProcessTable:
        self.tables.append(_Table())
        return cast(ProcessTable, self.tables[-1])

    def connect(self, stream: MemoryStream) -> Connection:
        stream.receiver = Connection(self.server, stream)
        return stream.receiver

    def ready(self) -> None:
        self.stream.say(request(0, "initialize", clientName="x"), {"method": "initialized"})
        self.stream.sent.clear()

    # Handlers. `quick` answers at once, `slow` when the test opens the gate of that name.

    def quick(self, context: ConnectionContext, params: _Name) -> _Done:
        self.ran.append(params.process_id)
        return _Done(params.process_id)

    def slow(self, context: ConnectionContext, params: _Name) -> Awaitable[_Done]:
        self.ran.append(params.process_id)
        gate = self.gates[params.process_id] = asyncio.get_running_loop().create_future()

        async def wait() -> _Done:
            await gate
            return _Done(params.process_id)

        return wait()

    def open(self, *names: str) -> None:
        for name in names:
            self.gates[name].set_result(None)

    def methods(self) -> dict[str, Method]:
        rows = [
            Method(Call("quick", _Name, _Done), self.quick, "fake"),
            Method(Call("slow", _Name, _Done), self.slow, "fake"),
            Method(Call("control", _Name, _Done), self.quick, "exec", control=True),
            Method(Call("slowControl", _Name, _Done), self.slow, "exec", control=True),
            Method(Call("fs/close", _Name, _Done), self.quick, "filesystem", control=True),
            Method(Call("parked", _Name, _Done), self.slow, "fake", yields_slot=True),
            Method(Call("unit", None, _Done), lambda s, p: _Done("unit"), "unit words"),
            Method(Call("fail", _Name, _Done), _fail, "fake"),
            Method(Call("failLater", _Name, _Done), _fail_later, "fake"),
            Method(Call("encoded", _Name, _Done), lambda s, p: Encoded(b'{"x":1}'), "fake"),
            Method(Call("streamed", _Name, _Done), _streamed, "fake"),
            Method(process.START, self.start_handler, "exec"),
        ]
        return {row.name: row for row in rows}

    def start_handler(self, context: ConnectionContext, params: process.StartParams) -> Any:
        self.ran.append(f"start {params.process_id}")
        return _Done(params.process_id)


def _fail(context: ConnectionContext, params: _Name) -> _Done:
    if params.process_id == "rpc":
        raise NotFound("it is not there")
    if params.process_id == "os":
        raise FileNotFoundError(2, "anything")
    raise ValueError("a bug")


async def _fail_later(context: ConnectionContext, params: _Name) -> _Done:
    return _fail(context, params)


async def _streamed(context: ConnectionContext, params: _Name) -> Streamed:
    async def parts() -> AsyncIterator[bytes]:
        yield b'{"big":'
        if params.process_id == "broken":
            raise OSError(5, "I/O")
        yield b"1}"

    return Streamed(len(b'{"big":1}'), parts())


def request(request_id: object, method: str, **params: object) -> dict[str, object]:
    return {"id": request_id, "method": method, "params": params}


def named(request_id: object, method: str, name: str) -> dict[str, object]:
    return request(request_id, method, processId=name)


def start(request_id: object, name: str) -> dict[str, object]:
    return request(
        request_id, "process/start", processId=name, argv=["x"], cwd="/", env={}, tty=False
    )


async def settle(count: int = 5) -> None:
    """Let callbacks and tasks run that are ready."""
    for _ in range(count):
        await asyncio.sleep(0)


def run_scenario(scenario: Callable[[ConnectionBench], Awaitable[None]], *, slots: int = 1) -> None:
    """Run a scenario on a new connection."""

    async def run() -> None:
        with closing(ThreadPool(1, "test")) as threads:
            async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
                bench = ConnectionBench(tasks, threads, slots)
                with mock.patch.object(connection, "METHODS", bench.methods()):
                    try:
                        await scenario(bench)
                    finally:
                        await settle()
                        for task in list(bench.connection._tasks):
                            task.cancel()
                        await bench.sessions.end_all()

    asyncio.run(run())
