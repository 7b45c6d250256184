"""Ports of this machine that the server listens for, with a server that is the test."""

from __future__ import annotations

import asyncio
import base64
import errno

import pytest
from tests.support.memory_ports import (
    MemorySockets,
    accepted,
    answer_listen,
    forwarded,
    listening,
    opened,
    ports,
    tell,
    told,
)
from tests.support.memory_session import Scene, turns

from exec_server.client import port_forwarding as module
from exec_server.client.exceptions import PortError
from exec_server.errors import InternalError
from exec_server.net.port_stream import WINDOW_BYTES


@ports
async def test_a_connection_of_the_server_is_accepted(scene: Scene, sockets: MemorySockets) -> None:
    reverse, listener_id = await listening(scene)
    assert (reverse.port, reverse.url) == (7000, "http://127.0.0.1:7000")
    await accepted(scene, listener_id)
    [socket] = sockets.connected
    assert socket.is_reading
    assert await told(scene, "credit") == {"streamId": "s", "bytes": WINDOW_BYTES}
    tell(scene, "data", "s", chunk=base64.b64encode(b"hello").decode())
    assert socket.written == b"hello"
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(reverse.__aexit__(None, None, None))
        assert await told(scene, "closeListener") == {"listenerId": listener_id}
        assert await told(scene, "reset") == {"streamId": "s"}
    await accepted(scene, listener_id, "late")
    assert await told(scene, "reset") == {"streamId": "late"}
    socket.lose()


@ports
async def test_a_refused_connection_resets_the_stream(scene: Scene, sockets: MemorySockets) -> None:
    _, listener_id = await listening(scene)
    sockets.failure = ConnectionRefusedError(111, "Connection refused")
    await accepted(scene, listener_id)
    assert await told(scene, "reset") == {"streamId": "s"}


@ports
async def test_a_stream_that_is_reset_before_it_is_accepted(
    scene: Scene, sockets: MemorySockets
) -> None:
    _, listener_id = await listening(scene)
    sockets.gate = asyncio.Event()
    await accepted(scene, listener_id)
    tell(scene, "reset", "s", reason="gone")
    tell(scene, "end", "s")  # of a stream that does not exist
    sockets.gate.set()
    await turns()
    assert sockets.connected[0].calls == ["abort"]


@ports
async def test_an_id_of_a_reverse_stream_that_is_used_again(
    scene: Scene, sockets: MemorySockets
) -> None:
    """Two connections with one id would be counted as one, and one of them never be closed."""
    _, listener_id = await listening(scene)
    await accepted(scene, listener_id)
    await told(scene, "credit")
    for _ in range(3):
        await accepted(scene, listener_id)
    assert await told(scene, "reset") == {"streamId": "s"}
    [socket] = sockets.connected
    assert socket.calls == ["abort"]
    socket.lose()
    await accepted(scene, listener_id)  # the id is free again
    await told(scene, "credit")
    assert sockets.connected[1].calls == []


@ports
async def test_an_id_of_a_forwarded_stream_that_is_used_again(
    scene: Scene, sockets: MemorySockets
) -> None:
    _, listener = await forwarded(scene, sockets)
    socket, stream_id = await opened(scene, listener)
    _, listener_id = await listening(scene)
    await accepted(scene, listener_id, stream_id)
    assert await told(scene, "reset") == {"streamId": stream_id}
    assert (socket.calls, sockets.connected) == (["abort"], [])
    tell(scene, "data", stream_id, chunk="eA==")
    assert socket.written == b""


@ports
async def test_an_id_that_is_used_again_while_its_stream_is_connected(
    scene: Scene, sockets: MemorySockets
) -> None:
    _, listener_id = await listening(scene)
    sockets.gate = asyncio.Event()
    for _ in range(2):
        await accepted(scene, listener_id)
    assert await told(scene, "reset") == {"streamId": "s"}
    sockets.gate.set()
    await turns()
    [socket] = sockets.connected
    assert (socket.calls, scene.stream.is_quiet) == (["abort"], True)


def test_an_environment_does_not_wait_for_a_connection_being_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "CONNECT_SECONDS", 1e6)

    @ports
    async def closed(scene: Scene, sockets: MemorySockets) -> None:
        _, listener_id = await listening(scene)
        sockets.gate = asyncio.Event()  # which stays closed
        await accepted(scene, listener_id)

    closed()


@ports
async def test_a_port_that_is_closed_while_a_stream_is_connected(
    scene: Scene, sockets: MemorySockets
) -> None:
    reverse, listener_id = await listening(scene)
    _, other_id = await listening(scene)
    sockets.gate = asyncio.Event()
    await accepted(scene, listener_id)
    await accepted(scene, other_id, "other")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(reverse.__aexit__(None, None, None))
        await told(scene, "closeListener")
        assert await told(scene, "reset") == {"streamId": "s"}
    sockets.gate.set()
    await turns()
    assert await told(scene, "credit") == {"streamId": "other", "bytes": WINDOW_BYTES}
    assert [socket.calls for socket in sockets.connected] == [["abort"], []]


def test_streams_that_are_reset_while_they_are_connected_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_STREAMS", 1)

    async def play(scene: Scene, sockets: MemorySockets) -> None:
        _, listener = await forwarded(scene, sockets)
        _, listener_id = await listening(scene)
        sockets.gate = asyncio.Event()
        await accepted(scene, listener_id)
        tell(scene, "reset", "s", reason="gone")
        await accepted(scene, listener_id, "another")
        assert await told(scene, "reset") == {"streamId": "another"}
        assert len(sockets.dialled) == 1
        assert listener.connect().calls == ["abort"]
        sockets.gate.set()
        await turns()
        await accepted(scene, listener_id, "third")
        assert await told(scene, "credit") == {"streamId": "third", "bytes": WINDOW_BYTES}

    ports(play)()


@ports
async def test_a_connection_that_is_lost_while_a_stream_is_connected(
    scene: Scene, sockets: MemorySockets
) -> None:
    _, listener_id = await listening(scene)
    sockets.gate = asyncio.Event()
    await accepted(scene, listener_id)
    await scene.reconnected()
    sockets.gate.set()
    await turns()
    assert sockets.connected[0].calls == ["abort"]


@ports
async def test_a_stream_of_a_port_that_is_refused_afterwards(
    scene: Scene, sockets: MemorySockets
) -> None:
    """The server says that it has accepted a connection, and then that it does not listen."""
    reverse = scene.env.reverse_port(5000)

    async def enter() -> None:
        with pytest.raises(InternalError, match="Address in use"):
            await reverse.__aenter__()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(enter())
        request = await scene.stream.next("port/listen")
        await accepted(scene, request["params"]["listenerId"])
        await told(scene, "credit")
        scene.stream.refuse(request, -32603, "Address in use")
        await told(scene, "closeListener")
        assert await told(scene, "reset") == {"streamId": "s"}
    assert sockets.connected[0].calls == ["abort"]


@ports
async def test_a_port_that_cannot_be_listened_on(scene: Scene, sockets: MemorySockets) -> None:
    reverse = scene.env.reverse_port(5000, remote_port=80)

    async def enter() -> None:
        with pytest.raises(PortError, match="Address in use") as caught:
            await reverse.__aenter__()
        assert (caught.value.errno, caught.value.code) == (errno.EADDRINUSE, -32603)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(enter())
        request = await scene.stream.next("port/listen")
        scene.stream.refuse(request, -32603, "cannot listen: Address in use (os error 98)")
        await told(scene, "closeListener")
    await reverse.__aexit__(None, None, None)


@ports
async def test_the_server_listens_again_on_a_new_connection(
    scene: Scene, sockets: MemorySockets
) -> None:
    reverse, _ = await listening(scene)
    await scene.reconnected()
    await told(scene, "closeListener")
    request = await scene.stream.next("port/listen")  # and this answer is lost
    assert request["params"]["port"] == 7000
    await scene.reconnected()
    await told(scene, "closeListener")
    listener_id = await answer_listen(scene, 7000)
    await accepted(scene, listener_id)
    assert await told(scene, "credit") == {"streamId": "s", "bytes": WINDOW_BYTES}
    assert reverse.port == 7000


@ports
async def test_a_port_that_is_taken_meanwhile(scene: Scene, sockets: MemorySockets) -> None:
    reverse, _ = await listening(scene)
    await scene.reconnected()
    await told(scene, "closeListener")
    scene.stream.refuse(await scene.stream.next("port/listen"), -32603, "Address in use")
    await told(scene, "closeListener")
    assert reverse._listener_id is None


@ports
async def test_a_port_that_is_left_while_it_is_listened_on_again(
    scene: Scene, sockets: MemorySockets
) -> None:
    reverse, _ = await listening(scene)
    await scene.reconnected()
    await told(scene, "closeListener")
    request = await scene.stream.next("port/listen")
    await reverse.__aexit__(None, None, None)
    scene.stream.answer(request, {"port": 7000})
    closed = await told(scene, "closeListener")
    assert closed == {"listenerId": request["params"]["listenerId"]}


@ports
async def test_a_port_that_is_requested_while_there_is_no_connection(
    scene: Scene, sockets: MemorySockets
) -> None:
    """It is not requested a second time when the session is resumed."""
    scene.env._ports.prepare()
    scene.stream.lose()
    reverse = scene.env.reverse_port(5000)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(reverse.__aenter__())
        scene.stream = await scene.dialer.stream()
        await scene.stream.past_handshake()
        listener_id = await answer_listen(scene, 0)
    assert scene.stream.is_quiet
    await accepted(scene, listener_id)
    await told(scene, "credit")


@pytest.mark.parametrize("window", [-1, 2**32])
def test_a_window_out_of_range_is_malformed(window: int) -> None:
    async def play(scene: Scene, sockets: MemorySockets) -> None:
        _, listener = await forwarded(scene, sockets)
        refused = listener.connect()
        scene.stream.answer(await scene.stream.next("port/open"), {"window": window})
        await turns()
        assert refused.calls == ["abort"]
        refused.lose()
        socket, stream_id = await opened(scene, listener)
        tell(scene, "credit", stream_id, bytes=window)
        assert socket.calls == ["abort"]  # with the session

    ports(play)()
