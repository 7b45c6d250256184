"""Ways to a server through a relay. Each opens one link at a time."""

from __future__ import annotations

import asyncio
import random
import ssl
import uuid
from collections.abc import Sequence

from exec_server.client.dialers import RECONNECT_SECONDS, Receiver, Sockets, parsed
from exec_server.errors import (
    ConnectFailed,
    RegistryBusy,
    RegistryError,
    RelayError,
    StartupError,
)
from exec_server.registry.api import Bundle, Registry, retry_delay
from exec_server.registry.credentials import HarnessToken
from exec_server.registry.destination import Reach, check_reach
from exec_server.registry.http import HttpClient
from exec_server.relay.channel import Channel
from exec_server.relay.frames import FRAME_BYTES
from exec_server.relay.noise import Identity, Initiator, prologue
from exec_server.relay.plain import PlainChannel
from exec_server.rpc.stream import MessageStream
from exec_server.transports.client_socket import ClientSocket
from exec_server.transports.harness import GOING_AWAY, HarnessLink

# For the handshake, once there is a WebSocket.
HANDSHAKE_SECONDS = 10.0
# Calls that the server has and has not answered: half of what an executor queues of one stream
# before it ends it.
RELAYED_CALLS_IN_FLIGHT = 64
# Of the first connection through a relay: requests to the registry after the first one, the time
# for each, and for all of them with the waits between.
FIRST_RETRIES = 4
REQUEST_SECONDS = 6.0
FIRST_SECONDS = 14.0


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
        self._sockets = Sockets(tls)
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
        parsed(url)
        self._url = url
        self._sockets = Sockets(tls)

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
