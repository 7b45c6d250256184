"""SocketStream over connected pairs of sockets, and TransportStream over memory."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest
from tests.support.memory_transport import stream_pair

from exec_server.host import event_loop
from exec_server.proxy.stream import BUFFER_BYTES, SocketStream, carry

Scenario = Callable[[SocketStream, socket.socket], Awaitable[None]]


def _run(scenario: Scenario) -> None:
    """Run with a stream and the socket at its other end."""

    async def run() -> None:
        inner, outer = socket.socketpair()
        inner.setblocking(False)
        stream = SocketStream(inner)
        with outer:
            async with asyncio.timeout(10):
                await scenario(stream, outer)
            stream.close()

    asyncio.run(run())


def test_bytes_and_the_end_of_a_direction() -> None:
    async def scenario(stream: SocketStream, other: socket.socket) -> None:
        other.sendall(b"hello")
        assert await stream.receive(2) == b"he"
        assert await stream.receive() == b"llo"
        await stream.send(b"back")
        stream.write_eof()
        assert other.recv(10) == b"back"
        assert other.recv(10) == b""
        other.sendall(b"more")
        other.shutdown(socket.SHUT_WR)
        assert await stream.receive() == b"more"
        assert await stream.receive() == b""

    _run(scenario)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, event_loop.new_event_loop])
def test_a_reset_that_comes_with_the_last_bytes(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """uvloop tells an error once, and then no longer watches the socket."""

    async def run() -> None:
        inner, outer = socket.socketpair()
        inner.setblocking(False)
        stream = SocketStream(inner)
        await stream.send(b"unread")  # an end that has not read this resets the connection
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(stream.receive())
            await asyncio.sleep(0)
            outer.sendall(b"abc")
            outer.close()
            assert await reading == b"abc"
            with pytest.raises(ConnectionResetError):
                await stream.receive()
        stream.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


def test_a_busy_stream_lets_others_run() -> None:
    async def scenario(stream: SocketStream, other: socket.socket) -> None:
        other.sendall(b"abc")
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.get_running_loop().create_task(count())
        for byte in (b"a", b"b", b"c"):
            assert await stream.receive(1) == byte
        assert turns >= 2
        counting.cancel()

    _run(scenario)


def test_a_stream_that_nobody_reads_is_no_longer_watched() -> None:
    """Level-triggered events would otherwise keep the loop busy."""

    async def scenario(stream: SocketStream, other: socket.socket) -> None:
        other.sendall(b"a")
        assert await stream.receive() == b"a"
        other.sendall(b"b")
        while stream._is_watched:
            await asyncio.sleep(0)
        assert await stream.receive() == b"b"

    _run(scenario)


def test_sending_waits_for_the_other_end() -> None:
    async def scenario(stream: SocketStream, other: socket.socket) -> None:
        data = bytes(range(256)) * 8192
        received = bytearray()
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(stream.send(data))
            await asyncio.sleep(0)
            assert not sending.done()
            while len(received) < len(data):
                received += other.recv(BUFFER_BYTES, socket.MSG_DONTWAIT) if _has(other) else b""
                await asyncio.sleep(0)
        assert received == data

    def _has(other: socket.socket) -> bool:
        try:
            return bool(other.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return False

    _run(scenario)


def test_closing_ends_what_waits() -> None:
    async def scenario(stream: SocketStream, other: socket.socket) -> None:
        async def receive() -> None:
            with pytest.raises(ConnectionAbortedError):
                await stream.receive()

        async def send() -> None:
            with pytest.raises(ConnectionAbortedError):
                await stream.send(bytes(10_000_000))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(receive())
            tasks.create_task(send())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            stream.close()
        assert stream.is_closed
        stream.close()
        stream.abort()
        stream.write_eof()
        with pytest.raises(OSError):
            await stream.receive()
        with pytest.raises(OSError):
            await stream.send(b"x")

    _run(scenario)


def test_a_cancelled_read_leaves_the_bytes() -> None:
    async def scenario(stream: SocketStream, other: socket.socket) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await stream.receive()
        other.sendall(b"late")
        assert await stream.receive() == b"late"

    _run(scenario)


def test_a_detached_socket_has_another_owner() -> None:
    async def scenario(stream: SocketStream, other: socket.socket) -> None:
        other.sendall(b"a")
        await stream.receive()
        with stream.detach() as detached:
            assert stream.is_closed
            other.sendall(b"b")
            assert detached.recv(1) == b"b"

    _run(scenario)


def test_a_tunnel_whose_one_end_breaks_aborts_the_other() -> None:
    async def run() -> None:
        client, inner = stream_pair()
        outer, origin = stream_pair()

        async def broken(limit: int = BUFFER_BYTES) -> bytes:
            raise ConnectionResetError

        outer.receive = broken  # type: ignore[method-assign]
        async with asyncio.timeout(10):
            await carry(inner, outer)
        assert inner.is_closed
        assert outer.is_closed
        for end in (client, origin):
            end.close()

    asyncio.run(run())


def test_a_transport_has_an_address_and_an_end() -> None:
    async def run() -> None:
        one, two = stream_pair()
        assert one.local_address == ("127.0.0.1", 6)
        await one.send(b"x")
        assert await two.receive() == b"x"
        one.abort()
        one.write_eof()
        assert one.is_closed
        assert await two.receive() == b""
        two.close()

    asyncio.run(run())
