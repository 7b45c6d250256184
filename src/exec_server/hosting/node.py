"""Node: the life of one process of the service in its site.

Every two seconds it proves that it lives, and learns of moved executors, revoked tokens and keys.
Without a database it keeps its streams. A drain moves its executors to other nodes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from exec_server.hosting.database import DatabaseUnavailable
from exec_server.hosting.http_connection import Capacity
from exec_server.hosting.http_messages import Networks
from exec_server.hosting.relay_hub import POLICY, REPLACED, RESTARTING, RelayedExecutor, RelayHub
from exec_server.hosting.relay_link import flush_links
from exec_server.hosting.rules import SECRET_BYTES
from exec_server.hosting.store import RENEWAL_SECONDS, Count, ExecutorLease, Renewal, Store

log = logging.getLogger(__name__)

# Bytes in all queues of a node. Beyond it new sockets and registrations are refused.
QUEUED_BYTES: Final = 268_435_456
# How often pings, stalled executors and the queues are looked at.
TICK_SECONDS: Final = 1.0
# From the start of a drain to the end of new upgrades: balancers have noticed by then.
NOTICE_SECONDS: Final = 2.0
# Counters of executors that one renewal writes, each by a statement. More of them could take so
# long that the node counted as dead; they follow with the next renewals, in turn.
COUNTS_A_RENEWAL: Final = 500
# The longest time between two executors that a drain closes. They are spread over half of the
# drain, so that they do not all come back together. Few of them take less: 20 a second are no
# burden for the other nodes, and each is back sooner.
DRAIN_STEP_SECONDS: Final = 0.05
# Nodes that are remembered as dead: more than a site has. The oldest are forgotten.
DEAD_NODES: Final = 64


@dataclass(frozen=True)
class ServiceOptions:
    """The settings of a node."""

    public_url: str
    node_url: str
    ticket_seconds: int = 60
    authorization_seconds: int = 60
    stall_seconds: float = 2.0
    drain_seconds: float = 20.0
    takeover: bool = True
    trusted: Networks = ()
    capacity: Capacity = field(default_factory=Capacity)
    environ: Mapping[str, str] = field(default_factory=dict)
    metrics_token_hash: str = ""
    metrics_are_open: bool = True  # on the listener of the node, if there is no token
    makes_first_tokens: bool = False  # of a new database, instead of `registry init`


class Node:
    """One process of the service."""

    def __init__(
        self,
        options: ServiceOptions,
        store: Store,
        hub: RelayHub,
        start_task: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self.id = f"node-{secrets.token_hex(4)}"
        self.options = options
        self._store = store
        self._hub = hub
        self._start_task = start_task
        # Nodes that refused a connection, with the end of the renewal that named them.
        self._dead: dict[str, float] = {}
        self._renewed_at = 0.0  # by the clock of the database
        self._turn = 0  # of the executors, to have their counters written
        self.keys: dict[str, bytes] = {}  # that sign URLs, the newest first
        self.queued_bytes = 0
        self.used_tokens: set[str] = set()
        self.claiming: set[tuple[str, str]] = set()  # executors whose claim is on its way
        self.has_database = False
        self.is_draining = False
        self.is_closed = False

    def is_full(self) -> bool:
        return self.queued_bytes > QUEUED_BYTES

    def is_dead(self, node: str | None, expires: float) -> bool:
        """Whether a node has refused a connection since the renewal that ends then."""
        return node is not None and self._dead.get(node) == expires

    def mark_dead(self, node: str, expires: float) -> None:
        """Another node has refused a connection."""
        self._dead = {node: expires, **self._dead}
        while len(self._dead) > DEAD_NODES:
            self._dead.popitem()

    async def refresh_keys(self) -> None:
        self.keys = await self._store.keys() or self.keys

    async def start(self) -> None:
        """The first renewal; raises DatabaseUnavailable."""
        self._renewed_at = await self._store.now()
        await self._renew()

    async def run(self) -> None:
        """Renew the row of this node until cancelled."""
        while True:
            await asyncio.sleep(RENEWAL_SECONDS)
            try:
                await self._renew()
            except DatabaseUnavailable as error:
                if self.has_database:
                    log.error("the database is away, open streams go on: %s", error)
                self.has_database = False
            except Exception:  # an edge: a defect must not end the streams of this node
                log.exception("defect in a renewal")

    async def _renew(self) -> None:
        executors = dict(self._hub.executors)
        used, counts = set(self.used_tokens), self._counts(executors)
        self.used_tokens.clear()
        try:
            renewal = await self._store.renew(
                self.id,
                self.options.node_url,
                draining=self.is_draining,
                since=self._renewed_at,
                counts=counts,
                used_tokens=used,
            )
        except DatabaseUnavailable:
            self.used_tokens.update(used)
            raise
        if not self.has_database:
            log.info("connected to the database as %s", self.id)
        self.has_database = True
        for count in counts:
            executor = executors[count.lease.tenant, count.lease.environment_id]
            executor.bytes -= count.bytes
            executor.counted_streams = count.streams
        self._renewed_at = renewal.now
        self.keys = renewal.keys
        if str(int(renewal.now // 86_400)) not in self.keys:
            secret = secrets.token_bytes(SECRET_BYTES)
            self.keys = await self._store.rotate_keys(renewal.now, secret)
        self._hub.end_streams_of(renewal.killed)
        self._close_revoked(renewal.revoked)
        await self._compare(executors, renewal)
        flush_links()

    def _counts(self, executors: Mapping[tuple[str, str], RelayedExecutor]) -> list[Count]:
        """What has changed since the last renewal, of as many executors as one may write."""
        counts: list[Count] = []
        turn = self._turn % max(len(executors), 1)
        for executor in [*executors.values()][turn:] + [*executors.values()][:turn]:
            if len(counts) == COUNTS_A_RENEWAL:
                break
            self._turn += 1
            if executor.bytes or len(executor.streams) != executor.counted_streams:
                counts.append(Count(executor.lease, len(executor.streams), executor.bytes))
        return counts

    def _close_revoked(self, revoked: frozenset[str]) -> None:
        # Clients first: the end of their executor would close them with another code.
        links = [client.link for client in self._hub.clients]
        links += [executor.link for executor in self._hub.executors.values()]
        for link in links:
            if link.token_id in revoked:
                link.close(POLICY, "the token was revoked")

    async def _compare(
        self, executors: Mapping[tuple[str, str], RelayedExecutor], renewal: Renewal
    ) -> None:
        """Let go of executors that have moved; repair rows that the database has lost."""
        for key, executor in executors.items():
            held = renewal.held.pop(key, None)
            mine = executor.lease
            if held == (mine.epoch, mine.registration_id) or not executor.link.is_open:
                continue
            if held is None and await self._store.reclaim(mine, self.id):
                continue
            executor.link.close(REPLACED, "replaced by a new connection")
        for (tenant, name), (epoch, registration_id) in renewal.held.items():
            # The row says that this node holds it; its release was lost.
            if (tenant, name) not in self._hub.executors and (tenant, name) not in self.claiming:
                lease = ExecutorLease(tenant, name, registration_id, epoch)
                await self._store.release(lease, self.id)

    def released(self, lease: ExecutorLease) -> None:
        """An executor has left."""
        self._start_task(self._release(lease))

    async def _release(self, lease: ExecutorLease) -> None:
        try:
            await self._store.release(lease, self.id)
        except DatabaseUnavailable:
            pass  # the next renewal repairs the row

    def superseded(self, tenant: str, environment_id: str, registration_id: str) -> None:
        """A newer registration ends the socket of the former one; other nodes see it later."""
        executor = self._hub.executors.get((tenant, environment_id))
        if executor is not None and executor.lease.registration_id != registration_id:
            executor.link.close(REPLACED, "superseded by a new registration")

    def holds(self, tenant: str, environment_id: str) -> bool:
        return (tenant, environment_id) in self._hub.executors

    def tenant_sockets(self, tenant: str) -> int:
        record = self._hub.tenants.get(tenant)
        return 0 if record is None else record.sockets

    async def tick(self) -> None:
        """Ping peers and look for stalled ones until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = loop.time()
            for executor in list(self._hub.executors.values()):
                executor.link.tick(now)
                executor.check_progress(now)
            for client in list(self._hub.clients):
                client.link.tick(now)
            self.queued_bytes = self._hub.unsent()
            self._hub.forget_idle_tenants()

    async def drain(self, seconds: float, forwarders: Collection[object]) -> None:
        """Move executors to other nodes, one by one; clients of `forwarders` get notice too."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        self.is_draining = True
        try:
            await self._renew()
        except DatabaseUnavailable:
            pass
        # Without sockets there is nothing to move, and no balancer to wait for.
        if self._hub.executors or self._hub.clients or forwarders:
            await _sleep_until(started + min(NOTICE_SECONDS, seconds / 2))
        self.is_closed = True
        executors = list(self._hub.executors.values())
        begun = loop.time()
        left = max(min(seconds / 2, started + seconds - begun), 0.0)
        pause = min(DRAIN_STEP_SECONDS, left / max(len(executors), 1))
        for number, executor in enumerate(executors):
            await _sleep_until(begun + number * pause)
            executor.close(RESTARTING, "the node is restarting")
            flush_links()

    async def leave(self) -> None:
        """Remove the row of this node, so that others need not wait for its end."""
        try:
            await self._store.remove_node(self.id)
        except DatabaseUnavailable:
            pass


async def _sleep_until(when: float) -> None:
    await asyncio.sleep(max(when - asyncio.get_running_loop().time(), 0.0))
