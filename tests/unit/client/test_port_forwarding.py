"""Forwarded ports with a server that is the test, and sockets in memory."""

from __future__ import annotations

import asyncio
import base64
import copy
from collections.abc import Awaitable, Callable
from typing import Any
from unittest import mock

import pytest
from tests.support.memory_environment import OURS, Scene, in_environment, turns
from tests.support.memory_ports import MemoryListener, MemorySocket, MemorySockets

from exec_server.client import port_forwarding as module
from exec_server.client.port_forwarding import PortForward, ReversePort
from exec_server.errors import InternalError, InvalidRequest, Unsupported
from exec_server.net.port_stream import WINDOW_BYTES

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


# ---- to the server --------------------------------------------------------------------


@ports
async def test_bytes_pass_in_both_directions(scene: Scene, sockets: MemorySockets) -> None:
    forward, listener = await forwarded(scene, sockets)
    assert (forward.port, forward.url) == (40_000, "http://127.0.0.1:40000")
    socket = listener.connect()
    request = await scene.stream.next("port/open")
    stream_id = request["params"].pop("streamId")
    assert request["params"] == {"port": 3000, "window": WINDOW_BYTES, "host": None}
    assert not socket.is_reading
    scene.stream.answer(request, {"window": 5})
    await turns()
    socket.read(b"hello")
    assert not socket.is_reading
    assert await told(scene, "data") == {
        "streamId": stream_id,
        "chunk": base64.b64encode(b"hello").decode(),
    }
    tell(scene, "credit", stream_id, bytes=1)
    assert socket.is_reading
    tell(scene, "data", stream_id, chunk=base64.b64encode(bytes(WINDOW_BYTES)).decode())
    assert len(socket.written) == WINDOW_BYTES
    assert await told(scene, "credit") == {"streamId": stream_id, "bytes": WINDOW_BYTES}
    socket.read_eof()
    assert await told(scene, "end") == {"streamId": stream_id}
    tell(scene, "end", stream_id)
    assert socket.calls == ["close"]
    socket.lose()
    tell(scene, "data", stream_id, chunk="eA==")  # it has ended
    await forward.__aexit__(None, None, None)
    assert listener.is_closed


@ports
async def test_a_refused_connection_is_reset(scene: Scene, sockets: MemorySockets) -> None:
    _, listener = await forwarded(scene, sockets)
    socket = listener.connect()
    scene.stream.refuse(await scene.stream.next("port/open"), -32603, "Connection refused")
    await turns()
    assert socket.calls == ["abort"]
    socket.lose()


@ports
async def test_a_host_that_the_server_refuses(scene: Scene, sockets: MemorySockets) -> None:
    forward = scene.env.forward_port(80, host="example.com")

    async def enter() -> None:
        with pytest.raises(InvalidRequest, match="--allow-port-hosts"):
            await forward

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(enter())
        request = await scene.stream.next("port/probe")
        assert request["params"] == {"port": 80, "host": "example.com"}
        scene.stream.refuse(request, -32600, "only with --allow-port-hosts")
    assert sockets.listeners == []


@ports
async def test_a_host_that_does_not_answer_yet(scene: Scene, sockets: MemorySockets) -> None:
    forward = scene.env.forward_port(80, host="example.com")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(forward.__aenter__())
        scene.stream.refuse(await scene.stream.next("port/probe"), -32603, "timed out")
    assert forward.is_open


@ports
async def test_a_reset_of_the_server(scene: Scene, sockets: MemorySockets) -> None:
    _, listener = await forwarded(scene, sockets)
    socket, stream_id = await opened(scene, listener)
    tell(scene, "reset", stream_id, reason="broken")
    assert socket.calls == ["abort"]
    socket.lose()
    tell(scene, "reset", stream_id, reason="again")


@ports
async def test_leaving_resets_the_connections(scene: Scene, sockets: MemorySockets) -> None:
    forward, listener = await forwarded(scene, sockets)
    _, other_listener = await forwarded(scene, sockets)
    socket, stream_id = await opened(scene, listener)
    other, _ = await opened(scene, other_listener)
    await forward.__aexit__(None, None, None)
    assert (socket.calls, other.calls) == (["abort"], [])
    assert await told(scene, "reset") == {"streamId": stream_id}
    assert listener.connect().calls == ["abort"]  # it was accepted too late
    socket.lose()


@ports
async def test_a_connection_that_breaks_before_it_is_open(
    scene: Scene, sockets: MemorySockets
) -> None:
    _, listener = await forwarded(scene, sockets)
    socket = listener.connect()
    request = await scene.stream.next("port/open")
    socket.lose()
    await told(scene, "reset")
    scene.stream.answer(request, {"window": 5})
    await told(scene, "reset")


def test_connections_wait_for_their_turn_to_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OPENING", 1)

    async def play(scene: Scene, sockets: MemorySockets) -> None:
        _, listener = await forwarded(scene, sockets)
        listener.connect()
        impatient = listener.connect()
        last = listener.connect()
        request = await scene.stream.next("port/open")
        await turns()
        assert scene.stream.is_quiet
        impatient.lose()
        await told(scene, "reset")
        scene.stream.answer(request, {"window": 5})
        scene.stream.answer(await scene.stream.next("port/open"), {"window": 5})
        await turns()
        assert last.is_reading

    ports(play)()


def test_the_number_of_streams_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_STREAMS", 1)

    async def play(scene: Scene, sockets: MemorySockets) -> None:
        _, listener = await forwarded(scene, sockets)
        await opened(scene, listener)
        assert listener.connect().calls == ["abort"]
        _, listener_id = await listening(scene)
        params = {"listenerId": listener_id, "streamId": "s", "window": 5}
        scene.stream.say({"method": "port/accepted", "params": params})
        assert await told(scene, "reset") == {"streamId": "s"}

    ports(play)()


@ports
async def test_a_forward_survives_its_connection(scene: Scene, sockets: MemorySockets) -> None:
    _, listener = await forwarded(scene, sockets)
    socket, _ = await opened(scene, listener)
    await scene.reconnected()
    assert socket.calls == ["abort"]
    socket.lose()
    another, _ = await opened(scene, listener)
    assert another.is_reading


def test_a_forward_ends_with_the_environment() -> None:
    made: list[Any] = []

    async def play(scene: Scene, sockets: MemorySockets) -> None:
        _, listener = await forwarded(scene, sockets)
        socket, _ = await opened(scene, listener)
        made.extend((socket, listener))

    ports(play)()
    socket, listener = made
    assert (socket.calls, listener.is_closed) == (["abort"], True)


@ports
async def test_ports_survive_the_loss_of_the_session(scene: Scene, sockets: MemorySockets) -> None:
    _, listener = await forwarded(scene, sockets)
    reverse, _ = await listening(scene)
    socket, _ = await opened(scene, listener)
    scene.env.session._end("the server was restarted")
    assert (socket.calls, listener.is_closed) == (["abort"], False)
    refused = listener.connect()
    await turns()
    assert refused.calls == ["abort"]
    for each in (socket, refused):
        each.lose()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(scene.env.reconnect())
        scene.stream = await scene.dialer.stream()
        await scene.stream.past_handshake()
    await told(scene, "closeListener")
    await answer_listen(scene, 7000)
    another, _ = await opened(scene, listener)
    assert another.is_reading
    assert reverse.is_open


@ports
async def test_a_session_that_is_lost_while_a_port_is_requested_again(
    scene: Scene, sockets: MemorySockets
) -> None:
    reverse, _ = await listening(scene)
    await scene.reconnected()
    await told(scene, "closeListener")
    await scene.stream.next("port/listen")
    scene.env.session._end("the server was restarted")
    await turns()
    assert not reverse._is_requested


# ---- from the server ------------------------------------------------------------------


async def accepted(scene: Scene, listener_id: str, stream_id: str = "s") -> None:
    params = {"listenerId": listener_id, "streamId": stream_id, "window": 5}
    scene.stream.say({"method": "port/accepted", "params": params})
    await turns()


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
        with pytest.raises(InternalError, match="Address in use"):
            await reverse.__aenter__()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(enter())
        request = await scene.stream.next("port/listen")
        scene.stream.refuse(request, -32603, "Address in use")
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


# ---- both -----------------------------------------------------------------------------


@in_environment
async def test_a_server_that_forwards_no_ports(scene: Scene) -> None:
    for refused in (scene.env.forward_port(80).__aenter__, scene.env.reverse_port(80).__aenter__):
        with pytest.raises(Unsupported, match="portForward"):
            await refused()


@ports
async def test_ports_are_checked(scene: Scene, sockets: MemorySockets) -> None:
    for call in (
        lambda: scene.env.forward_port(0),
        lambda: scene.env.forward_port(80, local_port=65_536),
        lambda: scene.env.reverse_port(0),
        lambda: scene.env.reverse_port(80, remote_port=-1),
    ):
        with pytest.raises(ValueError, match="a port must be"):
            call()
    with pytest.raises(TypeError, match="not str"):
        scene.env.forward_port("80")  # type: ignore[arg-type]


@ports
async def test_other_notifications_are_ignored(scene: Scene, sockets: MemorySockets) -> None:
    _, listener = await forwarded(scene, sockets)
    socket, _ = await opened(scene, listener)
    scene.stream.notify_output(1)
    assert (socket.written, socket.calls) == (b"", [])


@ports
async def test_ports_can_be_awaited_and_closed(scene: Scene, sockets: MemorySockets) -> None:
    forward, listener = await forwarded(scene, sockets)
    assert forward.is_open
    await forward.aclose()
    await forward.aclose()
    assert listener.is_closed
    reverse = scene.env.reverse_port(80)
    await reverse.aclose()
    await reverse._listen_again()
    assert scene.stream.is_quiet
