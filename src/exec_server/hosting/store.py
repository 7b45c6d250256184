"""Store: the registry's questions to its database, one method each.

Times are those of the database. No other module sees a row.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from exec_server.hosting.database import Database, DatabaseUnavailable, Row
from exec_server.hosting.metrics import Metrics
from exec_server.hosting.rules import (
    TENANT_BYTES_PER_SECOND,
    TENANT_ENVIRONMENTS,
    TENANT_HANDSHAKES_PER_SECOND,
    TENANT_SOCKETS,
    Ticket,
)
from exec_server.hosting.statements import MIGRATIONS
from exec_server.hosting.statements import Statement as Sql

# How long a node counts as alive without a renewal, and how often it renews itself.
NODE_SECONDS: Final = 6.0
RENEWAL_SECONDS: Final = 2.0
# Revocations are looked up this far back, because a transaction may commit late.
_REVOKED_OVERLAP_SECONDS: Final = 10.0
_KEY_SECONDS: Final = 86_400

Step = tuple[Sql, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a tenant."""

    environments: int = TENANT_ENVIRONMENTS
    sockets: int = TENANT_SOCKETS
    bytes_per_second: int = TENANT_BYTES_PER_SECOND
    handshakes_per_second: int = TENANT_HANDSHAKES_PER_SECOND


@dataclass(frozen=True, slots=True)
class TenantFacts:
    """A tenant as `tenant list` shows it."""

    id: str
    name: str
    tokens: int  # that are valid
    environments: int
    online: int  # of the environments
    limits: Limits


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """A token as `token list` shows it; `scopes` has spaces between them."""

    id: str
    name: str
    tenant: str
    scopes: str
    created_at: float
    expires_at: float | None
    last_used_at: float | None


@dataclass(frozen=True, slots=True)
class EnvironmentFacts:
    """An environment as `status` shows it."""

    tenant: str
    environment_id: str
    node: str | None  # that holds its executor
    since: float | None
    streams: int
    bytes: int


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node as `status` shows it."""

    node: str
    url: str
    draining: bool
    executors: int


@dataclass(frozen=True, slots=True)
class AuthenticatedToken:
    """The token of a request."""

    token_id: str
    tenant: str  # its random id
    scopes: tuple[str, ...]
    limits: Limits
    tenant_name: str = ""
    is_revoked: bool = False
    is_expired: bool = False


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token to be stored; `expires` is in seconds from now."""

    id: str
    hash: str
    name: str
    tenant: str
    scopes: tuple[str, ...]
    expires: float | None = None


@dataclass(frozen=True, slots=True)
class Authorization:
    """A stored authorization: its registration, the time, and the node that holds the executor."""

    registration_id: str
    executor_key: str
    now: float
    node: str | None
    node_expires: float


@dataclass(frozen=True, slots=True)
class TicketFacts:
    """The state of the database that decides about a ticket."""

    is_expired: bool
    has_token: bool
    is_current: bool
    node: str | None
    node_url: str | None
    node_expires: float
    tenant_name: str
    limits: Limits


@dataclass(frozen=True, slots=True)
class ExecutorLease:
    """An executor that a node holds; a later epoch replaces an earlier one."""

    tenant: str
    environment_id: str
    registration_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Count:
    """Streams of a held executor now, and bytes since the last renewal."""

    lease: ExecutorLease
    streams: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Renewal:
    """The state of the site at a renewal."""

    now: float
    held: dict[tuple[str, str], tuple[int, str]]
    revoked: frozenset[str]
    killed: frozenset[str]  # those whose clients' commands end
    keys: dict[str, bytes]  # the newest first


class Store:
    """The questions of the registry to one database."""

    def __init__(self, database: Database, metrics: Metrics) -> None:
        self._database = database
        self._metrics = metrics

    async def open(self) -> None:
        """Create or migrate the tables; raises StartupError or DatabaseUnavailable."""
        await self._database.migrate(MIGRATIONS)

    async def close(self) -> None:
        await self._database.close()

    async def add_first_tenant(self, tenant: str, name: str, tokens: Sequence[NewToken]) -> bool:
        """Make the first tenant with its tokens, unless there is one; whether this call did."""
        steps: list[Step] = [(Sql.ADD_FIRST_TENANT, (tenant, name))]
        steps += [(Sql.ADD_TOKEN, _token_values(token)) for token in tokens]
        rows = await self._run(steps, durable=True)
        return bool(rows[1])

    async def has_tenant(self) -> bool:
        return bool((await self._fetch(Sql.HAS_TENANT))[0][0])

    async def tenant(self, name: str, new_id: str | None = None) -> tuple[str, Limits] | None:
        """Id and limits of a tenant; with `new_id` it is made if it does not exist."""
        steps: list[Step] = [(Sql.TENANT, (name,))]
        if new_id is not None:
            steps.insert(0, (Sql.ADD_TENANT, (new_id, name)))
        rows = (await self._run(steps, durable=True))[-1]
        return (rows[0][0], _limits(rows[0][1:])) if rows else None

    async def tenants(self, name: str | None = None) -> list[TenantFacts]:
        """All tenants, or the one with this name."""
        rows = await self._fetch(Sql.TENANTS, name)
        return [
            TenantFacts(tenant, name, tokens, environments, online, _limits(limits))
            for tenant, name, tokens, environments, online, *limits in rows
        ]

    async def remove_tenant(self, name: str) -> bool:
        """Remove a tenant with its tokens and environments, unless one of these is online."""
        steps: list[Step] = [
            (Sql.REMOVE_TENANT_AUTHORIZATIONS, (name,)),
            (Sql.REMOVE_TENANT_TOKENS, (name,)),
            (Sql.REMOVE_TENANT_ENVIRONMENTS, (name,)),
            (Sql.REMOVE_TENANT, (name,)),
        ]
        return bool((await self._run(steps, durable=True))[-1])

    async def limit_tenant(self, name: str, values: tuple[int | None, ...]) -> Limits | None:
        """Change limits that are not None; None if there is no such tenant."""
        [rows] = await self._run([(Sql.LIMIT_TENANT, (name, *values))], durable=True)
        return _limits(rows[0]) if rows else None

    async def add_token(self, token: NewToken) -> float | None:
        """Store a token; returns when it expires."""
        [rows] = await self._run([(Sql.ADD_TOKEN, _token_values(token))], durable=True)
        expires: float | None = rows[0][0]
        return expires

    async def tokens(self, tenant: str | None) -> list[TokenFacts]:
        """The tokens that are not revoked."""
        return [TokenFacts(*row) for row in await self._fetch(Sql.TOKENS, tenant)]

    async def revoke_token(self, token_id: str, *, kill: bool = False) -> bool:
        """Revoke a token and its authorizations, and end its clients' commands; if it existed."""
        steps: list[Step] = [
            (Sql.KILL_TOKEN if kill else Sql.REVOKE_TOKEN, (token_id,)),
            (Sql.REVOKE_AUTHORIZATIONS, (token_id,)),
        ]
        return bool((await self._run(steps, durable=True))[0])

    async def caller(self, token_hash: str) -> AuthenticatedToken | None:
        """The token with this hash, also one that is not valid any more."""
        rows = await self._fetch(Sql.TOKEN, token_hash)
        if not rows:
            return None
        token_id, tenant, name, scopes, is_revoked, is_expired, *limits = rows[0]
        flags = (bool(is_revoked), bool(is_expired))
        names = tuple(scopes.split())
        return AuthenticatedToken(token_id, tenant, names, _limits(limits), name, *flags)

    async def register(
        self,
        caller: AuthenticatedToken,
        environment_id: str,
        registration_id: str,
        executor_key: str,
        *,
        takeover: bool,
    ) -> float | None:
        """Make a registration the current one; the time, or None if it is refused."""
        names = (caller.tenant, environment_id)
        values = (*names, registration_id, executor_key, caller.token_id, takeover)
        steps: list[Step] = [
            (Sql.REGISTER, (*values, caller.limits.environments)),
            (Sql.FORGET_AUTHORIZATIONS, names),
        ]
        # Durable: a client of an environment that a crash has undone would give up its session.
        rows = (await self._run(steps, durable=True))[0]
        return float(rows[0][1]) if rows else None

    async def authorize(
        self,
        caller: AuthenticatedToken,
        environment_id: str,
        secret_hash: str,
        key_hash: str,
        seconds: float,
    ) -> Authorization | None:
        """Store an authorization for the current registration; None if it has no live holder."""
        names = (caller.tenant, environment_id)
        values = (*names, secret_hash, key_hash, caller.token_id, float(seconds))
        granted, current = await self._run([(Sql.AUTHORIZE, values), (Sql.ENVIRONMENT, names)])
        if not granted:
            return None
        registration_id, now = granted[0]
        # Between two statements of a transaction another registration may have been committed:
        # its executor is not here yet.
        if current[0][0] != registration_id:
            return None
        _, key, node, expires = current[0]
        return Authorization(registration_id, key, now, node, expires or 0.0)

    async def is_known(self, tenant: str, environment_id: str) -> bool:
        """Whether the environment is registered, online or not."""
        return bool(await self._fetch(Sql.ENVIRONMENT, tenant, environment_id))

    async def consume(
        self, tenant: str, environment_id: str, registration_id: str, key_hash: str, secret: str
    ) -> bool:
        """Use up an authorization if every condition holds. One retry: executors have none."""
        values = (secret, tenant, environment_id, registration_id, key_hash)
        try:
            return bool(await self._fetch(Sql.CONSUME, *values))
        except DatabaseUnavailable:
            return bool(await self._fetch(Sql.CONSUME, *values))

    async def admission(self, ticket: Ticket) -> TicketFacts | None:
        """The facts about a ticket; None if its tenant is unknown."""
        names = (ticket.tenant, ticket.environment_id, ticket.registration_id)
        rows = await self._fetch(Sql.ADMISSION, *names, float(ticket.expires), ticket.token_id)
        if not rows:
            return None
        expired, has_token, is_current, node, url, expires, tenant_name, *limits = rows[0]
        flags = (bool(expired), bool(has_token), bool(is_current))
        return TicketFacts(*flags, node, url, expires or 0.0, tenant_name, _limits(limits))

    async def claim(self, ticket: Ticket, node: str) -> int | None:
        """Name this node as the holder; the new epoch, or None without such a registration."""
        names = (ticket.tenant, ticket.environment_id, ticket.registration_id)
        rows = await self._fetch(Sql.CLAIM, *names, node)
        return int(rows[0][0]) if rows else None

    async def reclaim(self, lease: ExecutorLease, node: str) -> bool:
        """Write a claim again that the database has lost; False if another one is newer."""
        values = (lease.tenant, lease.environment_id, lease.registration_id)
        return bool(await self._fetch(Sql.RECLAIM, *values, node, lease.epoch))

    async def release(self, lease: ExecutorLease, node: str) -> None:
        """The executor of this lease has left."""
        await self._fetch(Sql.RELEASE, lease.tenant, lease.environment_id, node, lease.epoch)

    async def spend(self, ticket: Ticket) -> bool:
        """Use a client's ticket; False if it was used before or is expired."""
        return bool(await self._fetch(Sql.SPEND, ticket.nonce, float(ticket.expires)))

    async def now(self) -> float:
        return float((await self._fetch(Sql.NOW))[0][0])

    async def keys(self) -> dict[str, bytes]:
        """The keys that sign URLs, the newest first."""
        return _keys(await self._fetch(Sql.KEYS))

    async def rotate_keys(self, now: float, secret: bytes) -> dict[str, bytes]:
        """Add the key of this day unless a node has done so, and keep two."""
        kid = str(int(now // _KEY_SECONDS))
        steps: list[Step] = [
            (Sql.ADD_KEY, (kid, secret.hex())),
            (Sql.FORGET_KEYS, ()),
            (Sql.KEYS, ()),
        ]
        return _keys((await self._run(steps, durable=True))[-1])

    async def renew(
        self,
        node: str,
        url: str,
        *,
        draining: bool,
        since: float,
        counts: Iterable[Count],
        used_tokens: Iterable[str],
    ) -> Renewal:
        """Prove that the node lives, write its counters, and read what has changed."""
        steps: list[Step] = [
            (Sql.RENEW, (node, url, int(draining), NODE_SECONDS)),
            (Sql.HELD, (node,)),
            (Sql.REVOKED, (since - _REVOKED_OVERLAP_SECONDS,)),
            (Sql.KEYS, ()),
            (Sql.FORGET_EXPIRED_AUTHORIZATIONS, ()),
            (Sql.FORGET_EXPIRED_SPENT, ()),
            (Sql.FORGET_EXPIRED_NODES, ()),
        ]
        for count in counts:
            held = count.lease
            names = (held.tenant, held.environment_id, node, held.epoch)
            steps.append((Sql.COUNT, (*names, count.streams, count.bytes)))
        steps += [(Sql.TOUCH_TOKEN, (token,)) for token in sorted(used_tokens)]
        renewed, held_rows, revoked, keys, *_ = await self._run(steps)
        return Renewal(
            renewed[0][0],
            {(tenant, name): (epoch, reg) for tenant, name, epoch, reg in held_rows},
            frozenset(row[0] for row in revoked),
            frozenset(row[0] for row in revoked if row[1]),
            _keys(keys),
        )

    async def remove_node(self, node: str) -> None:
        await self._fetch(Sql.REMOVE_NODE, node)

    async def status(self) -> tuple[list[EnvironmentFacts], list[NodeFacts]]:
        """All environments, and the nodes that live."""
        environments, nodes = await self._run([(Sql.ENVIRONMENTS, ()), (Sql.NODES, ())])
        return (
            [EnvironmentFacts(*row) for row in environments],
            [NodeFacts(node, url, bool(draining), count) for node, url, draining, count in nodes],
        )

    async def remove_environments(self, tenant: str, ids: Iterable[str]) -> list[tuple[str, str]]:
        """Remove environments that are offline; tenant and id of those that were removed."""
        steps: list[Step] = [(Sql.REMOVE_ENVIRONMENT, (tenant, name)) for name in ids]
        rows = await self._run(steps, durable=True)
        return [(row[0], row[1]) for removed in rows for row in removed]

    async def remove_unseen(self, seconds: float, tenant: str | None) -> list[tuple[str, str]]:
        """Remove environments that were not online for so long, in one tenant or in all."""
        [rows] = await self._run([(Sql.REMOVE_UNSEEN, (float(seconds), tenant))], durable=True)
        return sorted((row[0], row[1]) for row in rows)

    async def _fetch(self, statement: Sql, *values: Any) -> list[Row]:
        [rows] = await self._run([(statement, values)])
        return rows

    async def _run(self, steps: Sequence[Step], *, durable: bool = False) -> list[list[Row]]:
        started = time.monotonic()
        try:
            return await self._database.run(steps, durable=durable)
        finally:
            # Of a transaction the first statement gives the name.
            seconds = time.monotonic() - started
            self._metrics.database_seconds.observe(steps[0][0].name.lower(), seconds)


def _token_values(token: NewToken) -> tuple[Any, ...]:
    scopes = " ".join(token.scopes)
    return (token.id, token.hash, token.name, token.tenant, scopes, token.expires)


def _limits(row: Sequence[int | None]) -> Limits:
    names = (field.name for field in fields(Limits))
    own = {name: value for name, value in zip(names, row, strict=True) if value is not None}
    return Limits(**own)


def _keys(rows: Sequence[Row]) -> dict[str, bytes]:
    return {kid: bytes.fromhex(secret) for kid, secret in rows}
