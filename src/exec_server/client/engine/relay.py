"""Dialers that reach a server through a relay; each has one connection at a time."""

from __future__ import annotations

import asyncio
import itertools
import random
import ssl
import uuid
from collections.abc import Sequence

from exec_server.client.engine.dialers import RECONNECT_SECONDS, OnRetry, Sockets, parse_target
from exec_server.client.engine.session import Closing
from exec_server.errors import (
    ConnectFailed,
    CredentialRejected,
    HandshakeReset,
    RegistryError,
    RegistryUnavailable,
    RelayError,
    StartupError,
)
from exec_server.net.relay_client import GOING_AWAY, ClientRelayLink
from exec_server.net.stream import MessageStream, ReceiverFactory
from exec_server.net.websocket.client import ClientSocket
from exec_server.registry.api import ConnectionBundle, Registry, retry_delay
from exec_server.registry.credentials import ClientToken
from exec_server.registry.destination import Destinations, check_pinned_registry, check_registry_url
from exec_server.registry.http import HttpClient
from exec_server.relay.frames import FRAME_BYTES
from exec_server.relay.noise import Identity, Initiator, prologue
from exec_server.relay.records import PlainChannel, RelayChannel

# For the handshake on an open WebSocket.
HANDSHAKE_SECONDS = 10.0
# Calls that are sent and not answered: half of the number that an executor queues for one stream
# before it resets the stream.
RELAYED_CALLS_IN_FLIGHT = 64
# For the first connection through a relay: retries of the request to the registry, and of a
# handshake that was reset; the time for each request, and the time for all of them including the
# delays between.
FIRST_RETRIES = 4
REQUEST_SECONDS = 6.0
FIRST_SECONDS = 14.0


class RelayDialer:
    """An environment of a registry, reached through a relay and encrypted end to end."""

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
        on_retry: OnRetry | None = None,
    ) -> None:
        """StartupError for invalid values, or a token that would be sent in the clear.

        `executor_key_fingerprint` pins the executor's key, so that the registry need not be
        trusted. `on_retry` gets the first error of the first connection.
        """
        check_registry_url(
            Destinations.ANYWHERE if allow_insecure_token else Destinations.ENCRYPTED, registry_url
        )
        check_pinned_registry(tls, registry_url)
        self._http = HttpClient(tls)
        credential = ClientToken(token, account_id)
        self._registry = Registry(registry_url, environment_id, credential, self._http)
        pin = executor_key_fingerprint
        self._pin = None if pin is None else _normalise_fingerprint(pin)
        self._headers = headers
        self._identity = Identity.generate()
        self._sockets = Sockets(tls)
        self._is_first = True
        self._on_retry = on_retry

    async def open(self, make_receiver: ReceiverFactory) -> MessageStream:
        """Connect; a first handshake that a busy or newly registered executor resets is retried."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + FIRST_SECONDS
        for attempt in itertools.count():
            try:
                stream = await self._open_once(make_receiver)
                break
            except HandshakeReset:
                delay = self.retry_delay(attempt)
                is_last = attempt == FIRST_RETRIES or loop.time() + delay > deadline
                if is_last or not self._is_first:
                    raise
                await asyncio.sleep(delay)
        self._is_first = False
        return stream

    async def _open_once(self, make_receiver: ReceiverFactory) -> MessageStream:
        bundle = await self._request_connection()
        try:
            return await self._connect(bundle, make_receiver)
        except ConnectFailed as error_response:
            if error_response.status != 401:
                # Without the status: the next attempt uses another URL, so no status is final.
                raise _relay_error(error_response) from None
        # The URL may have expired meanwhile: request another one, once.
        try:
            return await self._connect(await self._request_connection(), make_receiver)
        except ConnectFailed as again:
            raise _relay_error(again) from None

    def retry_delay(self, attempt: int) -> float:
        return retry_delay(attempt, random.random)

    async def close(self, closing: Closing) -> None:
        try:
            await self._sockets.close(closing)
        finally:
            await self._http.close()

    async def _request_connection(self) -> ConnectionBundle:
        """Request the data for one connection; for the first one, retry if the registry is busy."""
        if not self._is_first:
            return await self._request_once()
        failure = RegistryUnavailable("environment registry request failed: timed out")
        try:
            async with asyncio.timeout(FIRST_SECONDS):
                for attempt in range(FIRST_RETRIES):
                    try:
                        return await self._request_once()
                    except RegistryUnavailable as error:
                        failure = error
                        if attempt == 0 and self._on_retry is not None:
                            self._on_retry(error, FIRST_SECONDS)
                    await asyncio.sleep(self.retry_delay(attempt))
                return await self._request_once()
        except TimeoutError:
            raise failure from None

    async def _request_once(self) -> ConnectionBundle:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                bundle = await self._registry.connect(self._identity.public)
        except TimeoutError:
            raise RegistryUnavailable("environment registry request failed: timed out") from None
        if self._pin is not None and bundle.executor_key.fingerprint != self._pin:
            raise RegistryError(
                "the registry names an executor whose key is not the expected one: its "
                f"fingerprint is {bundle.executor_key.fingerprint}"
            )
        return bundle

    async def _connect(
        self, bundle: ConnectionBundle, make_receiver: ReceiverFactory
    ) -> MessageStream:
        link = await self._sockets.open(bundle.url, _make_link, self._headers, FRAME_BYTES)
        context = prologue(self._registry.environment_id, bundle.registration_id, link.stream_id)
        try:
            initiator = Initiator(self._identity, bundle.executor_key, context)
            link.introduce(initiator.write_first(bundle.authorization.encode()))
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                ciphers = initiator.read_second(await link.answer)
        except CredentialRejected as error:
            link.close(GOING_AWAY, "")
            # Final: the registry gives the same answer until the executor has a new credential.
            raise RegistryError(f"environment {self._registry.environment_id}: {error}") from None
        except (RelayError, TimeoutError) as error:
            link.close(GOING_AWAY, "")
            raise ConnectFailed(f"handshake failed: {error or 'timed out'}") from None
        except BaseException:
            link.close(GOING_AWAY, "")
            raise
        return link.open(RelayChannel(link.stream_id, ciphers), make_receiver)


class PlainRelayDialer:
    """The older relay without encryption: its operator can read and change all messages.

    No other dialer falls back to this one. The URL is the only secret.
    """

    can_reconnect = True
    calls_in_flight = RELAYED_CALLS_IN_FLIGHT

    def __init__(self, url: str, *, tls: ssl.SSLContext | None = None) -> None:
        """`url` is the URL for a harness, with `role=harness`; raises StartupError."""
        parse_target(url)
        self._url = url
        self._sockets = Sockets(tls)

    async def open(self, make_receiver: ReceiverFactory) -> MessageStream:
        link = await self._sockets.open(self._url, _make_link)
        link.introduce(None)
        return link.open(PlainChannel(link.stream_id), make_receiver)

    def retry_delay(self, attempt: int) -> float:
        return RECONNECT_SECONDS

    async def close(self, closing: Closing) -> None:
        await self._sockets.close(closing)


def _relay_error(error: ConnectFailed) -> ConnectFailed:
    kind = HandshakeReset if isinstance(error, HandshakeReset) else ConnectFailed
    return kind(f"relay: {error}")


def _normalise_fingerprint(fingerprint: str) -> str:
    text = fingerprint.strip().lower().removeprefix("sha256:").replace(":", "")
    if len(text) != 64 or set(text) - set("0123456789abcdef"):
        raise StartupError("the fingerprint of an executor key must have 64 hexadecimal digits")
    return f"sha256:{text}"


def _make_link(socket: ClientSocket) -> ClientRelayLink:
    return ClientRelayLink(socket, str(uuid.uuid4()))
