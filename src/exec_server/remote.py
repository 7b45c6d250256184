"""The executor: registers with a registry, keeps one link to it, serves who comes by that link.

There are two loops with different tempers. What the registry refuses is final, because asking
again would not help: the program ends with its answer. What happens to the link is not: it is
opened again and again, slower each time, for as long as the program runs.
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

from exec_server.errors import ConnectFailed, RegistryError
from exec_server.registry.api import Registration, Registry, retry_delay
from exec_server.registry.credentials import Credential
from exec_server.relay.frames import FRAME_BYTES
from exec_server.relay.noise import Identity
from exec_server.relay.plain import PlainStreams
from exec_server.relay.streams import Attempt
from exec_server.rpc.stream import MessageReceiver, MessageStream
from exec_server.transports.client_socket import ClientSocket, connect
from exec_server.transports.dialed import DialedStream, open_stream
from exec_server.transports.frames import MESSAGE_BYTES
from exec_server.transports.rendezvous import RendezvousLink, Settings, noise_streams

log = logging.getLogger(__name__)

# From the first packet to a WebSocket.
OPEN_SECONDS = 10.0
# Waits between attempts to connect double from 1 s up to this.
MAX_BACKOFF_SECONDS = 30.0
# A link that has lasted so long was a good one: the next wait is short again.
GOOD_LINK_SECONDS = 120.0
# How long the relay may take to notice that we go.
FAREWELL_SECONDS = 0.25

GOING_AWAY = 1001

# Refusals of a direct connection that may be withdrawn. Another 4xx stays, except for a conflict:
# somebody else has registered since, and so do we.
_PASSING = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)

Security = Literal["noise", "plain", "text"]
Receiver = Callable[[MessageStream], MessageReceiver]


class Backoff:
    """How long to wait before the next attempt to connect."""

    def __init__(self, chance: Callable[[], float] = random.random) -> None:
        self._chance = chance
        self._base = 1.0

    def next_wait(self) -> float:
        """Between half and all of a time that doubles, lest a crowd come back at once."""
        base, self._base = self._base, min(2 * self._base, MAX_BACKOFF_SECONDS)
        return base / 2 + self._chance() * base / 2

    def link_ended(self, lasted: float) -> None:
        if lasted >= GOOD_LINK_SECONDS:
            self._base = 1.0


class RelayExecutor:
    """Serves clients that come through a relay, many on one link."""

    def __init__(
        self,
        registry: Registry,
        credential: Credential,
        *,
        security: Security = "noise",
        tls: ssl.SSLContext | None = None,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._registry = registry
        self._credential = credential
        self._security = security
        self._tls = tls
        self._headers = headers
        self._identity = Identity.generate()
        self._is_registered = False

    async def serve(self, receiver: Receiver, tasks: asyncio.TaskGroup) -> NoReturn:
        await self._credential.ready()
        if self._security == "noise":
            log.info("this executor's key is %s", self._identity.public.fingerprint)
        registration = await self._register()
        settings = Settings(receiver, tasks)
        loop = asyncio.get_running_loop()
        backoff = Backoff()
        while True:
            try:
                link = await self._open(registration, settings)
            except (ConnectFailed, TimeoutError) as error:
                log.warning("rendezvous connection failed: %s", _reason(error))
                if isinstance(error, ConnectFailed) and 400 <= (error.status or 0) < 500:
                    registration = await self._register()
            else:
                began = loop.time()
                log.info("connected to the rendezvous")
                log.warning("rendezvous connection lost: %s", await _until_ended(link))
                backoff.link_ended(loop.time() - began)
            await asyncio.sleep(backoff.next_wait())
            if self._security != "noise":
                registration = await self._register()  # these forms do so before every attempt

    async def _register(self) -> Registration:
        if self._security == "noise":
            return await self._registry.register_until_accepted(self._identity.public)
        is_text = self._security == "text"
        registration = await self._registry.register_plain(
            form="text" if is_text else "relay-plain"
        )
        if not self._is_registered:
            # Scripts for these forms wait for this very line.
            noun = "executor" if is_text else "environment"
            line = f"codex exec-server remote {noun} registered with {noun}_id"
            print(line, self._registry.environment_id, file=sys.stderr, flush=True)
        self._is_registered = True
        return registration

    async def _open(
        self, registration: Registration, settings: Settings
    ) -> RendezvousLink | DialedStream:
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
        settings: Settings,
        headers: Sequence[tuple[str, str]],
    ) -> RendezvousLink:
        made: list[RendezvousLink] = []
        encrypted = self._security == "noise"

        async def validate(attempt: Attempt) -> bool:
            return await self._registry.validate(
                registration.registration_id, attempt.key, attempt.authorization, attempt.stream_id
            )

        def make_link(socket: ClientSocket) -> RendezvousLink:
            ids = (self._registry.environment_id, registration.registration_id)
            make_streams = noise_streams(self._identity, *ids) if encrypted else PlainStreams
            made.append(RendezvousLink(socket, settings, make_streams, validate))
            return made[0]

        await connect(
            registration.url,
            make_link,
            headers=headers,
            tls=self._tls,
            # Without encryption a message is one frame, however long it is.
            message_bytes=FRAME_BYTES if encrypted else MESSAGE_BYTES,
        )
        return made[0]


class DirectExecutor:
    """Serves the one client that a service puts at the other end of a signed WebSocket."""

    def __init__(
        self, registry: Registry, credential: Credential, *, tls: ssl.SSLContext | None = None
    ) -> None:
        self._registry = registry
        self._credential = credential
        self._tls = tls

    async def serve(self, receiver: Receiver, tasks: asyncio.TaskGroup) -> NoReturn:
        await self._credential.ready()
        registration = await self._registry.register_direct()
        failures = 0
        while True:
            try:
                link = await self._open(registration.url, receiver)
            except (ConnectFailed, TimeoutError) as error:
                log.warning("connection failed: %s", _reason(error))
                registration = await self._reconsidered(registration, error)
            else:
                failures = 0
                log.warning("connection lost: %s", await _until_ended(link))
            await asyncio.sleep(retry_delay(failures, random.random))
            failures += 1

    async def _reconsidered(
        self, registration: Registration, error: ConnectFailed | TimeoutError
    ) -> Registration:
        """What to connect to next; raises RegistryError if nothing will help."""
        status = (error.status or 0) if isinstance(error, ConnectFailed) else 0
        if status == HTTPStatus.CONFLICT:
            return await self._registry.register_direct()
        if not 400 <= status < 500 or status in _PASSING:
            return registration
        address = registration.url.partition("?")[0]  # the rest is as good as a password
        raise RegistryError(
            f"failed to connect to exec-server websocket `{address}`: {error}\n\n"
            f"Caused by:\n    {error}"
        )

    async def _open(self, url: str, receiver: Receiver) -> DialedStream:
        headers = await self._credential.headers("GET", url, b"")  # signed anew each time
        async with asyncio.timeout(OPEN_SECONDS):
            return await open_stream(
                url,
                receiver,
                origin="JSON-RPC message from direct exec-server websocket",
                headers=headers,
                tls=self._tls,
            )


async def _until_ended(link: RendezvousLink | DialedStream) -> str:
    """Why it ended; if we are cancelled, it is closed first."""
    try:
        return await asyncio.shield(link.ended)
    except asyncio.CancelledError:
        link.close(GOING_AWAY, "")
        await asyncio.wait([link.ended], timeout=FAREWELL_SECONDS)
        raise


def _reason(error: ConnectFailed | TimeoutError) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    rejection = [
        value for name, value in error.headers if name == "x-codex-rendezvous-rejection-reason"
    ]
    known = [value for value in rejection if value in _REJECTIONS]
    return f"{error} ({known[0]})" if known else str(error)


# Why a rendezvous may refuse us. Only these are logged: anything else is a stranger's text.
_REJECTIONS = frozenset(
    {
        "expired",
        "extra_query_param",
        "invalid_expiry",
        "invalid_role",
        "invalid_secret",
        "invalid_signature",
        "malformed_query",
        "missing_executor_registration_id",
        "missing_expiry",
        "missing_role",
        "missing_signature",
        "missing_version",
        "pod_draining",
        "route_unavailable",
        "unexpected_executor_registration_id",
        "unknown_route",
        "wrong_rendezvous_cluster",
    }
)


def upgrade_headers(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """What a hosted rendezvous wants to know of where we run."""
    names = (("x-cluster-name", "OPENAI_CLUSTER"), ("x-openai-internal-caller", "DD_SERVICE"))
    return [(header, environ[name]) for header, name in names if environ.get(name)]
