"""Executors: register with a registry, keep a link open, serve the clients that use the link.

Refusals of the registry are fatal, because repeating the request would not help. Errors of the
link are retried with backoff for as long as the program runs; so are those of a registry that
cannot be reached, for `exec-server up`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import ssl
import sys
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Literal, NoReturn

from exec_server.errors import ConnectFailed, RegistryError, RegistryUnreachable
from exec_server.host.event_loop import GuardedTasks
from exec_server.net.client_stream import ClientStream, open_stream
from exec_server.net.relay_executor import ExecutorRelayLink, RelaySettings, encrypted_multiplexer
from exec_server.net.stream import ReceiverFactory, StreamRevoked
from exec_server.net.websocket.client import ClientSocket, connect
from exec_server.net.websocket.frames import MESSAGE_BYTES
from exec_server.registry.api import Registration, Registry, retry_delay
from exec_server.registry.destination import Credential
from exec_server.relay.frames import FRAME_BYTES
from exec_server.relay.multiplexer import PendingHandshake, PlainMultiplexer, Verdict
from exec_server.relay.noise import Identity

log = logging.getLogger(__name__)

# From the first packet to an open WebSocket.
OPEN_SECONDS = 10.0
# Delays between attempts to connect double from 1 s up to this.
MAX_BACKOFF_SECONDS = 30.0
# A link that lasted this long resets the backoff.
STABLE_LINK_SECONDS = 120.0
# How long the relay may take to answer the close frame at shutdown.
SHUTDOWN_GRACE_SECONDS = 0.25

GOING_AWAY = 1001

# Refusals of a direct connection that are retried. Other 4xx are fatal, except for a conflict:
# another executor has registered since, and this one registers again.
_TRANSIENT_STATUSES = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)

_SUPERSEDED = "unexpected_executor_registration_id"
# The reasons for which a rendezvous refuses executors. Other texts of a peer are not logged.
_REJECTIONS = frozenset(
    {
        *("expired", "extra_query_param", "invalid_expiry", "invalid_role", "invalid_secret"),
        *("invalid_signature", "malformed_query", "missing_executor_registration_id"),
        *("missing_expiry", "missing_role", "missing_signature", "missing_version"),
        *("pod_draining", "route_unavailable", "unknown_route", "wrong_rendezvous_cluster"),
        _SUPERSEDED,
    }
)

Security = Literal["noise", "plain", "text"]


class Backoff:
    """The delays between attempts to connect."""

    def __init__(self, random_fraction: Callable[[], float] = random.random) -> None:
        self._random_fraction = random_fraction
        self._base = 1.0

    def next_delay(self) -> float:
        """Half to all of a time that doubles; the jitter spreads executors that reconnect."""
        base, self._base = self._base, min(2 * self._base, MAX_BACKOFF_SECONDS)
        return base / 2 + self._random_fraction() * base / 2

    def link_ended(self, lasted: float) -> None:
        if lasted >= STABLE_LINK_SECONDS:
            self._base = 1.0


class RelayExecutor:
    """Serves the clients of a relay, many on one link."""

    def __init__(
        self,
        registry: Registry,
        credential: Credential,
        *,
        security: Security = "noise",
        tls: ssl.SSLContext | None = None,
        headers: Sequence[tuple[str, str]] = (),
        identity: Identity | None = None,
        waits_for_registry: bool = False,
        on_ready: Callable[[str], None] | None = None,
    ) -> None:
        """`identity` is the executor's key, by default a new one; its fingerprint is passed to
        `on_ready` at every new link. With `waits_for_registry`, a registry that cannot be reached
        is asked again; without it, that ends the executor, as in the reference.
        """
        self._registry = registry
        self._credential = credential
        self._security = security
        self._tls = tls
        self._headers = headers
        self._on_ready = on_ready
        self._identity = identity or Identity.generate()
        self._waits_for_registry = waits_for_registry
        self._is_registered = False

    async def serve(
        self, make_receiver: ReceiverFactory, stream_revoked: StreamRevoked, tasks: GuardedTasks
    ) -> NoReturn:
        await self._credential.ready(tasks)
        if self._security == "noise":
            log.info("this executor's key is %s", self._identity.public.fingerprint)
        registration = await self._register()
        settings = RelaySettings(make_receiver, tasks, stream_revoked)
        loop = asyncio.get_running_loop()
        backoff = Backoff()
        while True:
            try:
                link = await self._open(registration, settings)
            except (ConnectFailed, TimeoutError) as error:
                _log_failure(error, self._registry.environment_id)
                if isinstance(error, ConnectFailed) and 400 <= (error.status or 0) < 500:
                    registration = await self._register()
            else:
                began = loop.time()
                log.info("connected to the rendezvous")
                if self._on_ready is not None:
                    self._on_ready(self._identity.public.fingerprint)
                log.warning("rendezvous connection lost: %s", await _until_ended(link))
                backoff.link_ended(loop.time() - began)
            await asyncio.sleep(backoff.next_delay())
            if self._security != "noise":
                registration = await self._register()  # required before every attempt

    async def _register(self) -> Registration:
        if self._security == "noise":
            return await self._register_key()
        is_text = self._security == "text"
        registration = await self._registry.register_plain(
            form="text" if is_text else "relay-plain"
        )
        if not self._is_registered:
            # Scripts that start these forms wait for exactly this line.
            noun = "executor" if is_text else "environment"
            line = f"codex exec-server remote {noun} registered with {noun}_id"
            print(line, self._registry.environment_id, file=sys.stderr, flush=True)
        self._is_registered = True
        return registration

    async def _register_key(self) -> Registration:
        backoff = Backoff()
        while True:
            try:
                return await self._registry.register_until_accepted(self._identity.public)
            except RegistryUnreachable as error:
                if not self._waits_for_registry:
                    raise
                delay = backoff.next_delay()
                log.warning("%s; trying again in %.1f s", error.summary, delay)
            await asyncio.sleep(delay)

    async def _open(
        self, registration: Registration, settings: RelaySettings
    ) -> ExecutorRelayLink | ClientStream:
        headers = [("X-Request-ID", f"req_{os.urandom(16).hex()}"), *self._headers]
        async with asyncio.timeout(OPEN_SECONDS):
            if self._security == "text":
                return await open_stream(
                    registration.url,
                    settings.receiver,
                    origin="JSON-RPC message from remote exec-server websocket",
                    headers=headers,
                    tls=self._tls,
                )
            return await self._open_link(registration, settings, headers)

    async def _open_link(
        self,
        registration: Registration,
        settings: RelaySettings,
        headers: Sequence[tuple[str, str]],
    ) -> ExecutorRelayLink:
        links: list[ExecutorRelayLink] = []
        encrypted = self._security == "noise"

        async def validate(handshake: PendingHandshake) -> Verdict:
            return await self._registry.validate(
                registration.registration_id,
                handshake.key,
                handshake.authorization,
                handshake.stream_id,
            )

        def make_link(socket: ClientSocket) -> ExecutorRelayLink:
            ids = (self._registry.environment_id, registration.registration_id)
            named = registration.names_tokens
            make = (
                encrypted_multiplexer(self._identity, *ids, names_tokens=named)
                if encrypted
                else PlainMultiplexer
            )
            links.append(ExecutorRelayLink(socket, settings, make, validate))
            return links[0]

        await connect(
            registration.url,
            make_link,
            headers=headers,
            tls=self._tls,
            # Without encryption each message is one frame.
            message_bytes=FRAME_BYTES if encrypted else MESSAGE_BYTES,
        )
        return links[0]


class DirectExecutor:
    """Serves one client, which a service connects to the other end of a signed WebSocket."""

    def __init__(
        self, registry: Registry, credential: Credential, *, tls: ssl.SSLContext | None = None
    ) -> None:
        self._registry = registry
        self._credential = credential
        self._tls = tls

    async def serve(
        self, make_receiver: ReceiverFactory, stream_revoked: StreamRevoked, tasks: GuardedTasks
    ) -> NoReturn:
        await self._credential.ready(tasks)
        registration = await self._registry.register_direct()
        failures = 0
        while True:
            try:
                link = await self._open(registration.url, make_receiver)
            except (ConnectFailed, TimeoutError) as error:
                log.warning("connection failed: %s", _reason(error))
                registration = await self._after_failure(registration, error)
            else:
                failures = 0
                log.warning("connection lost: %s", await _until_ended(link))
            await asyncio.sleep(retry_delay(failures, random.random))
            failures += 1

    async def _after_failure(
        self, registration: Registration, error: ConnectFailed | TimeoutError
    ) -> Registration:
        """The registration for the next attempt; raises RegistryError if another one is useless."""
        status = (error.status or 0) if isinstance(error, ConnectFailed) else 0
        if status == HTTPStatus.CONFLICT:
            return await self._registry.register_direct()
        if not 400 <= status < 500 or status in _TRANSIENT_STATUSES:
            return registration
        address = registration.url.partition("?")[0]  # the query is a secret
        raise RegistryError(
            f"failed to connect to exec-server websocket `{address}`: {error}\n\n"
            f"Caused by:\n    {error}"
        )

    async def _open(self, url: str, make_receiver: ReceiverFactory) -> ClientStream:
        headers = await self._credential.headers("GET", url, b"")  # signed for each attempt
        async with asyncio.timeout(OPEN_SECONDS):
            return await open_stream(
                url,
                make_receiver,
                origin="JSON-RPC message from direct exec-server websocket",
                headers=headers,
                tls=self._tls,
            )


async def _until_ended(link: ExecutorRelayLink | ClientStream) -> str:
    """Wait for the end of a link and return the reason; cancellation closes the link first."""
    try:
        return await asyncio.shield(link.ended)
    except asyncio.CancelledError:
        link.close(GOING_AWAY, "")
        await asyncio.wait([link.ended], timeout=SHUTDOWN_GRACE_SECONDS)
        raise


def _log_failure(error: ConnectFailed | TimeoutError, environment_id: str) -> None:
    """Log why no link was opened; as an error if another executor has taken over the id."""
    reason = _reason(error)
    if not reason.endswith(f"({_SUPERSEDED})"):
        log.warning("rendezvous connection failed: %s", reason)
        return
    log.error(
        "another executor has registered as %s since, and this one takes its place again; two "
        "machines need two environment ids",
        environment_id,
    )


def _reason(error: ConnectFailed | TimeoutError) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    rejection = [
        value for name, value in error.headers if name == "x-codex-rendezvous-rejection-reason"
    ]
    known = [value for value in rejection if value in _REJECTIONS]
    return f"{error} ({known[0]})" if known else str(error)


def upgrade_headers(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """The headers that tell a hosted rendezvous where the executor runs."""
    names = (("x-cluster-name", "OPENAI_CLUSTER"), ("x-openai-internal-caller", "DD_SERVICE"))
    return [(header, environ[name]) for header, name in names if environ.get(name)]
