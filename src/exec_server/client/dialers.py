"""Ways to a server: what they have in common, and the straight one over a WebSocket.

The way through a relay is in `relay_dialers`, which takes long to load; the program that speaks on
its standard streams is in `program`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from exec_server.errors import (
    ConnectFailed,
    ExecServerError,
    RegistryBusy,
    SessionAttached,
    StartupError,
)
from exec_server.registry.destination import is_loopback
from exec_server.rpc.stream import MessageReceiver, MessageStream
from exec_server.transports.client_socket import ClientSocket, SocketUser, connect
from exec_server.transports.dial import Url, parse_url
from exec_server.transports.dialed import DialedStream
from exec_server.transports.framed_socket import CLOSE_SECONDS
from exec_server.transports.frames import MESSAGE_BYTES

# From the first packet to a WebSocket.
OPEN_SECONDS = 10.0
# A peer that is silent for two of these is gone. Well within the time for which servers keep a
# session that they believe lost.
PING_SECONDS = 10.0
# As soon and as often as the reference.
RECONNECT_SECONDS = 0.1
# Calls that the server has and has not answered; others wait here. The reference keeps 128
# requests and as many messages to us in queues, and stands still for ever when both are full.
CALLS_IN_FLIGHT = 120
# How long sockets may take to close, beyond the time after which they are dropped anyway.
FAREWELL_SECONDS = CLOSE_SECONDS + 1.0

# Refusals of a server that would only be repeated.
_FINAL_STATUSES = frozenset({401, 403, 404})
_GOING_AWAY = 1001
_WEBSOCKET = frozenset({"ws", "wss"})

Receiver = Callable[[MessageStream], MessageReceiver]
U = TypeVar("U", bound=SocketUser)


class Dialer(Protocol):
    """A way to one server."""

    @property
    def can_reconnect(self) -> bool:
        """Whether a session can go on over another link."""
        ...

    @property
    def calls_in_flight(self) -> int:
        """How many calls a link bears at a time."""
        ...

    async def open(self, receiver: Receiver) -> MessageStream:
        """Open a link; `is_passing` tells whether what it raises is worth another attempt.

        Cancelled, it leaves nothing behind that `close` would not find.
        """
        ...

    def retry_delay(self, attempt: int) -> float:
        """How long to wait after the failed attempt with this number, from 0."""
        ...

    async def close(self) -> None:
        """End all links and wait until they are gone."""
        ...


def is_passing(error: ExecServerError) -> bool:
    """Whether another attempt to connect, or to resume a session, may succeed."""
    if isinstance(error, ConnectFailed):
        return error.status not in _FINAL_STATUSES
    return isinstance(error, RegistryBusy | SessionAttached)


class Sockets:
    """Opens WebSockets, and knows which of them have not ended."""

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        self._open: set[ClientSocket] = set()

    async def open(
        self,
        url: str,
        make_user: Callable[[ClientSocket], U],
        headers: Sequence[tuple[str, str]] = (),
        message_bytes: int = MESSAGE_BYTES,
    ) -> U:
        """The user of a new WebSocket; raises ConnectFailed."""
        made: list[U] = []

        def note(socket: ClientSocket) -> U:
            self._open.add(socket)
            socket.gone.add_done_callback(lambda _: self._open.discard(socket))
            made.append(make_user(socket))
            return made[0]

        try:
            async with asyncio.timeout(OPEN_SECONDS):
                await connect(
                    url, note, headers=headers, tls=self._tls, message_bytes=message_bytes
                )
        except TimeoutError:
            raise ConnectFailed(f"timed out after {OPEN_SECONDS:g} s") from None
        return made[0]

    async def close(self) -> None:
        """Say goodbye, and wait until the peers have hung up."""
        try:
            for socket in self._open:
                socket.close(_GOING_AWAY, "")
            if self._open:
                ends = [socket.gone for socket in self._open]
                await asyncio.wait(ends, timeout=FAREWELL_SECONDS)
        finally:
            for socket in self._open:
                socket.abort("closed")


class WebSocketDialer:
    """A server that listens at a ws:// or wss:// URL."""

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
        """Raises StartupError for a useless URL, or if the token could be read on the way."""
        where = parsed(url)
        if token is not None and not (where.secure or is_loopback(where) or allow_insecure_token):
            raise StartupError("a token is sent only to wss:// URLs and to this machine")
        self._url = url
        self._headers = [] if token is None else [("Authorization", f"Bearer {token}")]
        self._sockets = Sockets(tls)

    async def open(self, receiver: Receiver) -> MessageStream:
        def make_stream(socket: ClientSocket) -> DialedStream:
            origin = "JSON-RPC message from exec-server websocket"
            return DialedStream(socket, receiver, origin=origin, ping_seconds=PING_SECONDS)

        return await self._sockets.open(self._url, make_stream, self._headers)

    def retry_delay(self, attempt: int) -> float:
        return RECONNECT_SECONDS

    async def close(self) -> None:
        await self._sockets.close()


def parsed(url: str) -> Url:
    """Where a WebSocket URL leads; raises StartupError."""
    try:
        return parse_url(url, _WEBSOCKET)
    except ValueError as error:
        raise StartupError(f"invalid exec-server URL: {error}") from None
