"""Environments for tests of the client: with our server or the reference, over every transport."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, Self
from urllib.parse import urlsplit

import pytest
import uvloop

from exec_server.client.connect import connect
from exec_server.client.engine.session import ClientSession, Dialer
from exec_server.client.engine.stdio import StdioDialer
from exec_server.client.environment import Environment
from exec_server.errors import NotFound, SessionLost
from exec_server.protocol import files, process
from exec_server.protocol.decoding import Base64, Notice
from exec_server.protocol.paths import PathUri
from exec_server.protocol.process import ProcessId
from exec_server.protocol.session import STATUS
from tests.relay_service import ThreadedRelayService
from tests.support.client import (
    DEFAULT_TIMEOUT,
    scaled,
    server_command,
    server_environment,
    start_server,
)
from tests.support.relay import ENVIRONMENT, start_executor

Scene = Callable[[Environment], Awaitable[None]]
Run = Callable[[Coroutine[Any, Any, None]], None]
End = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ClientTarget:
    """A server that runs, and ways to get an environment of it."""

    def __init__(self, kind: str, make: Callable[[], Environment], url: str = "") -> None:
        self.kind = kind
        self.make = make
        self.url = url

    @property
    def is_ours(self) -> bool:
        return self.kind == "ours"

    def play(self, scene: Scene, run: Run = asyncio.run) -> None:
        """Run a scene in an environment of its own, and see that it leaves no task."""

        async def play() -> None:
            async with self.make() as env:
                await scene(env)

        bounded(play(), run)


def bounded(scene: Coroutine[Any, Any, None], run: Run = asyncio.run, patience: float = 3) -> None:
    """Run a scene in a loop of its own, within a test's patience; no task may be left."""

    async def limited() -> None:
        async with asyncio.timeout(scaled(patience * DEFAULT_TIMEOUT)):
            await scene
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(limited())


@contextlib.contextmanager
def machine(kind: str, transport: str = "websocket") -> Iterator[ClientTarget]:
    """A server of this kind, behind this transport."""
    if transport == "websocket":
        with start_server(kind) as server:
            yield ClientTarget(kind, lambda: connect(server.url), server.url)
    elif transport == "stdio":
        words = [*server_command(kind), "--listen", "stdio"]
        yield ClientTarget(kind, lambda: Environment(StdioDialer(words, server_environment(kind))))
    else:
        with ThreadedRelayService() as service, start_executor(service, kind=kind):
            yield ClientTarget(
                kind,
                lambda: connect(registry=service.url, environment_id=ENVIRONMENT, token="client"),
            )


class Proxy:
    """A TCP proxy in front of a server, whose connections can be cut."""

    def __init__(self, url: str) -> None:
        self.target = url
        self.url = ""
        self.accepted = 0
        self.is_open = True
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            self.cut()
            if self._tasks:
                await asyncio.wait(self._tasks)

    def cut(self) -> None:
        """Reset every connection now."""
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.accepted += 1
        parts = urlsplit(self.target)
        ends = {writer}
        self._writers.add(writer)
        try:
            if not self.is_open:
                raise ConnectionRefusedError
            far_reader, far_writer = await asyncio.open_connection(parts.hostname, parts.port)
        except OSError:
            writer.transport.abort()
        else:
            ends.add(far_writer)
            self._writers.add(far_writer)
            await self._join((reader, writer), (far_reader, far_writer))
        self._writers -= ends

    async def _join(self, near: End, far: End) -> None:
        """Pass everything on in both directions, until both have ended."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._copy(near[0], far[1]))
            tasks.create_task(self._copy(far[0], near[1]))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()


class CuttingProxy(Proxy):
    """A proxy that lets so many bytes pass and then cuts, resets or stalls, by chance.

    Only when it is no longer `is_patient`: a first connection that is cut is a failure.
    """

    def __init__(self, url: str, seed: int, most_bytes: int) -> None:
        super().__init__(url)
        self._random = random.Random(seed)
        self._most_bytes = most_bytes
        self.cuts = 0
        self.is_patient = True

    async def _join(self, near: End, far: End) -> None:
        ends = {near[1], far[1]}
        budget = [self._random.randrange(1, self._most_bytes)]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pass(near[0], far[1], budget, ends))
            tasks.create_task(self._pass(far[0], near[1], budget, ends))

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        budget: list[int],
        ends: set[asyncio.StreamWriter],
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                if not self.is_patient:
                    if len(data) >= budget[0]:
                        await self._end(writer, data[: budget[0]], ends)
                        return
                    budget[0] -= len(data)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _end(
        self, writer: asyncio.StreamWriter, last: bytes, ends: set[asyncio.StreamWriter]
    ) -> None:
        """Pass on a part, perhaps, and let the connection end in one way or another."""
        self.cuts += 1
        fate = self._random.randrange(4)
        if fate:
            writer.write(last)
        if fate == 1:  # the forwarded part arrives
            await writer.drain()
        if fate == 2:  # nothing happens for a moment
            await asyncio.sleep(self._random.random() / 50)
        if fate == 3:  # an orderly end instead of a reset
            for each in ends:
                each.close()
        for each in ends:
            each.transport.abort()


@contextlib.asynccontextmanager
async def through_cutting_proxy(
    url: str, seed: int, most_bytes: int
) -> AsyncIterator[tuple[CuttingProxy, Environment]]:
    """An environment whose connections bear so many bytes at most, after the first handshake."""
    async with CuttingProxy(url, seed, most_bytes).running() as cutter, connect(cutter.url) as env:
        cutter.is_patient = False
        yield cutter, env
        cutter.is_patient = True


@contextlib.asynccontextmanager
async def web(body: bytes = b"body") -> AsyncIterator[str]:
    """A web server that echoes its request as JSON, or sends the body and waits."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = next(
            (int(line.split(":")[1]) for line in head.lower().splitlines() if "length:" in line), 0
        )
        sent = await reader.readexactly(size)
        path = head.split()[1]
        closing = b"connection: close\r\n\r\n"
        if path == "/moved":
            writer.write(b"HTTP/1.1 302 Found\r\nlocation: /\r\ncontent-length: 0\r\n" + closing)
        else:
            told = json.dumps({"head": head, "body": sent.decode()}).encode()
            content = told if path == "/" else body
            length = f"content-length: {len(content)}\r\nx-a: 1\r\nx-a: 2\r\n"
            writer.write(b"HTTP/1.1 201 Created\r\n" + length.encode() + closing + content)
        try:
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        except OSError:
            pass

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


LOOPS: list[Run] = [asyncio.run, uvloop.run]


# Client sessions under test: one with calls of every family, and the output of its process.


# Waits for a line, then prints numbered lines, little by little.
COUNTER = """
import sys, time
sys.stdin.readline()
for number in range(3000):
    print(number, flush=number % 10 == 0)
    if number % 10 == 0: time.sleep(0.001)
"""
COUNTED = "".join(f"{number}\n" for number in range(3000)).encode()


class Recorder:
    """Collects the output of one process, and after a lost connection reads the missed part."""

    def __init__(self, session: ClientSession, tasks: asyncio.TaskGroup) -> None:
        self._session = session
        self._tasks = tasks
        self._chunks: dict[int, bytes] = {}
        self._last = 0  # up to here nothing is missing
        self._seen: set[int] = set()
        self._end: int | None = None
        self.resumed = 0
        self.on_output: Callable[[], None] = lambda: None
        self.complete = asyncio.Event()
        session.subscribe(self)

    async def start(self, *argv: str, pipe_stdin: bool = False) -> None:
        params = process.StartParams(
            process_id=ProcessId("p"),
            argv=list(argv),
            cwd=PathUri.from_wire("/"),
            env={"PATH": "/usr/bin:/bin"},
            tty=False,
            pipe_stdin=pipe_stdin,
        )
        assert (await self._session.call(process.START, params)).process_id == "p"

    async def count(self) -> None:
        """Start the counter; the line that sets it going is written once."""
        await self.start(sys.executable, "-S", "-c", COUNTER, pipe_stdin=True)
        params = process.WriteParams(ProcessId("p"), Base64(b"go\n"), "1")
        answer = await self._session.call(process.WRITE, params, is_retryable=True)
        assert answer.status == "accepted"

    @property
    def output(self) -> bytes:
        return b"".join(self._chunks[seq] for seq in sorted(self._chunks))

    def on_notice(self, notice: Notice[Any], params: Any) -> None:
        self._take(params.seq, getattr(params, "chunk", None))
        if notice is process.CLOSED:
            self._end = params.seq
        self._check()
        if notice is process.OUTPUT:
            self.on_output()

    def _take(self, seq: int, chunk: bytes | None) -> None:
        # A longer message has the numbers of the chunks that it would be in text.
        starts = range(0, len(chunk or b" "), process.CHUNK_BYTES)
        self._seen.update(range(seq, seq + len(starts)))
        if chunk is not None:
            self._chunks[seq] = chunk
        while self._last + 1 in self._seen:
            self._last += 1

    def _check(self) -> None:
        if self._end is not None and self._last >= self._end:
            self.complete.set()

    def on_disconnected(self) -> None:
        pass

    def on_resumed(self) -> None:
        self.resumed += 1
        self._tasks.create_task(self._catch_up())

    async def _catch_up(self) -> None:
        params = process.ReadParams(ProcessId("p"), self._last, None, 0)
        missed = await self._session.call(process.READ, params, is_retryable=True)
        for chunk in missed.chunks:
            self._take(chunk.seq, chunk.chunk)
        # Events without output are the exit and the close.
        for seq in range(self._last + 1, missed.next_seq):
            self._take(seq, None)
        if missed.closed:
            self._end = missed.next_seq - 1
        self._check()

    def on_lost(self, error: SessionLost) -> None:
        pass


async def ready(session: ClientSession) -> bool:
    """Whether the server answers, at last."""
    return (await session.call(STATUS, None, is_retryable=True)).status == "ready"


async def until_lost(session: ClientSession) -> None:
    """Call until a call finds the session lost: the loss is noticed a moment after its cause."""
    while True:
        await ready(session)


async def outcome(waiting: Coroutine[Any, Any, Any]) -> Any:
    """The value that a call returns or the exception that it raises."""
    try:
        return await waiting
    except Exception as error:
        return error


async def exercise(dialer: Dialer) -> None:
    """A session that does a little of everything."""
    async with asyncio.timeout(scaled(DEFAULT_TIMEOUT)), ClientSession(dialer) as session:
        assert session.environment_info.platform_os == "linux"
        async with asyncio.TaskGroup() as tasks:
            recorder = Recorder(session, tasks)
            await recorder.start("/bin/sh", "-c", "echo out; exit 3")
            await recorder.complete.wait()
        assert recorder.output == b"out\n"
        read = await session.call(process.READ, process.ReadParams(ProcessId("p")))
        assert (read.exit_code, read.closed) == (3, True)
        with pytest.raises(NotFound, match="No such file or directory"):
            await session.call(files.READ_FILE, files.ReadFileParams(PathUri.from_wire("/none")))
