"""ServerContext and ConnectionContext: the resources that handlers work with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import msgspec

from exec_server.errors import InvalidParams
from exec_server.host.event_loop import GuardedTasks, guarded_call
from exec_server.host.threads import ThreadPool
from exec_server.protocol.decoding import Notice, Result
from exec_server.protocol.sandbox import Sandbox
from exec_server.protocol.session import EnvironmentInfo
from exec_server.server.session import Session, SessionRegistry

if TYPE_CHECKING:
    from exec_server.codex.installed import CapabilityCache
    from exec_server.filesystem.handles import HandleTable
    from exec_server.filesystem.inotify import Inotify
    from exec_server.filesystem.watch import ChangeWatch, MissingWatch
    from exec_server.host.http import HttpResources
    from exec_server.proxy.resources import ProxyResources
    from exec_server.sandbox.sandboxes import Sandboxes
    from exec_server.server.detached import DetachedProcesses
    from exec_server.server.port_table import PortResources, PortTable
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


class LazyEvent:
    """An event that makes its asyncio.Event, whose queue takes 800 bytes, for the first waiter."""

    __slots__ = ("_event", "_is_set")

    def __init__(self) -> None:
        self._is_set = False
        self._event: asyncio.Event | None = None  # while tasks wait

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Wake all tasks that wait."""
        self._is_set = True
        if self._event is not None:
            self._event.set()
            self._event = None

    def clear(self) -> None:
        self._is_set = False

    async def wait(self) -> None:
        """Wait until the event is set; it may be cleared again by then."""
        if not self._is_set:
            if self._event is None:
                self._event = asyncio.Event()
            await self._event.wait()


def _make_capability_cache() -> CapabilityCache:
    from exec_server.codex.installed import CapabilityCache

    return CapabilityCache()


def _make_shell_snapshots() -> ShellSnapshots:
    from exec_server.server.shell_snapshots import ShellSnapshots

    return ShellSnapshots()


class ServerContext(msgspec.Struct, frozen=True, kw_only=True):
    """The resources that all connections of a server share; callables import on the first call."""

    environment: EnvironmentInfo
    variables: Mapping[str, str]  # the environment variables that children may inherit
    login_shell: str
    file_threads: ThreadPool
    decode_threads: ThreadPool
    inotify: Callable[[], Inotify]
    sandboxes: Sandboxes
    sessions: SessionRegistry
    detached: DetachedProcesses
    tasks: GuardedTasks
    http: Callable[[], HttpResources] | None = None  # None: http/request is refused
    ports: Callable[[], PortResources] | None = None  # None: port/open and port/listen are refused
    proxies: ProxyResources | None = None  # None: in tests without proxies
    concurrent_requests: int = 1  # of one connection
    ripgrep: str | None = None  # its path, if the machine has one that only root can replace
    search_slots: asyncio.Semaphore = msgspec.field(
        default_factory=lambda: asyncio.Semaphore(CONCURRENT_SEARCHES)
    )
    capability_cache: Callable[[], CapabilityCache] = msgspec.field(
        default_factory=lambda: cache(_make_capability_cache)
    )
    shell_snapshots: Callable[[], ShellSnapshots] = msgspec.field(
        default_factory=lambda: cache(_make_shell_snapshots)
    )


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
        *("_handles", "_ports", "_watch", "change_watches", "has_binary", "http_slots"),
        *("http_streams", "notify", "search_slots", "server", "session", "start_task"),
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
        self._handles: HandleTable | None = None
        self._watch: MissingWatch | None = None
        self.change_watches: dict[int, ChangeWatch] = {}  # by watch id
        self._ports: PortTable | None = None
        self.http_streams: set[str] = set()  # request ids of bodies being streamed
        self.http_slots = asyncio.Semaphore(CONCURRENT_HTTP_REQUESTS)
        self.search_slots = asyncio.Semaphore(CONNECTION_SEARCHES)

    @property
    def handles(self) -> HandleTable:
        """The open files of the connection."""
        if self._handles is None:
            from exec_server.filesystem.handles import HandleTable

            self._handles = HandleTable()
        return self._handles

    @property
    def watch(self) -> MissingWatch:
        """The paths whose creation the client awaits."""
        if self._watch is None:
            from exec_server.filesystem.watch import MissingWatch

            self._watch = MissingWatch(self.server.inotify())
        return self._watch

    @property
    def ports(self) -> PortTable:
        """The forwarded connections and listeners."""
        if self._ports is None:
            from exec_server.server.port_table import PortTable

            resources = None if self.server.ports is None else self.server.ports()
            self._ports = PortTable(resources, self.notify)
            if not self.writable.is_set():
                self._ports.pause_reading()
        return self._ports

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
        if self._ports is not None:
            self._ports.pause_reading()

    def resume_writing(self) -> None:
        self.session.resume_writing()
        if self._ports is not None:
            self._ports.resume_reading()

    def close(self) -> None:
        """Close everything, also what follows a part that fails."""
        if self._handles is not None:
            guarded_call(self._handles.close_all)
        if self._watch is not None:
            guarded_call(self._watch.close)
        for watch in self.change_watches.values():
            guarded_call(watch.close)
        self.change_watches.clear()
        if self._ports is not None:
            guarded_call(self._ports.close)


def environment_for(environment: EnvironmentInfo, *, has_binary: bool) -> EnvironmentInfo:
    """The description of a server for a connection with or without binary messages."""
    if not has_binary:
        return environment
    capabilities = msgspec.structs.replace(
        environment.capabilities, fs_binary=True, process_binary=True
    )
    return msgspec.structs.replace(environment, capabilities=capabilities)


def check_user(info: EnvironmentInfo, sandbox: Sandbox | None) -> None:
    """Raise InvalidParams for a request with a user, if it cannot be performed."""
    if not info.capabilities.other_users:
        raise InvalidParams("user: this exec-server does not have the rights of root")
    if sandbox is not None:
        raise InvalidParams("user and sandbox exclude each other")
