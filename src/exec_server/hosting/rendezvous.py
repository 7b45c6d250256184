"""The upgrade of a socket: its ticket is checked, and it becomes a link or is passed on."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Final

from exec_server.errors import ConnectFailed
from exec_server.hosting import tickets
from exec_server.hosting.exchange import Client, Executor, RelayHub, Tenant
from exec_server.hosting.front import TakeOver
from exec_server.hosting.http_messages import PASSED_ON, Request
from exec_server.hosting.node import Node
from exec_server.hosting.passage import CONNECT_SECONDS, Forwarder
from exec_server.hosting.relay_link import RelayLink
from exec_server.hosting.store import ExecutorLease, Store, TicketFacts
from exec_server.hosting.tickets import Rejection, Ticket
from exec_server.net.websocket.handshake import upgrade_answer
from exec_server.protocol.urls import parse_url

log = logging.getLogger(__name__)

# An unknown key may be a new one of another node: the keys are read again, but not more often, so
# that invented keys do not cost a statement each.
KEY_REFRESH_SECONDS: Final = 1.0


class Rendezvous:
    """Admits sockets that the registry has sent here."""

    def __init__(self, store: Store, hub: RelayHub, node: Node, environ: dict[str, str]) -> None:
        self._store = store
        self._hub = hub
        self._node = node
        self._environ = environ
        self._keys_read_at = float("-inf")
        self.forwarders: set[Forwarder] = set()
        self.connecting = 0  # forwarders that have no connection to the holder yet

    async def admit(self, ticket: Ticket, request: Request) -> TakeOver:
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
            return await self._admit(ticket, facts, request)
        except Rejection as rejection:
            rejection.tenant_name = facts.tenant_name
            raise

    async def _admit(self, ticket: Ticket, facts: TicketFacts, request: Request) -> TakeOver:
        if facts.is_expired:
            raise Rejection(401, "expired")
        if not facts.has_token:
            raise Rejection(401, "invalid_secret", "revoked_token")
        if not facts.is_current:
            raise Rejection(401, "unexpected_executor_registration_id")
        if ticket.is_executor:
            return await self._admit_executor(ticket, facts)
        return await self._admit_client(ticket, facts, request)

    async def ticket(self, request: Request) -> Ticket:
        """The signed ticket of a request; raises Rejection or DatabaseUnavailable."""
        now = asyncio.get_running_loop().time()
        is_unknown = tickets.key_id(request.query) not in self._node.keys
        if is_unknown and now - self._keys_read_at >= KEY_REFRESH_SECONDS:
            self._keys_read_at = now
            await self._node.refresh_keys()
        ticket = tickets.check(request.path, request.query, self._node.keys)
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

    async def _admit_client(self, ticket: Ticket, facts: TicketFacts, request: Request) -> TakeOver:
        executor = self._hub.executors.get((ticket.tenant, ticket.environment_id))
        is_here = executor is not None and facts.node in (None, self._node.id)
        if not is_here and facts.node not in (None, self._node.id):
            return await self._pass_on(facts, request)
        if executor is None or executor.lease.registration_id != ticket.registration_id:
            raise Rejection(503, "route_unavailable")
        self._client_room(ticket, facts, executor)  # a refused ticket is not spent
        if not await self._store.spend(ticket):
            raise Rejection(401, "expired")
        # No await from here until the link is open: these limits are exact.
        tenant = self._client_room(ticket, facts, executor)
        return _NewClient(self._hub, tenant, ticket, executor)

    def _client_room(self, ticket: Ticket, facts: TicketFacts, executor: Executor) -> Tenant:
        """The tenant, if it and the executor have room for one more client."""
        if not executor.link.is_open:
            raise Rejection(503, "route_unavailable")
        if not executor.has_room(ticket.token_id):
            raise Rejection(503, "route_unavailable", "streams")
        return self._tenant(ticket, facts)

    async def _pass_on(self, facts: TicketFacts, request: Request) -> TakeOver:
        assert facts.node is not None
        assert facts.node_url is not None
        if PASSED_ON in request.headers or self._node.is_dead(facts.node, facts.node_expires):
            raise Rejection(503, "route_unavailable")
        forwarder = Forwarder(self.forwarders)
        self.connecting += 1
        try:
            url = parse_url(facts.node_url, frozenset({"http", "https"}))
            await forwarder.connect(url, self._environ, CONNECT_SECONDS)
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

    def open(self, transport: asyncio.Transport, request: Request, first: bytes) -> None:
        self.node.claiming.discard((self.lease.tenant, self.lease.environment_id))
        transport.write(upgrade_answer(request.headers))
        link = RelayLink(transport, self.ticket.token_id)
        executor = Executor(self.hub, self.tenant, link, self.lease, self.node.released)
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
    executor: Executor

    def open(self, transport: asyncio.Transport, request: Request, first: bytes) -> None:
        transport.write(upgrade_answer(request.headers))
        link = RelayLink(transport, self.ticket.token_id)
        client = Client(self.hub, self.tenant, link, self.executor)
        client.open(first)

    def cancel(self) -> None:
        """The spent ticket is all that is left."""
