"""Ports of the server that are forwarded here, with a server that is the test."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest
from tests.support.memory_ports import (
    MemorySockets,
    answer_listen,
    forwarded,
    listening,
    opened,
    ports,
    tell,
    told,
)
from tests.support.memory_session import Scene, in_environment, turns

from exec_server.client import port_forwarding as module
from exec_server.errors import InvalidRequest, Unsupported
from exec_server.net.port_stream import WINDOW_BYTES

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
