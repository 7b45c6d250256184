"""Forwarded ports of an environment in memory: the test is the server and the other programs."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from typing import Any
from unittest import mock

from exec_server.client import port_forwarding as module
from exec_server.client.port_forwarding import PortForward, ReversePort
from tests.support.memory_environment import OURS, Scene, in_environment, turns
from tests.support.memory_ports import MemoryListener, MemorySocket, MemorySockets

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
