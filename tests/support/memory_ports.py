"""Sockets and listeners of forwarded connections in memory: the test is the other program."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ClassVar

from exec_server.net.port_stream import PortStream


class MemorySocket:
    """A socket of `server.port_table`."""

    resumed: ClassVar[list[MemorySocket]] = []

    def __init__(self) -> None:
        self.is_reading = False
        self.is_lost = False
        self.written = b""
        self.calls: list[str] = []
        self._stream: PortStream | None = None

    def attach(self, stream: PortStream) -> None:
        self._stream = stream

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True
        self.resumed.append(self)

    def write(self, data: bytes) -> None:
        self.written += data

    def write_eof(self) -> None:
        self.calls.append("write_eof")

    def unwritten(self) -> int:
        return 0

    def close(self) -> None:
        self.calls.append("close")

    def abort(self) -> None:
        self.calls.append("abort")

    # ---- the other program ------------------------------------------------------------

    def read(self, data: bytes) -> None:
        assert self.is_reading
        assert self._stream is not None
        self._stream.data_read(data)

    def read_eof(self) -> None:
        assert self._stream is not None
        self._stream.eof_read()

    def lose(self, reason: str = "connection closed") -> None:
        if self._stream is not None and not self.is_lost:
            self.is_lost = True
            self._stream.socket_lost(reason)


class MemoryListener:
    def __init__(
        self, sockets: MemorySockets, port: int, accept: Callable[[MemorySocket], None]
    ) -> None:
        self.port = port or 40_000
        self.is_closed = False
        self._sockets = sockets
        self._accept = accept

    def close(self) -> None:
        self.is_closed = True

    def connect(self) -> MemorySocket:
        """A program connects to the port."""
        socket = self._sockets.make()
        self._accept(socket)
        return socket


class MemorySockets:
    """The `PortSockets` of a server; they fail with `failure` and wait for `gate`."""

    def __init__(self) -> None:
        self.made: list[MemorySocket] = []
        self.connected: list[MemorySocket] = []
        self.dialled: list[tuple[str | None, int]] = []
        self.listeners: list[MemoryListener] = []
        self.failure: Exception | None = None
        self.gate: asyncio.Event | None = None

    def make(self) -> MemorySocket:
        self.made.append(MemorySocket())
        return self.made[-1]

    async def connect(self, host: str | None, port: int) -> MemorySocket:
        self.dialled.append((host, port))
        await self._wait()
        self.connected.append(self.make())
        return self.connected[-1]

    async def listen(self, port: int, accept: Callable[[MemorySocket], None]) -> MemoryListener:
        await self._wait()
        self.listeners.append(MemoryListener(self, port, accept))
        return self.listeners[-1]

    async def _wait(self) -> None:
        if self.gate is not None:
            await self.gate.wait()
        if self.failure is not None:
            raise self.failure
