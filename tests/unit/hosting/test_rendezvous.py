"""The relay of bytes between two nodes, held to the behaviour of the proxy's tunnels."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Awaitable, Callable

import pytest
from tests.support.client import scaled
from tests.support.memory_transport import BYTE_RELAYS, StartRelay

from exec_server.host import event_loop
from exec_server.hosting.rendezvous import UNSENT_BYTES
from exec_server.net.socket_options import reset_on_close

Scenario = Callable[[socket.socket, socket.socket], Awaitable[None]]

# The relay's own bytes and those of four socket buffers, which the kernel makes twice as large as
# it is told.
WAITING_BYTES = 2 * UNSENT_BYTES + 4 * 2 * 65_536
# Turns of the loop after which a sender counts as blocked. Too few only make the test weaker.
BLOCKED_TURNS = 200

both_relays = pytest.mark.parametrize("start", BYTE_RELAYS.values(), ids=BYTE_RELAYS)


def _run(start: StartRelay, scenario: Scenario) -> None:
    async def run() -> None:
        async with asyncio.timeout(scaled(20)):
            client, holder = await start()
            with client, holder:
                await scenario(client, holder)

    event_loop.run(run())


async def _read_all(sock: socket.socket) -> bytes:
    """Everything up to the end of the direction."""
    received = b""
    while data := await asyncio.get_running_loop().sock_recv(sock, 65_536):
        received += data
    return received


@both_relays
def test_both_directions_have_equal_bytes(start: StartRelay) -> None:
    there, back = random.Random(1).randbytes(1_000_001), random.Random(2).randbytes(999_999)

    async def exchange(sender: socket.socket, receiver: socket.socket, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        received = bytearray()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(loop.sock_sendall(sender, data))
            while len(received) < len(data):
                received += await loop.sock_recv(receiver, 65_536)
        assert received == data

    async def scenario(client: socket.socket, holder: socket.socket) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(exchange(client, holder, there))
            tasks.create_task(exchange(holder, client, back))

    _run(start, scenario)


@both_relays
@pytest.mark.parametrize("is_back", [False, True], ids=["there", "back"])
def test_a_slow_receiver_stops_the_sender(start: StartRelay, is_back: bool) -> None:
    size = 4 * WAITING_BYTES

    async def scenario(client: socket.socket, holder: socket.socket) -> None:
        sender, receiver = (holder, client) if is_back else (client, holder)
        sent = received = most = blocked = 0
        while received < size:
            try:
                sent += sender.send(bytes(min(16_384, size - sent))) if sent < size else 0
            except BlockingIOError:
                blocked += 1
            if blocked > BLOCKED_TURNS or sent == size:
                blocked = 0
                received += len(await asyncio.get_running_loop().sock_recv(receiver, 16_384))
            most = max(most, sent - received)
            await asyncio.sleep(0)
        assert 65_536 < most <= WAITING_BYTES

    _run(start, scenario)


@both_relays
def test_bytes_before_an_end_arrive(start: StartRelay) -> None:
    data = random.Random(3).randbytes(500_000)

    async def scenario(client: socket.socket, holder: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(_read_all(holder))
            await loop.sock_sendall(client, data)
            client.shutdown(socket.SHUT_WR)
        assert reading.result() == data

    _run(start, scenario)


@both_relays
def test_the_other_direction_after_an_end(start: StartRelay) -> None:
    """A tunnel stays open in it; a WebSocket cannot be closed by half, and both its sockets end."""

    async def scenario(client: socket.socket, holder: socket.socket) -> None:
        client.shutdown(socket.SHUT_WR)
        assert await _read_all(holder) == b""
        await asyncio.get_running_loop().sock_sendall(holder, b"late")
        with contextlib.suppress(OSError):  # it is not connected any more
            holder.shutdown(socket.SHUT_WR)
        is_tunnel = start is BYTE_RELAYS["carry"]
        assert await _read_all(client) == (b"late" if is_tunnel else b"")

    _run(start, scenario)


@both_relays
@pytest.mark.parametrize("is_back", [False, True], ids=["there", "back"])
def test_a_reset_ends_the_other_socket(start: StartRelay, is_back: bool) -> None:
    async def scenario(client: socket.socket, holder: socket.socket) -> None:
        resetting, other = (holder, client) if is_back else (client, holder)
        if resetting.family != socket.AF_UNIX:
            reset_on_close(resetting)
        resetting.close()
        try:
            answer = await _read_all(other)
        except ConnectionResetError:
            return
        # Without an answer of the holder, a client of a node is told so.
        assert answer == b"" or answer.startswith(b"HTTP/1.1 503 ")

    _run(start, scenario)
