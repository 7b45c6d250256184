"""A listener on several sockets: plain, TLS and unix; its ticks and its end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ssl
import weakref
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvloop
from tests.support.raw_links import DEFAULT_TIMEOUT, scaled
from tests.support.raw_servers import make_certificate
from tests.support.websocket_server import Echo, User

from exec_server.host.event_loop import GuardedTasks
from exec_server.net.client_tls import tls_context
from exec_server.net.listen import BoundSocket, TcpAddress, UnixAddress
from exec_server.net.tls_acceptor import ServerCertificate
from exec_server.net.websocket import server as listener_module
from exec_server.net.websocket.client import ClientSocket, connect
from exec_server.net.websocket.server import WebSocketListener, WebSocketSettings, WebSocketStream
from exec_server.protocol.urls import Url, parse_url


@contextlib.asynccontextmanager
async def _listening(directory: Path) -> AsyncIterator[tuple[list[Url], ssl.SSLContext]]:
    roots, _ = make_certificate(directory, "127.0.0.1")
    certificate = ServerCertificate(roots, str(directory / "key.pem"))
    bound = [
        BoundSocket(TcpAddress("wss", "127.0.0.1", 0)),
        BoundSocket(UnixAddress(str(directory / "s"))),
        BoundSocket(TcpAddress("ws", "127.0.0.1", 0)),
    ]
    schemes = frozenset({"ws", "wss", "unix"})
    async with asyncio.timeout(scaled(DEFAULT_TIMEOUT)), asyncio.TaskGroup() as tasks:
        listener = WebSocketListener(
            bound, WebSocketSettings(Echo), GuardedTasks(tasks), certificate
        )
        await listener.open()
        try:
            yield [parse_url(each.url, schemes) for each in bound], tls_context(roots)
        finally:
            await listener.close()


async def _open(url: Url, tls: ssl.SSLContext) -> User:
    users: list[User] = []

    def make_user(opened: ClientSocket) -> User:
        users.append(User(opened))
        return users[0]

    await connect(url, make_user, tls=tls)
    return users[0]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_messages_of_all_sizes_on_each_kind_of_socket(tmp_path: Path, index: int) -> None:
    messages = [b"small", b"m" * 20_000, b"l" * 300_000, b"x" * 6_000_000, b"tiny"]

    async def body() -> None:
        async with _listening(tmp_path) as (urls, tls):
            user = await _open(urls[index], tls)
            for message in messages:
                user.socket.send(message, is_text=True)
            seen = await user.until("text", len(messages))
            assert [what[1] for what in seen if what[0] == "text"] == messages
            user.socket.close(1000, "")
            await user.socket.closed
        assert not (tmp_path / "s").exists()

    uvloop.run(body())


def test_the_end_of_the_listener_closes_all_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "_TICK_SECONDS", 0.001)
    users: list[User] = []

    async def body() -> None:
        async with _listening(tmp_path) as (urls, tls):
            users.extend([await _open(url, tls) for url in urls])
        for user in users:
            seen = await user.until("lost", 1)
            assert seen[-1] == ("lost", "closed by the peer: 1001 server is shutting down")

    uvloop.run(body())


def test_tls_connections_that_begin_and_end_between_two_ticks_are_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "_TICK_SECONDS", 0.3)
    streams: list[weakref.ref[WebSocketStream]] = []
    connection_made = WebSocketStream.connection_made

    def remember(self: WebSocketStream, transport: asyncio.BaseTransport) -> None:
        streams.append(weakref.ref(self))
        connection_made(self, transport)

    async def body() -> None:
        async with _listening(tmp_path) as (urls, tls):
            user = await _open(urls[0], tls)
            user.socket.close(1000, "")
            await user.socket.closed
            while any(stream() is not None for stream in streams):
                await asyncio.sleep(0.01)

    monkeypatch.setattr(WebSocketStream, "connection_made", remember)
    gc.disable()
    try:
        uvloop.run(body())
    finally:
        gc.enable()
    assert len(streams) == 1


def test_a_connection_whose_tick_fails_is_aborted_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "_TICK_SECONDS", 0.001)
    tick = WebSocketStream.tick
    broken: list[WebSocketStream] = []

    def tick_or_fail(self: WebSocketStream, now: float) -> None:
        if self in broken or not broken:
            broken[:] = [self]
            raise ValueError
        tick(self, now)

    async def body() -> None:
        async with _listening(tmp_path) as (urls, tls):
            user = await _open(urls[2], tls)
            monkeypatch.setattr(WebSocketStream, "tick", tick_or_fail)
            await user.until("lost", 1)
            other = await _open(urls[2], tls)
            other.socket.send(b"alive", is_text=True)
            assert await other.until("text", 1) == [("text", b"alive")]

    uvloop.run(body())
