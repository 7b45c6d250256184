"""The upgrade of a socket: its ticket is checked, and it becomes a link or is passed on.

Forwarder is the second relay of bytes between two sockets, beside `proxy.stream.carry`. Both take
the same time (`python -m bench.alternatives`), but a Forwarder takes over a transport in the middle
of a callback, answers for a node that has gone, and ends both sockets with either, as a WebSocket
cannot be closed by half: on `carry`, two tasks and a wrapper would replace two callbacks. A test
holds both to the same bytes, back-pressure and resets. Port forwarding is none: it has a socket at
one end only, and credit instead of pauses.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import dataclass
from typing import Final, cast

from exec_server.errors import ConnectFailed
from exec_server.hosting import rules
from exec_server.hosting.http_connection import TakeOver
from exec_server.hosting.http_messages import PASSED_ON, ServiceRequest, refusal_answer
from exec_server.hosting.node import Node
from exec_server.hosting.relay_hub import RelayedClient, RelayedExecutor, RelayHub, Tenant
from exec_server.hosting.relay_link import RelayLink
from exec_server.hosting.rules import Rejection, Ticket
from exec_server.hosting.store import ExecutorLease, Store, TicketFacts
from exec_server.net.client_tls import roots_for_http, tls_context
from exec_server.net.websocket.handshake import upgrade_answer
from exec_server.protocol.urls import Url, parse_url

# Bytes of one direction that wait in this node. The kernel's buffers come on top.
UNSENT_BYTES: Final = 262_144
# Nodes of a site are close to each other; one that does not accept for so long counts as dead.
CONNECT_SECONDS: Final = 2.0

log = logging.getLogger(__name__)

# An unknown key may be a new one of another node: the keys are read again, but not more often, so
# that invented keys do not cost a statement each.
KEY_REFRESH_SECONDS: Final = 1.0


class Forwarder:
    """Passes a client's request, then bytes both ways, to the node that holds its executor."""

    def __init__(self, forwarders: set[Forwarder]) -> None:
        self._forwarders = forwarders
        self._client = _Side(self)
        self._holder = _Side(self)
        self._client.other, self._holder.other = self._holder, self._client
        self._is_answered = False

    async def connect(self, url: Url, environ: dict[str, str], seconds: float) -> None:
        """Connect to the holder; raises ConnectFailed."""
        context: ssl.SSLContext | None = None
        loop = asyncio.get_running_loop()
        try:
            if url.secure:
                context = tls_context(roots_for_http(environ))
            async with asyncio.timeout(seconds):
                await loop.create_connection(lambda: self._holder, url.host, url.port, ssl=context)
        except (OSError, TimeoutError) as error:
            raise ConnectFailed(str(error) or type(error).__name__) from None
        assert self._holder.transport is not None
        self._holder.transport.pause_reading()

    def open(self, transport: asyncio.Transport, request: ServiceRequest, first: bytes) -> None:
        """Pass on a client's request and all that follows."""
        holder = self._holder.transport
        self._client.transport = transport
        if holder is None or holder.is_closing():
            self.lost(self._holder)
            return
        self._forwarders.add(self)
        for one in (transport, holder):
            one.set_write_buffer_limits(UNSENT_BYTES, UNSENT_BYTES // 4)
        transport.pause_reading()
        transport.set_protocol(self._client)
        line, _, headers = request.head.partition(b"\r\n")
        holder.write(line + b"\r\n" + PASSED_ON.encode() + b": 1\r\n" + headers + first)
        transport.resume_reading()
        holder.resume_reading()

    def cancel(self) -> None:
        """The client has left."""
        if self._holder.transport is not None:
            self._holder.transport.abort()

    def received(self, side: _Side, data: bytes) -> None:
        """Copy bytes to the other side."""
        if side is self._holder:
            self._is_answered = True
        other = cast(_Side, side.other).transport
        if other is not None:
            other.write(data)

    def lost(self, side: _Side) -> None:
        """One side has ended; so does the other one, after the bytes that it was sent."""
        self._forwarders.discard(self)
        client = self._client.transport
        if side is self._holder and client is not None and not self._is_answered:
            # Every request gets an answer.
            self._is_answered = True
            if not client.is_closing():
                client.write(refusal_answer(Rejection(503, "route_unavailable")).encode())
        other = cast(_Side, side.other).transport
        if other is not None and not other.is_closing():
            other.resume_reading()
            other.close()

    def close(self) -> None:
        """End both sides."""
        for side in (self._client, self._holder):
            if side.transport is not None:
                side.transport.close()


class _Side(asyncio.Protocol):
    """One of the two sockets."""

    def __init__(self, forwarder: Forwarder) -> None:
        self._forwarder = forwarder
        self.other: _Side | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._forwarder.received(self, data)

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        other = None if self.other is None else self.other.transport
        if other is not None and not other.is_closing():
            other.resume_reading()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._forwarder.lost(self)


class Rendezvous:
    """Admits sockets that the registry has sent here."""

    def __init__(self, store: Store, hub: RelayHub, node: Node) -> None:
        self._store = store
        self._hub = hub
        self._node = node
        self._keys_read_at = float("-inf")
        self.forwarders: set[Forwarder] = set()
        self.connecting = 0  # forwarders that have no connection to the holder yet

    async def admit(self, ticket: Ticket, request: ServiceRequest) -> TakeOver:
        """The protocol to take over; raises Rejection or DatabaseUnavailable."""
        if self._node.is_closed:
            raise Rejection(503, "pod_draining")
        if self._node.is_full():
            raise Rejection(503, "route_unavailable", "queued_bytes")
        facts = await self._store.admission(ticket)
        if facts is None:
            # Signed by us, but unknown: the database was restored. A registration repairs it.
            raise Rejection(401, "unexpected_executor_registration_id")
        try:
            if facts.is_expired:
                raise Rejection(401, "expired")
            if not facts.has_token:
                raise Rejection(401, "invalid_secret", "revoked_token")
            if not facts.is_current:
                raise Rejection(401, "unexpected_executor_registration_id")
            if ticket.is_executor:
                return await self._admit_executor(ticket, facts)
            return await self._admit_client(ticket, facts, request)
        except Rejection as rejection:
            rejection.tenant = facts.tenant_name
            raise

    async def ticket(self, request: ServiceRequest) -> Ticket:
        """The signed ticket of a request; raises Rejection or DatabaseUnavailable."""
        now = asyncio.get_running_loop().time()
        is_unknown = rules.key_id(request.query) not in self._node.keys
        if is_unknown and now - self._keys_read_at >= KEY_REFRESH_SECONDS:
            self._keys_read_at = now
            await self._node.refresh_keys()
        ticket = rules.check(request.path, request.query, self._node.keys)
        if not request.is_complete_upgrade():
            raise Rejection(400, "malformed_query")
        return ticket

    def _tenant(self, ticket: Ticket, facts: TicketFacts) -> Tenant:
        tenant = self._hub.tenant(ticket.tenant, facts.limits)
        if tenant.sockets >= facts.limits.sockets:
            raise Rejection(503, "route_unavailable", "sockets")
        return tenant

    async def _admit_executor(self, ticket: Ticket, facts: TicketFacts) -> TakeOver:
        self._tenant(ticket, facts)
        key = (ticket.tenant, ticket.environment_id)
        self._node.claiming.add(key)
        epoch = None
        try:
            epoch = await self._store.claim(ticket, self._node.id)
        finally:
            if epoch is None:
                self._node.claiming.discard(key)
        if epoch is None:
            raise Rejection(401, "unexpected_executor_registration_id")
        lease = ExecutorLease(*key, ticket.registration_id, epoch)
        tenant = self._hub.tenant(ticket.tenant, facts.limits)
        return _NewExecutor(self._hub, tenant, self._node, ticket, lease)

    async def _admit_client(
        self, ticket: Ticket, facts: TicketFacts, request: ServiceRequest
    ) -> TakeOver:
        executor = self._hub.executors.get((ticket.tenant, ticket.environment_id))
        if facts.node not in (None, self._node.id):
            return await self._pass_on(facts, request)
        if executor is None or executor.lease.registration_id != ticket.registration_id:
            raise Rejection(503, "route_unavailable")
        self._client_room(ticket, facts, executor)  # a refused ticket is not spent
        if not await self._store.spend(ticket):
            raise Rejection(401, "expired")
        # No await from here until the link is open: these limits are exact.
        tenant = self._client_room(ticket, facts, executor)
        return _NewClient(self._hub, tenant, ticket, executor)

    def _client_room(self, ticket: Ticket, facts: TicketFacts, executor: RelayedExecutor) -> Tenant:
        if not executor.link.is_open:
            raise Rejection(503, "route_unavailable")
        if not executor.has_room(ticket.token_id):
            raise Rejection(503, "route_unavailable", "streams")
        return self._tenant(ticket, facts)

    async def _pass_on(self, facts: TicketFacts, request: ServiceRequest) -> TakeOver:
        assert facts.node is not None
        assert facts.node_url is not None
        if PASSED_ON in request.headers or self._node.is_dead(facts.node, facts.node_expires):
            raise Rejection(503, "route_unavailable")
        forwarder = Forwarder(self.forwarders)
        self.connecting += 1
        try:
            url = parse_url(facts.node_url, frozenset({"http", "https"}))
            await forwarder.connect(url, dict(self._node.options.environ), CONNECT_SECONDS)
        except (ConnectFailed, ValueError) as error:
            log.warning("node %s cannot be reached: %s", facts.node, error)
            self._node.mark_dead(facts.node, facts.node_expires)
            raise Rejection(503, "route_unavailable") from None
        finally:
            self.connecting -= 1
        return forwarder


@dataclass(frozen=True, slots=True)
class _NewExecutor:
    """An executor that has claimed its environment."""

    hub: RelayHub
    tenant: Tenant
    node: Node
    ticket: Ticket
    lease: ExecutorLease

    def open(self, transport: asyncio.Transport, request: ServiceRequest, first: bytes) -> None:
        self.node.claiming.discard((self.lease.tenant, self.lease.environment_id))
        transport.write(upgrade_answer(request.headers))
        link = RelayLink(transport, self.ticket.token_id)
        executor = RelayedExecutor(self.hub, self.tenant, link, self.lease, self.node.released)
        log.info("%s: %s is online", request.peer, self.lease.environment_id)
        executor.open(first)

    def cancel(self) -> None:
        self.node.claiming.discard((self.lease.tenant, self.lease.environment_id))
        self.node.released(self.lease)


@dataclass(frozen=True, slots=True)
class _NewClient:
    """A client whose ticket is spent."""

    hub: RelayHub
    tenant: Tenant
    ticket: Ticket
    executor: RelayedExecutor

    def open(self, transport: asyncio.Transport, request: ServiceRequest, first: bytes) -> None:
        transport.write(upgrade_answer(request.headers))
        link = RelayLink(transport, self.ticket.token_id)
        client = RelayedClient(self.hub, self.tenant, link, self.executor)
        client.open(first)

    def cancel(self) -> None:
        """The spent ticket is all that is left."""
