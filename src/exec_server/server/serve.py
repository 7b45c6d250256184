"""serve_websocket, serve_stdio, serve_remote: build the parts of a server and end them in order."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import msgspec

from exec_server.errors import ExecServerError, StartupError
from exec_server.host import environment, interpreter, libc
from exec_server.host.event_loop import GuardedTasks, guarded_call
from exec_server.host.threads import ThreadPool, start_lookup_threads
from exec_server.net.stream import ReceiverFactory, StreamRevoked
from exec_server.process.output import SERVER_RECENT_BYTES, RecentOutputBudget
from exec_server.process.retention import SERVER_RETAINED_BYTES, RetentionBudget
from exec_server.process.table import RETENTION_SECONDS, ProcessTable, Reaper
from exec_server.proxy.resources import ProxyResources
from exec_server.sandbox.sandboxes import Sandboxes
from exec_server.server.connection import Connection
from exec_server.server.context import ServerContext
from exec_server.server.detached import DetachedProcesses, MakeTable
from exec_server.server.methods import load_all
from exec_server.server.session import Retentions, SessionRegistry

if TYPE_CHECKING:
    from exec_server.filesystem.inotify import Inotify
    from exec_server.host.http import HttpResources
    from exec_server.net import http_client
    from exec_server.net.auth import Authenticator
    from exec_server.net.listen import BoundSocket
    from exec_server.net.tls_acceptor import ServerCertificate
    from exec_server.server.port_table import PortResources

log = logging.getLogger(__name__)

# File operations that may block on a disk at the same time; further ones are queued.
FILE_THREADS = 16
# Threads that exist from the start, for a server whose commands have used up the process limit.
STARTED_FILE_THREADS = 2
STARTED_SPAWN_THREADS = 1
# Large messages are decoded one at a time: decoding holds the interpreter's lock, so more threads
# would only make the event loop wait longer for it.
DECODE_THREADS = 1
# Starting a process keeps the kernel busy, so more threads would only queue there.
SPAWN_THREADS = 4
# Clean-ups after commands and kills of orphans. They have threads of their own, because a start may
# hang on a dead disk, and all of them from the start: commands are killed at the process limit too.
CLEANUP_THREADS = 4
# Look-ups of names for the proxies of processes, at the same time. A name server may be silent for
# seconds, so they do not share the threads of other look-ups.
LOOKUP_THREADS = 8
# The interval at which idle workers, unused sandboxes and free memory are released.
SWEEP_SECONDS = 5.0

# A server that used less processor time than this between two sweeps is idle. If it has had a
# client by then, it loads its sandboxes ahead of the first confined request, which takes a fifth of
# a second of one processor.
IDLE_SECONDS = 0.05

# How long tasks may take to end after the last connection and session; all usually have by then.
END_SECONDS = 5.0

# As on the reference, whose client tries for 45 s to resume its session.
DEFAULT_RETENTION_SECONDS = 80.0
# What clients may ask for: a laptop that is closed in the evening comes back in the morning.
MAX_RETENTION_SECONDS = 86_400.0


class Executor(Protocol):
    """A source of connections other than a listening socket."""

    async def serve(
        self, make_receiver: ReceiverFactory, stream_revoked: StreamRevoked, tasks: GuardedTasks
    ) -> NoReturn:
        """Serve until cancelled; raises RegistryError or StartupError if that is impossible."""
        ...


class Options(msgspec.Struct, frozen=True):
    """Options of a server, independent of its transport."""

    concurrent_requests: int = 1
    session_retention: float = DEFAULT_RETENTION_SECONDS
    max_session_retention: float = MAX_RETENTION_SECONDS  # for clients that ask for it
    process_retention: float = RETENTION_SECONDS
    # Called with a path that must be removed if the server is killed, and whether it exists.
    register_cleanup: Callable[[str, bool], None] = lambda path, exists: None
    allow_port_hosts: bool = False  # forward connections to other hosts than this machine
    private_via_upstream: bool = False  # see proxy.upstream

    @property
    def retentions(self) -> Retentions:
        return Retentions(self.session_retention, self.max_session_retention)


class _LazyHttpClient:
    """The HTTP client, imported at its first use: most servers never need it."""

    def __init__(self, threads: ThreadPool) -> None:
        self._threads = threads
        self._client: http_client.Client | None = None

    async def open(
        self,
        method: str,
        url: str,
        headers: Sequence[tuple[str, str]],
        body: bytes,
        *,
        repeatable: bool,
    ) -> http_client.StreamedResponse:
        if self._client is None:
            loaded = await self._threads.run(import_module, "exec_server.net.http_client")
            self._client = self._client or loaded.Client()
        return await self._client.open(method, url, headers, body, repeatable=repeatable)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


def _make_inotify(threads: ThreadPool) -> Inotify:
    from exec_server.filesystem.inotify import Inotify

    return Inotify(threads.run)


def _make_http(client: _LazyHttpClient) -> HttpResources:
    from exec_server.host.http import HttpResources

    return HttpResources(client)


def _make_ports(options: Options) -> PortResources:
    from exec_server.net.port_socket import PortSockets
    from exec_server.server.port_table import PortResources

    return PortResources(PortSockets(allow_other_hosts=options.allow_port_hosts))


@asynccontextmanager
async def _server_context(
    options: Options, variables: Mapping[str, str]
) -> AsyncIterator[ServerContext]:
    """The resources of a server; on exit all sessions end and all children are killed."""
    libc.keep_freed_memory()
    reaper = Reaper()
    reaper.open()
    await start_lookup_threads()
    sandboxes = Sandboxes(variables, options.register_cleanup)
    spawn_threads = ThreadPool(SPAWN_THREADS, "spawn", started=STARTED_SPAWN_THREADS)
    cleanup_threads = ThreadPool(CLEANUP_THREADS, "cleanup", started=CLEANUP_THREADS)
    file_threads = ThreadPool(FILE_THREADS, "files", started=STARTED_FILE_THREADS)
    decode_threads = ThreadPool(DECODE_THREADS, "decode", started=DECODE_THREADS)
    lookup_threads = ThreadPool(LOOKUP_THREADS, "lookup")
    inotify = cache(lambda: _make_inotify(file_threads))
    lazy_client = _LazyHttpClient(file_threads)

    make_table = _table_maker(reaper, spawn_threads, cleanup_threads, options.process_retention)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = GuardedTasks(group)  # all of them: an exception of one client ends no other
            sessions = SessionRegistry(make_table, tasks, options.retentions)
            sweeper = tasks.create_task(_sweep(sandboxes, sessions, decode_threads))
            loader = tasks.create_task(_load_when_idle(sandboxes, sessions, cleanup_threads))
            detached = DetachedProcesses(make_table)
            proxies = ProxyResources(tasks, lookup_threads, variables, options.private_via_upstream)
            try:
                yield ServerContext(
                    environment=environment.describe(variables),
                    variables=variables,
                    login_shell=environment.login_shell(),
                    file_threads=file_threads,
                    decode_threads=decode_threads,
                    inotify=inotify,
                    sandboxes=sandboxes,
                    sessions=sessions,
                    detached=detached,
                    tasks=tasks,
                    http=cache(lambda: _make_http(lazy_client)),
                    proxies=proxies,
                    ports=cache(lambda: _make_ports(options)),
                    concurrent_requests=options.concurrent_requests,
                    ripgrep=interpreter.find_system_program("rg"),
                )
            finally:
                async with asyncio.TaskGroup() as ending:
                    for end in (sessions.end_all, detached.end_all):
                        GuardedTasks(ending).create_task(end())
                sweeper.cancel()
                loader.cancel()
                proxies.close()
                await tasks.finish(END_SECONDS)
        await lazy_client.close()
    finally:
        if inotify.cache_info().currsize:
            inotify().close()
        sandboxes.close()
        reaper.close()
        for pool in (spawn_threads, cleanup_threads, file_threads, decode_threads, lookup_threads):
            pool.close()


def _table_maker(
    reaper: Reaper, spawning: ThreadPool, cleaning: ThreadPool, retention: float
) -> MakeTable:
    return partial(
        ProcessTable,
        reaper=reaper,
        spawn_threads=spawning,
        cleanup_threads=cleaning,
        recent_budget=RecentOutputBudget(SERVER_RECENT_BYTES),
        retention_budget=RetentionBudget(SERVER_RETAINED_BYTES),
        retention_seconds=retention,
    )


async def _load_when_idle(
    sandboxes: Sandboxes, sessions: SessionRegistry, threads: ThreadPool
) -> None:
    """Load the sandboxes and all methods once the server has nothing else to do."""
    while not sandboxes.is_loaded:
        began = time.process_time()
        await asyncio.sleep(SWEEP_SECONDS)
        if sessions.has_had_clients and time.process_time() - began < IDLE_SECONDS:
            try:
                await threads.run(load_all)
                await threads.run(sandboxes.load)
            except (ExecServerError, ImportError, OSError) as error:
                log.warning("sandboxes and methods could not be loaded ahead: %s", error)
                return  # a confined request tries again, and its answer has the reason


async def _sweep(sandboxes: Sandboxes, sessions: SessionRegistry, threads: ThreadPool) -> None:
    """Release idle workers, unused sandboxes, overdue sessions and free memory, until cancelled."""
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        guarded_call(sessions.expire_overdue)
        guarded_call(sandboxes.drop_idle)
        # In a thread, because the kernel takes some milliseconds for each ten megabytes; but not
        # in one that may hang on a dead disk.
        await threads.run(libc.return_freed_memory)


async def serve_websocket(
    bound: Sequence[BoundSocket],
    stop: asyncio.Event,
    *,
    options: Options,
    variables: Mapping[str, str],
    authenticate: Authenticator | None = None,
    allowed_hosts: frozenset[str] | None = None,
    certificate: ServerCertificate | None = None,
    reload: asyncio.Event | None = None,
) -> None:
    """Serve bound sockets until `stop` is set; `reload` has the certificate read again."""
    # For this transport only.
    from exec_server.net.websocket.server import WebSocketListener, WebSocketSettings

    async with _server_context(options, variables) as server:
        settings = WebSocketSettings(
            lambda stream: Connection(server, stream), authenticate, allowed_hosts
        )
        listener = WebSocketListener(bound, settings, server.tasks, certificate)
        reloader = None
        if certificate is not None and reload is not None:
            reloader = server.tasks.create_task(
                _reload_on_request(certificate, reload, server.file_threads)
            )
        try:
            await listener.open()
            await stop.wait()
        finally:
            if reloader is not None:
                reloader.cancel()
            await listener.close()


async def _reload_on_request(
    certificate: ServerCertificate, requested: asyncio.Event, threads: ThreadPool
) -> None:
    while True:
        await requested.wait()
        requested.clear()
        try:
            await threads.run(certificate.reload)
        except (StartupError, OSError, ValueError) as error:
            log.error("the former certificate stays in use: %s", error)
        else:
            log.info("the certificate was read again; new connections use it")


async def serve_stdio(
    stop: asyncio.Event, *, options: Options, variables: Mapping[str, str]
) -> None:
    """Serve the one connection on stdin and stdout until either ends or `stop` is set."""
    from exec_server.net.stdio import StdioStream  # for this transport only

    async with _server_context(options, variables) as server:
        stream = StdioStream(lambda stream: Connection(server, stream))
        await stream.open(os.dup(0), os.dup(1))
        stream.ended.add_done_callback(lambda _: stop.set())
        await stop.wait()
        stream.close(0, "server is shutting down")
    await stream.flush()


async def serve_remote(
    executor: Executor,
    stop: asyncio.Event,
    *,
    watch: Callable[[], Coroutine[Any, Any, None]],
    options: Options,
    variables: Mapping[str, str],
) -> None:
    """Serve the connections of an executor until `stop` is set or `watch` ends."""
    async with _server_context(options, variables) as server:
        serving = executor.serve(
            lambda stream: Connection(server, stream), server.sessions.end_of_stream, server.tasks
        )
        failures = await _run_executor(serving, server.tasks, stop, watch)
    for failure in failures:
        raise failure


async def forward_remote(
    executor: Executor,
    make_receiver: Callable[[GuardedTasks], ReceiverFactory],
    stop: asyncio.Event,
    *,
    watch: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    """Forward the connections of an executor until `stop` is set or `watch` ends."""
    async with asyncio.TaskGroup() as group:
        tasks = GuardedTasks(group)
        # The sessions are those of another server, which is not told.
        serving = executor.serve(make_receiver(tasks), lambda stream_id: None, tasks)
        failures = await _run_executor(serving, tasks, stop, watch)
        await tasks.finish(END_SECONDS)
    for failure in failures:
        raise failure


async def _run_executor(
    serving: Coroutine[Any, Any, None],
    tasks: GuardedTasks,
    stop: asyncio.Event,
    watch: Callable[[], Coroutine[Any, Any, None]],
) -> list[Exception]:
    """Run an executor until it fails, `watch` ends or `stop` is set; returns the failures."""
    failures: list[Exception] = []

    async def run(coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            await coroutine
        except Exception as error:  # raised again when the server has ended
            failures.append(error)
        stop.set()

    runners = [tasks.create_task(run(coroutine)) for coroutine in (serving, watch())]
    await stop.wait()
    for runner in runners:
        runner.cancel()
    await asyncio.wait(runners)
    return failures
