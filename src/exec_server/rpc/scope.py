"""What a handler works with: its session, and what belongs to the connection alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from exec_server.core.handles import HandleTable
from exec_server.core.watch import MissingWatch
from exec_server.protocol.method import Notice
from exec_server.protocol.session import EnvironmentInfo
from exec_server.rpc.session import Session
from exec_server.sandbox.sandboxes import Sandboxes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Machine:
    """What all connections of a server share."""

    environment: EnvironmentInfo
    variables: Mapping[str, str]  # what children may inherit
    login_shell: str
    file_threads: Executor
    sandboxes: Sandboxes


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
    handles: HandleTable = field(default_factory=HandleTable)
    watch: MissingWatch = field(default_factory=lambda: MissingWatch(asyncio.get_running_loop()))

    def in_thread(self, function: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        """Run something that may block."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self.machine.file_threads, function, *arguments)

    def close(self) -> None:
        self.handles.close_all()
        self.watch.close()
