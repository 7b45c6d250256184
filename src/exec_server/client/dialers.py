"""Ways to a server over a WebSocket: straight, or through a relay. Each opens one link at a time.

The program that speaks on its standard streams is in `program`.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import uuid
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from exec_server.errors import (
    ConnectFailed,
    ExecServerError,
    RegistryBusy,
    RegistryError,
    RelayError,
    SessionAttached,
    StartupError,
)
from exec_server.registry.api import Bundle, Registry, retry_delay
from exec_server.registry.credentials import HarnessToken
from exec_server.registry.destination import Reach, check_reach, is_loopback
from exec_server.registry.http import HttpClient
from exec_server.relay.channel import Channel
from exec_server.relay.frames import FRAME_BYTES
from exec_server.relay.noise import Identity, Initiator, prologue
from exec_server.relay.plain import PlainChannel
from exec_server.rpc.stream import MessageReceiver, MessageStream
from exec_server.transports.client_socket import CLOSE_SECONDS, ClientSocket, SocketUser, connect
from exec_server.transports.dial import Url, parse_url
from exec_server.transports.dialed import DialedStream
from exec_server.transports.frames import MESSAGE_BYTES
from exec_server.transports.harness import GOING_AWAY, HarnessLink

# From the first packet to a WebSocket, and for the relay's handshake behind it.
OPEN_SECONDS = 10.0
HANDSHAKE_SECONDS = 10.0
# A peer that is silent for two of these is gone. Well within the time for which servers keep a
# session that they believe lost.
PING_SECONDS = 10.0
# As soon and as often as the reference.
RECONNECT_SECONDS = 0.1
# Calls that the server has and has not answered. The reference's limit for its client; and for
# a relay half of what an executor queues of one stream before it ends it.
CALLS_IN_FLIGHT = 1024
RELAYED_CALLS_IN_FLIGHT = 64
# Of the first connection through a relay: requests to the registry after the first one, the time
# for each, and for all of them with the waits between.
FIRST_RETRIES = 4
REQUEST_SECONDS = 6.0
FIRST_SECONDS = 14.0
# How long sockets may take to close, beyond the time after which they are dropped anyway.
FAREWELL_SECONDS = CLOSE_SECONDS + 1.0

# Refusals of a server that would only be repeated.
_FINAL_STATUSES = frozenset({401, 403, 404})
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


class _Sockets:
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
                socket.close(GOING_AWAY, "")
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
        where = _parsed(url)
        if token is not None and not (where.secure or is_loopback(where) or allow_insecure_token):
            raise StartupError("a token is sent only to wss:// URLs and to this machine")
        self._url = url
        self._headers = [] if token is None else [("Authorization", f"Bearer {token}")]
        self._sockets = _Sockets(tls)

    async def open(self, receiver: Receiver) -> MessageStream:
        def make_stream(socket: ClientSocket) -> DialedStream:
            origin = "JSON-RPC message from exec-server websocket"
            return DialedStream(socket, receiver, origin=origin, ping_seconds=PING_SECONDS)

        return await self._sockets.open(self._url, make_stream, self._headers)

    def retry_delay(self, attempt: int) -> float:
        return RECONNECT_SECONDS

    async def close(self) -> None:
        await self._sockets.close()


class RelayDialer:
    """An environment that a registry knows, reached through a relay, encrypted end to end."""

    can_reconnect = True
    calls_in_flight = RELAYED_CALLS_IN_FLIGHT

    def __init__(
        self,
        registry_url: str,
        environment_id: str,
        *,
        token: str,
        account_id: str | None = None,
        executor_key_fingerprint: str | None = None,
        tls: ssl.SSLContext | None = None,
        headers: Sequence[tuple[str, str]] = (),
        allow_insecure_token: bool = False,
    ) -> None:
        """Raises StartupError for useless values, or if the token could be read on the way.

        With `executor_key_fingerprint` the registry need not be trusted: only the executor that
        has this key is talked to. `headers` go to the relay.
        """
        check_reach(Reach.ANYWHERE if allow_insecure_token else Reach.ENCRYPTED, registry_url)
        self._http = HttpClient(tls)
        credential = HarnessToken(token, account_id)
        self._registry = Registry(registry_url, environment_id, credential, self._http)
        pin = executor_key_fingerprint
        self._pin = None if pin is None else _normalised(pin)
        self._headers = headers
        self._identity = Identity.generate()
        self._sockets = _Sockets(tls)
        self._is_first = True

    async def open(self, receiver: Receiver) -> MessageStream:
        bundle = await self._ask_for_connection()
        try:
            stream = await self._connect(bundle, receiver)
        except ConnectFailed as refusal:
            if refusal.status != 401:
                # Without the status: another attempt gets another URL, and another answer.
                raise ConnectFailed(f"relay: {refusal}") from None
            # The URL may have expired on the way. Once.
            try:
                stream = await self._connect(await self._ask_for_connection(), receiver)
            except ConnectFailed as again:
                raise ConnectFailed(f"relay: {again}") from None
        self._is_first = False
        return stream

    def retry_delay(self, attempt: int) -> float:
        return retry_delay(attempt, random.random)

    async def close(self) -> None:
        try:
            await self._sockets.close()
        finally:
            await self._http.close()

    # ---- the registry -----------------------------------------------------------------

    async def _ask_for_connection(self) -> Bundle:
        """What one connection needs; at first, a busy registry is asked several times."""
        if not self._is_first:
            return await self._ask_once()
        busy = RegistryBusy("environment registry request failed: timed out")
        try:
            async with asyncio.timeout(FIRST_SECONDS):
                for attempt in range(FIRST_RETRIES):
                    try:
                        return await self._ask_once()
                    except RegistryBusy as error:
                        busy = error
                    await asyncio.sleep(self.retry_delay(attempt))
                return await self._ask_once()
        except TimeoutError:
            raise busy from None

    async def _ask_once(self) -> Bundle:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                bundle = await self._registry.connect(self._identity.public)
        except TimeoutError:
            raise RegistryBusy("environment registry request failed: timed out") from None
        if self._pin is not None and bundle.executor_key.fingerprint != self._pin:
            raise RegistryError(
                "the registry names an executor whose key is not the expected one: its "
                f"fingerprint is {bundle.executor_key.fingerprint}"
            )
        return bundle

    # ---- the relay --------------------------------------------------------------------

    async def _connect(self, bundle: Bundle, receiver: Receiver) -> MessageStream:
        link = await self._sockets.open(bundle.url, _make_link, self._headers, FRAME_BYTES)
        context = prologue(self._registry.environment_id, bundle.registration_id, link.stream_id)
        try:
            initiator = Initiator(self._identity, bundle.executor_key, context)
            link.introduce(initiator.first(bundle.authorization.encode()))
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                ciphers = initiator.second(await link.answer)
        except (RelayError, TimeoutError) as error:
            link.close(GOING_AWAY, "")
            raise ConnectFailed(f"handshake failed: {error or 'timed out'}") from None
        except BaseException:
            link.close(GOING_AWAY, "")
            raise
        return link.open(Channel(link.stream_id, ciphers), receiver)


class PlainRelayDialer:
    """The older relay without encryption: whoever runs it can read and change everything.

    Only for who asks for it by name; nothing falls back to it. The URL is the whole secret.
    """

    can_reconnect = True
    calls_in_flight = RELAYED_CALLS_IN_FLIGHT

    def __init__(self, url: str, *, tls: ssl.SSLContext | None = None) -> None:
        """The URL is that of a harness, with `role=harness`; raises StartupError."""
        _parsed(url)
        self._url = url
        self._sockets = _Sockets(tls)

    async def open(self, receiver: Receiver) -> MessageStream:
        link = await self._sockets.open(self._url, _make_link)
        link.introduce(None)
        return link.open(PlainChannel(link.stream_id), receiver)

    def retry_delay(self, attempt: int) -> float:
        return RECONNECT_SECONDS

    async def close(self) -> None:
        await self._sockets.close()


def _normalised(written: str) -> str:
    text = written.strip().lower().removeprefix("sha256:").replace(":", "")
    if len(text) != 64 or set(text) - set("0123456789abcdef"):
        raise StartupError("a fingerprint of an executor's key has 64 hexadecimal digits")
    return f"sha256:{text}"


def _make_link(socket: ClientSocket) -> HarnessLink:
    return HarnessLink(socket, str(uuid.uuid4()))


def _parsed(url: str) -> Url:
    try:
        return parse_url(url, _WEBSOCKET)
    except ValueError as error:
        raise StartupError(f"invalid exec-server URL: {error}") from None
