"""What a handler works with: its session, and what belongs to the connection alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from exec_server.core.handles import HandleTable
from exec_server.core.http import Means
from exec_server.core.threads import Threads
from exec_server.core.watch import MissingWatch
from exec_server.protocol.method import Notice
from exec_server.protocol.session import EnvironmentInfo
from exec_server.rpc.session import Session
from exec_server.sandbox.sandboxes import Sandboxes

T = TypeVar("T")

# HTTP requests of one connection that wait for their answers at the same time, each with a
# socket: far more than clients make at once. Further ones wait for their turn.
HTTP_TURNS = 32


@dataclass(frozen=True, slots=True)
class Machine:
    """What all connections of a server share."""

    environment: EnvironmentInfo
    variables: Mapping[str, str]  # what children may inherit
    login_shell: str
    file_threads: Threads
    sandboxes: Sandboxes
    http: Means | None = None  # None: no requests are made for clients


@dataclass(frozen=True, slots=True)
class Encoded:
    """A result that is JSON text already: file content, encoded faster than by a struct."""

    text: bytes


@dataclass(frozen=True, slots=True)
class Streamed:
    """A result too large to hold: its JSON text, piece by piece, and how long that will be."""

    size: int
    parts: AsyncIterator[bytes]


@dataclass(slots=True)
class Scope:
    """A session on one connection; `close` gives back what the connection owned."""

    machine: Machine
    session: Session
    notify: Callable[[Notice[msgspec.Struct], msgspec.Struct], None]
    # Runs something that goes on after its request was answered, until the connection ends; if
    # that has ended already, says no.
    start: Callable[[Coroutine[Any, Any, None]], bool]
    sendable: asyncio.Event  # set while the client takes what we send
    handles: HandleTable = field(default_factory=HandleTable)
    watch: MissingWatch = field(default_factory=lambda: MissingWatch(asyncio.get_running_loop()))
    http_streams: set[str] = field(default_factory=set)  # the ids of bodies being streamed
    http_turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(HTTP_TURNS))

    def in_thread(self, function: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        """Run something that may block."""
        return self.machine.file_threads.run(function, *arguments)

    async def until_sendable(self) -> None:
        """Wait while the client does not take what we send."""
        while not self.sendable.is_set():
            await self.sendable.wait()

    def close(self) -> None:
        self.handles.close_all()
        self.watch.close()
