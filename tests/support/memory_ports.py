"""Forwarded ports in memory: the test is the server and the programs at both ends."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar
from unittest import mock

from exec_server.client import port_forwarding as module
from exec_server.client.port_forwarding import PortForward, ReversePort
from exec_server.net.port_stream import PortStream
from tests.support.memory_session import OURS, Scene, in_environment, turns


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


# Forwarded ports of an environment in memory: the test is the server and the other programs.


GREETING: dict[str, Any] = copy.deepcopy(OURS)
GREETING["environmentInfo"]["capabilities"]["portForward"] = True

Play = Callable[[Scene, MemorySockets], Awaitable[None]]


def ports(play: Play) -> Callable[[], None]:
    """A test with sockets in memory."""

    def test() -> None:
        sockets = MemorySockets()

        async def scene(scene: Scene) -> None:
            await play(scene, sockets)

        with (
            mock.patch.object(module, "listen", sockets.listen),
            mock.patch.object(module, "connect", sockets.connect),
        ):
            in_environment(scene, GREETING)()

    test.__doc__ = play.__doc__
    return test


async def forwarded(scene: Scene, sockets: MemorySockets) -> tuple[PortForward, MemoryListener]:
    forward = scene.env.forward_port(3000)
    await forward
    return forward, sockets.listeners[-1]


async def opened(scene: Scene, listener: MemoryListener) -> tuple[MemorySocket, str]:
    """A local connection that the server has connected, and the id of its stream."""
    socket = listener.connect()
    request = await scene.stream.next("port/open")
    scene.stream.answer(request, {"window": 5})
    await turns()
    return socket, request["params"]["streamId"]


async def listening(scene: Scene) -> tuple[ReversePort, str]:
    """A reverse port, and the id of its listener."""
    reverse = scene.env.reverse_port(5000)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(reverse.__aenter__())
        listener_id = await answer_listen(scene, 0)
    return reverse, listener_id


async def answer_listen(scene: Scene, port: int) -> str:
    request = await scene.stream.next("port/listen")
    assert request["params"]["port"] == port
    scene.stream.answer(request, {"port": 7000})
    await turns()
    listener_id: str = request["params"]["listenerId"]
    return listener_id


def tell(scene: Scene, method: str, stream_id: str, **params: object) -> None:
    scene.stream.say({"method": f"port/{method}", "params": {"streamId": stream_id, **params}})


async def told(scene: Scene, method: str) -> dict[str, Any]:
    """The params of the next request, which is answered."""
    request = await scene.stream.next(f"port/{method}")
    scene.stream.answer(request, {})
    params: dict[str, Any] = request["params"]
    return params


async def accepted(scene: Scene, listener_id: str, stream_id: str = "s") -> None:
    params = {"listenerId": listener_id, "streamId": stream_id, "window": 5}
    scene.stream.say({"method": "port/accepted", "params": params})
    await turns()
