"""Dialers for WebSockets, and for a server that is just starting.

`relay`, which takes long to import, and `stdio` have the others.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from exec_server.client.engine.session import CALLS_IN_FLIGHT, Closing, Dialer, is_transient
from exec_server.errors import ConnectFailed, ExecServerError, RegistryUnavailable, StartupError
from exec_server.net.client_stream import ClientStream
from exec_server.net.client_tls import PinnedContext
from exec_server.net.stream import MessageStream, ReceiverFactory
from exec_server.net.websocket.client import ClientSocket, SocketUser, connect
from exec_server.net.websocket.frames import MESSAGE_BYTES
from exec_server.protocol.urls import Url, parse_url
from exec_server.registry.destination import is_loopback

# From the first packet to an open WebSocket.
OPEN_SECONDS = 10.0
# The same for a last attempt that begins just before the end of the time that was allowed for all.
LAST_OPEN_SECONDS = 1.0
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

# What a proxy answers whose server is not there yet.
_STARTING_STATUSES: Final = frozenset({None, 502, 503, 504})
# Causes that time does not mend.
_LASTING: Final = ("permission denied", "tls")

U = TypeVar("U", bound=SocketUser)

# Gets an error after which it is tried again, and for how many seconds.
OnRetry = Callable[[ExecServerError, float], None]


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


def is_starting(error: ExecServerError) -> bool:
    """Whether a server may be there in a moment that was not there now."""
    if not isinstance(error, ConnectFailed):
        return is_transient(error)
    is_lasting = any(text in error.reason.lower() for text in _LASTING)
    return is_transient(error) and error.status in _STARTING_STATUSES and not is_lasting


class PatientDialer:
    """A dialer whose first connection may take some seconds, as its server is just starting."""

    def __init__(self, inner: Dialer, seconds: float, on_retry: OnRetry | None = None) -> None:
        """`on_retry` gets the first error, if there is one."""
        self._inner = inner
        self._seconds = seconds
        self._on_retry = on_retry
        self._is_first = True

    @property
    def can_reconnect(self) -> bool:
        return self._inner.can_reconnect

    @property
    def calls_in_flight(self) -> int:
        return self._inner.calls_in_flight

    async def open(self, make_receiver: ReceiverFactory) -> MessageStream:
        if self._is_first:
            stream = await self._open_first(make_receiver)
            self._is_first = False
            return stream
        return await self._inner.open(make_receiver)

    async def _open_first(self, make_receiver: ReceiverFactory) -> MessageStream:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._seconds
        attempt = 0
        while True:
            scope = asyncio.timeout_at(max(deadline, loop.time() + LAST_OPEN_SECONDS))
            try:
                async with scope:
                    return await self._inner.open(make_receiver)
            except TimeoutError:
                if not scope.expired():
                    raise
                raise _after(self._seconds, ConnectFailed("timed out")) from None
            except ExecServerError as error:
                delay = self._inner.retry_delay(attempt)
                if not is_starting(error):
                    raise
                if loop.time() + delay > deadline:
                    raise _after(self._seconds, error) from None
                if attempt == 0 and self._on_retry is not None:
                    self._on_retry(error, self._seconds)
            await asyncio.sleep(delay)
            attempt += 1

    def retry_delay(self, attempt: int) -> float:
        return self._inner.retry_delay(attempt)

    async def close(self, closing: Closing) -> None:
        await self._inner.close(closing)


def _after(seconds: float, error: ExecServerError) -> ExecServerError:
    """An error as the last one of several attempts."""
    waited = f"no connection within {seconds:g} s: {error}"
    if isinstance(error, ConnectFailed):
        return ConnectFailed(waited, error.status, error.headers)
    return RegistryUnavailable(waited)


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
