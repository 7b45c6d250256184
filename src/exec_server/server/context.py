"""ServerContext and ConnectionContext: the resources that handlers work with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import msgspec

from exec_server.filesystem.change_watch import ChangeWatch
from exec_server.filesystem.handles import HandleTable
from exec_server.filesystem.inotify import Inotify
from exec_server.filesystem.watch import MissingWatch
from exec_server.host.http import HttpResources
from exec_server.host.threads import ThreadPool
from exec_server.protocol.method import Notice
from exec_server.protocol.session import EnvironmentInfo
from exec_server.sandbox.sandboxes import Sandboxes
from exec_server.server.detached import DetachedProcesses
from exec_server.server.port_table import PortResources, PortTable
from exec_server.server.session import Session, SessionRegistry

A = ParamSpec("A")
T = TypeVar("T")

# HTTP requests of one connection that wait for their responses at the same time, each with a
# socket: far more than clients make at once. Further ones wait.
CONCURRENT_HTTP_REQUESTS = 32
# Searches of all clients at the same time: each takes a processor and a thread for file operations
# for seconds. Further ones wait.
CONCURRENT_SEARCHES = 4
# Those of one connection: one slot stays free for others, however many it asks for. Further ones
# wait for each other, and not in the queue of all clients.
CONNECTION_SEARCHES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerContext:
    """The resources that all connections of a server share."""

    environment: EnvironmentInfo
    variables: Mapping[str, str]  # the environment variables that children may inherit
    login_shell: str
    file_threads: ThreadPool
    decode_threads: ThreadPool
    inotify: Inotify
    sandboxes: Sandboxes
    sessions: SessionRegistry
    detached: DetachedProcesses
    tasks: asyncio.TaskGroup
    http: HttpResources | None = None  # None: http/request is refused
    ports: PortResources | None = None  # None: port/open and port/listen are refused
    concurrent_requests: int = 1  # of one connection
    legacy_sandbox_forms: bool = False  # translate `sandbox` objects of earlier versions
    search_slots: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(CONCURRENT_SEARCHES)
    )


@dataclass(frozen=True, slots=True)
class Encoded:
    """A result in the form of JSON text: file content, which is encoded faster without a struct."""

    text: bytes


@dataclass(frozen=True, slots=True)
class Streamed:
    """A result too large for memory: the parts of its JSON text, and their total size."""

    size: int
    parts: AsyncIterator[bytes]


@dataclass(slots=True)
class ConnectionContext:
    """The session of a connection and the resources that end with the connection."""

    server: ServerContext
    session: Session
    notify: Callable[[Notice[msgspec.Struct], msgspec.Struct], None]
    # Runs a task that outlives its request and is cancelled at the end of the connection; returns
    # False, without running the coroutine, if the connection has already ended.
    start_task: Callable[[Coroutine[Any, Any, None]], bool]
    writable: asyncio.Event  # cleared while the send buffer is full
    handles: HandleTable = field(default_factory=HandleTable)
    watch: MissingWatch = field(init=False)
    change_watches: dict[int, ChangeWatch] = field(default_factory=dict)  # by watch id
    ports: PortTable = field(init=False)
    http_streams: set[str] = field(default_factory=set)  # request ids of bodies being streamed
    http_slots: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(CONCURRENT_HTTP_REQUESTS)
    )
    search_slots: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(CONNECTION_SEARCHES)
    )

    def __post_init__(self) -> None:
        self.watch = MissingWatch(self.server.inotify)
        self.ports = PortTable(self.server.ports, self.notify)

    def in_thread(
        self, function: Callable[A, T], *args: A.args, **kwargs: A.kwargs
    ) -> asyncio.Future[T]:
        """Run a function that may block."""
        assert not kwargs
        return self.server.file_threads.run(function, *args)

    async def drain(self) -> None:
        """Wait until the send buffer is no longer full."""
        while not self.writable.is_set():
            await self.writable.wait()

    def pause_writing(self) -> None:
        """Read neither output of processes nor from forwarded connections."""
        self.session.pause_writing()
        self.ports.pause_reading()

    def resume_writing(self) -> None:
        self.session.resume_writing()
        self.ports.resume_reading()

    def close(self) -> None:
        self.handles.close_all()
        self.watch.close()
        for watch in self.change_watches.values():
            watch.close()
        self.change_watches.clear()
        self.ports.close()
