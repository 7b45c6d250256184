"""ServerContext and ConnectionContext: the resources that handlers work with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, ParamSpec, TypeVar

import msgspec

from exec_server.codex.capability_cache import CapabilityCache
from exec_server.filesystem.change_watch import ChangeWatch
from exec_server.filesystem.handles import HandleTable
from exec_server.filesystem.inotify import Inotify
from exec_server.filesystem.watch import MissingWatch
from exec_server.host.guarded_tasks import GuardedTasks, guarded_call
from exec_server.host.http import HttpResources
from exec_server.host.threads import ThreadPool
from exec_server.protocol.decoding import Result
from exec_server.protocol.method import Notice
from exec_server.protocol.session import EnvironmentInfo
from exec_server.proxy.resources import ProxyResources
from exec_server.sandbox.sandboxes import Sandboxes
from exec_server.server.detached import DetachedProcesses
from exec_server.server.lazy_event import LazyEvent
from exec_server.server.port_table import PortResources, PortTable
from exec_server.server.session import Session, SessionRegistry
from exec_server.server.shell_snapshots import ShellSnapshots

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


class ServerContext(msgspec.Struct, frozen=True, kw_only=True):
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
    tasks: GuardedTasks
    http: HttpResources | None = None  # None: http/request is refused
    ports: PortResources | None = None  # None: port/open and port/listen are refused
    proxies: ProxyResources | None = None  # None: in tests without proxies
    concurrent_requests: int = 1  # of one connection
    ripgrep: str | None = None  # its path, if the machine has one that only root can replace
    search_slots: asyncio.Semaphore = msgspec.field(
        default_factory=lambda: asyncio.Semaphore(CONCURRENT_SEARCHES)
    )
    capability_cache: CapabilityCache = msgspec.field(default_factory=CapabilityCache)
    shell_snapshots: ShellSnapshots = msgspec.field(default_factory=ShellSnapshots)


class Encoded(msgspec.Struct, frozen=True):
    """A result in the form of JSON text: file content, which is encoded faster without a struct."""

    text: bytes


class WithData(msgspec.Struct, frozen=True):
    """A result whose data travels in a binary message."""

    result: Result
    data: bytes


class Streamed(msgspec.Struct, frozen=True):
    """A result too large for memory: the parts of its JSON text, and their total size."""

    size: int
    parts: AsyncIterator[bytes]


class ConnectionContext:
    """The session of a connection and the resources that end with the connection."""

    __slots__ = (
        "change_watches",
        "handles",
        "has_binary",
        "http_slots",
        "http_streams",
        "notify",
        "ports",
        "search_slots",
        "server",
        "session",
        "start_task",
        "watch",
        "writable",
    )

    def __init__(
        self,
        server: ServerContext,
        session: Session,
        notify: Callable[[Notice[msgspec.Struct], msgspec.Struct], None],
        start_task: Callable[[Coroutine[Any, Any, None]], bool],
        writable: LazyEvent,
        *,
        has_binary: bool = False,
    ) -> None:
        self.server = server
        self.session = session
        self.notify = notify
        # Runs a task that outlives its request and is cancelled at the end of the connection;
        # returns False, without running the coroutine, if the connection has already ended.
        self.start_task = start_task
        self.writable = writable  # cleared while the send buffer is full
        self.has_binary = has_binary  # the connection carries binary messages
        self.handles = HandleTable()
        self.watch = MissingWatch(server.inotify)
        self.change_watches: dict[int, ChangeWatch] = {}  # by watch id
        self.ports = PortTable(server.ports, notify)
        self.http_streams: set[str] = set()  # request ids of bodies being streamed
        self.http_slots = asyncio.Semaphore(CONCURRENT_HTTP_REQUESTS)
        self.search_slots = asyncio.Semaphore(CONNECTION_SEARCHES)

    @property
    def environment(self) -> EnvironmentInfo:
        """The description of the server for this connection."""
        return environment_for(self.server.environment, has_binary=self.has_binary)

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
        """Close everything, also what follows a part that fails."""
        guarded_call(self.handles.close_all)
        guarded_call(self.watch.close)
        for watch in self.change_watches.values():
            guarded_call(watch.close)
        self.change_watches.clear()
        guarded_call(self.ports.close)


def environment_for(environment: EnvironmentInfo, *, has_binary: bool) -> EnvironmentInfo:
    """The description of a server for a connection with or without binary messages."""
    if not has_binary:
        return environment
    capabilities = msgspec.structs.replace(environment.capabilities, fs_binary=True)
    return msgspec.structs.replace(environment, capabilities=capabilities)
