"""serve(): joins transports, connections and sessions, and ends them in order."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from exec_server.core import environment, http, system
from exec_server.core.descendants import TagPool
from exec_server.core.processes import Emit, ProcessTable
from exec_server.core.reaper import Reaper
from exec_server.core.threads import Threads
from exec_server.errors import RegistryError, StartupError
from exec_server.rpc.connection import Connection, Host
from exec_server.rpc.scope import Machine
from exec_server.rpc.session import SessionRegistry
from exec_server.rpc.stream import MessageReceiver, MessageStream
from exec_server.sandbox.sandboxes import Sandboxes
from exec_server.transports.auth import Authenticator
from exec_server.transports.stdio import StdioStream
from exec_server.transports.websocket import Settings, WebSocketListener

if TYPE_CHECKING:
    from exec_server.transports import http_client

# File operations that may hang on a disk at the same time before others have to wait.
FILE_THREADS = 16
# Starts are limited by the kernel, not by waiting: more threads would only queue there.
SPAWN_THREADS = 4
# How often idle workers, unused sandboxes and free memory are looked for.
SWEEP_SECONDS = 10.0

DEFAULT_RETENTION_SECONDS = 30.0


Receiver = Callable[[MessageStream], MessageReceiver]


class Executor(Protocol):
    """Something by which clients come to us, instead of a socket that listens."""

    async def serve(self, receiver: Receiver, tasks: asyncio.TaskGroup) -> NoReturn:
        """Serve until cancelled; RegistryError or StartupError if that cannot be."""
        ...


@dataclass(frozen=True, slots=True)
class Options:
    """How to serve, whatever the transport."""

    concurrent_requests: int = 1
    session_retention: float = DEFAULT_RETENTION_SECONDS
    # Told of what has to be removed should the server be killed: a path, and whether it is there.
    remember: Callable[[str, bool], None] = lambda path, exists: None


class _Fetch:
    """The HTTP client, loaded when it is first needed: most servers never need it."""

    def __init__(self) -> None:
        self._client: http_client.Client | None = None

    async def open(
        self,
        method: str,
        url: str,
        headers: Sequence[tuple[str, str]],
        body: bytes,
        *,
        repeatable: bool,
    ) -> http_client.Answer:
        if self._client is None:
            loaded = await asyncio.to_thread(import_module, "exec_server.transports.http_client")
            self._client = self._client or loaded.Client()
        return await self._client.open(method, url, headers, body, repeatable=repeatable)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


@asynccontextmanager
async def _host(options: Options, variables: Mapping[str, str]) -> AsyncIterator[Host]:
    """What connections need, for as long as the context lasts; all children die with it."""
    system.keep_freed_memory()
    reaper = Reaper()
    reaper.open()
    sandboxes = Sandboxes(variables, options.remember)
    tags = TagPool()
    spawn_threads = Threads(SPAWN_THREADS, "spawn")
    file_threads = Threads(FILE_THREADS, "files")
    fetch = _Fetch()

    def make_table(emit: Emit) -> ProcessTable:
        return ProcessTable(emit, reaper, tags, spawn_threads)

    machine = Machine(
        environment.describe(variables),
        variables,
        environment.login_shell(),
        file_threads,
        sandboxes,
        http.Means(fetch),
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            sweeper = tasks.create_task(_sweep(sandboxes))
            sessions = SessionRegistry(make_table, tasks, options.session_retention)
            try:
                yield Host(machine, sessions, tasks, options.concurrent_requests)
            finally:
                await sessions.end_all()
                sweeper.cancel()
        await fetch.close()
    finally:
        sandboxes.close()
        reaper.close()
        spawn_threads.close()
        file_threads.close()


async def _sweep(sandboxes: Sandboxes) -> None:
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        sandboxes.drop_idle()
        system.return_freed_memory()


async def serve_websocket(
    bound: socket.socket,
    stop: asyncio.Event,
    *,
    options: Options,
    variables: Mapping[str, str],
    authenticate: Authenticator | None = None,
    allowed_hosts: frozenset[str] | None = None,
) -> None:
    """Serve a bound socket until `stop` is set."""
    async with _host(options, variables) as host:
        settings = Settings(lambda stream: Connection(host, stream), authenticate, allowed_hosts)
        listener = WebSocketListener(bound, settings)
        await listener.open()
        try:
            await stop.wait()
        finally:
            await listener.close()


async def serve_stdio(
    stop: asyncio.Event, *, options: Options, variables: Mapping[str, str]
) -> None:
    """Serve the one connection on stdin and stdout until either ends or `stop` is set."""
    async with _host(options, variables) as host:
        stream = StdioStream(lambda stream: Connection(host, stream))
        await stream.open(os.dup(0), os.dup(1))
        stream.ended.add_done_callback(lambda _: stop.set())
        await stop.wait()
        stream.close(0, "server is shutting down")  # what is under way ends with it
    await stream.flush()


async def serve_remote(
    executor: Executor,
    stop: asyncio.Event,
    *,
    watch: Callable[[], Coroutine[Any, Any, None]],
    options: Options,
    variables: Mapping[str, str],
) -> None:
    """Serve whoever comes by the executor until `stop` is set or `watch` ends."""
    async with _host(options, variables) as host:
        failures = await _run_executor(
            executor, lambda stream: Connection(host, stream), host.tasks, stop, watch
        )
    for failure in failures:
        raise failure


async def forward_remote(
    executor: Executor,
    make_receiver: Callable[[asyncio.TaskGroup], Receiver],
    stop: asyncio.Event,
    *,
    watch: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    """Pass on whoever comes by the executor until `stop` is set or `watch` ends."""
    async with asyncio.TaskGroup() as tasks:
        failures = await _run_executor(executor, make_receiver(tasks), tasks, stop, watch)
    for failure in failures:
        raise failure


async def _run_executor(
    executor: Executor,
    receiver: Receiver,
    tasks: asyncio.TaskGroup,
    stop: asyncio.Event,
    watch: Callable[[], Coroutine[Any, Any, None]],
) -> list[Exception]:
    """Run it until it fails, `watch` ends or `stop` is set; returns what has failed."""
    failures: list[Exception] = []

    async def run(job: Coroutine[Any, Any, None]) -> None:
        try:
            await job
        except (RegistryError, StartupError) as error:
            failures.append(error)
        stop.set()

    jobs = [tasks.create_task(run(executor.serve(receiver, tasks)))]
    jobs.append(tasks.create_task(run(watch())))
    await stop.wait()
    for job in jobs:
        job.cancel()
    await asyncio.wait(jobs)
    return failures
