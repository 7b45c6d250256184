"""Dialer for WebSockets; `relay`, which takes long to import, and `stdio` have the others."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import TypeVar

from exec_server.client.engine.session import CALLS_IN_FLIGHT, Closing
from exec_server.errors import ConnectFailed, StartupError
from exec_server.net.client_stream import ClientStream
from exec_server.net.client_tls import PinnedContext
from exec_server.net.stream import MessageStream, ReceiverFactory
from exec_server.net.websocket.client import ClientSocket, SocketUser, connect
from exec_server.net.websocket.frames import MESSAGE_BYTES
from exec_server.protocol.urls import Url, parse_url
from exec_server.registry.destination import is_loopback

# From the first packet to an open WebSocket.
OPEN_SECONDS = 10.0
# A peer that is silent for two intervals is gone. That is well within the time for which servers
# keep a session without a connection.
PING_SECONDS = 10.0
# The interval of the reference.
RECONNECT_SECONDS = 0.1
# How long the peers have to answer the close frames before their sockets are dropped.
SHUTDOWN_GRACE_SECONDS = 1.0

_GOING_AWAY = 1001
_SCHEMES = frozenset({"ws", "wss"})
_TARGET_SCHEMES = _SCHEMES | {"unix"}

U = TypeVar("U", bound=SocketUser)


class Sockets:
    """Opens WebSockets and keeps those that are open, in order to close them."""

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        self._open: set[ClientSocket] = set()

    async def open(
        self,
        url: str | Url,
        make_user: Callable[[ClientSocket], U],
        headers: Sequence[tuple[str, str]] = (),
        message_bytes: int = MESSAGE_BYTES,
    ) -> U:
        """Open a WebSocket and return the user made for it; raises ConnectFailed."""
        made: list[U] = []

        def register(socket: ClientSocket) -> U:
            self._open.add(socket)
            socket.closed.add_done_callback(lambda _: self._open.discard(socket))
            made.append(make_user(socket))
            return made[0]

        try:
            async with asyncio.timeout(OPEN_SECONDS):
                await connect(
                    url, register, headers=headers, tls=self._tls, message_bytes=message_bytes
                )
        except TimeoutError:
            raise ConnectFailed(f"timed out after {OPEN_SECONDS:g} s") from None
        return made[0]

    async def close(self, closing: Closing) -> None:
        """Close all sockets, and wait for the peers to close them too if that may matter."""
        try:
            for socket in self._open:
                socket.close(_GOING_AWAY, "")
            if self._open and closing is Closing.ORDERLY:
                closed = [socket.closed for socket in self._open]
                await asyncio.wait(closed, timeout=SHUTDOWN_GRACE_SECONDS)
        finally:
            for socket in self._open:
                socket.abort("closed")


class WebSocketDialer:
    """A server that listens at a ws:// or wss:// URL or on a unix socket."""

    can_reconnect = True
    calls_in_flight = CALLS_IN_FLIGHT

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        allow_insecure_token: bool = False,
    ) -> None:
        """Raises StartupError for an invalid URL, or if the token would be sent in the clear."""
        address = parse_target(url, _TARGET_SCHEMES)
        if token is not None and _is_exposed(address) and not allow_insecure_token:
            raise StartupError("a token is sent only to wss:// URLs and to this machine")
        if isinstance(tls, PinnedContext) and not address.secure:
            raise StartupError("a pin is for wss:// URLs: without TLS there is no certificate")
        self._address = address
        self._headers = [] if token is None else [("Authorization", f"Bearer {token}")]
        self._sockets = Sockets(tls)

    async def open(self, make_receiver: ReceiverFactory) -> MessageStream:
        def make_stream(socket: ClientSocket) -> ClientStream:
            origin = "JSON-RPC message from exec-server websocket"
            return ClientStream(socket, make_receiver, origin=origin, ping_seconds=PING_SECONDS)

        return await self._sockets.open(self._address, make_stream, self._headers)

    def retry_delay(self, attempt: int) -> float:
        return RECONNECT_SECONDS

    async def close(self, closing: Closing) -> None:
        await self._sockets.close(closing)


def is_exposed_url(url: str) -> bool:
    """Whether other machines could read a token that is sent to this URL; raises StartupError."""
    return _is_exposed(parse_target(url, _TARGET_SCHEMES))


def _is_exposed(address: Url) -> bool:
    return not address.secure and not is_loopback(address)


def parse_target(url: str, schemes: frozenset[str] = _SCHEMES) -> Url:
    """Parse a WebSocket URL; raises StartupError."""
    try:
        return parse_url(url, schemes)
    except ValueError as error:
        raise StartupError(f"invalid exec-server URL: {error}") from None
