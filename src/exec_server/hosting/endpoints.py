"""The three requests of the registry: register, connect, validate."""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from exec_server.hosting import bodies
from exec_server.hosting.database import DatabaseUnavailable
from exec_server.hosting.http_messages import Answer, Request, json_answer
from exec_server.hosting.metrics import Metrics
from exec_server.hosting.rules import (
    SECRET_BYTES,
    HandshakeRate,
    Operation,
    Refusal,
    bearer_token,
    check_permission,
    invalid_token,
    secret_hash,
    secret_text,
)
from exec_server.hosting.store import Caller, Store
from exec_server.hosting.tickets import CLIENT_ROLE, EXECUTOR_ROLE, EXECUTOR_SECONDS, Ticket, sign

log = logging.getLogger(__name__)

REGISTER: Final = "register"
CONNECT: Final = "connect"
VALIDATE: Final = "validate"
OPERATIONS: Final = {
    REGISTER: Operation.EXECUTOR,
    CONNECT: Operation.CONNECT,
    VALIDATE: Operation.EXECUTOR,
}


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings of the endpoints."""

    websocket_url: str  # of the site, without a path of its own
    ticket_seconds: int
    authorization_seconds: int
    takeover: bool


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What the endpoints ask the node that they run on."""

    keys: Callable[[], Mapping[str, bytes]]  # that sign URLs, the newest first
    is_full: Callable[[], bool]
    tenant_sockets: Callable[[str], int]
    holds: Callable[[str, str], bool]  # tenant, environment
    is_dead: Callable[[str | None, float], bool]  # another node, the end of its renewal
    superseded: Callable[[str, str, str], None]  # tenant, environment, the new registration
    used_tokens: set[str]


def endpoint_of(path: str) -> tuple[str, str] | None:
    """Operation and environment id of a path; None for another path."""
    parts = path.split("/")
    if len(parts) != 5 or parts[:3] != ["", "cloud", "environment"] or parts[4] not in OPERATIONS:
        return None
    return parts[4], unquote(parts[3], errors="replace")


def is_plaintext_form(path: str) -> bool:
    """Whether the path is the one of executors of May 2026, which speak plaintext."""
    return path.startswith("/cloud/executor/")


class Endpoints:
    """Answers the three requests; refusals are exceptions."""

    def __init__(
        self,
        store: Store,
        metrics: Metrics,
        policy: Policy,
        node: NodeFacts,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._policy = policy
        self._node = node
        self._clock = clock
        self._handshakes = HandshakeRate()

    async def answer(self, name: str, environment_id: str, request: Request) -> Answer:
        """Raises Refusal or DatabaseUnavailable."""
        token = bearer_token(request.headers.get("authorization"))
        caller = await self._caller(token, is_retried=name == VALIDATE)
        if caller is None:
            raise invalid_token()
        self._node.used_tokens.add(caller.token_id)
        check_permission(caller.scopes, OPERATIONS[name], environment_id)
        if name == REGISTER:
            return await self._register(caller, environment_id, request)
        if name == CONNECT:
            return await self._connect(caller, environment_id, request)
        return await self._validate(caller, environment_id, request)

    async def _caller(self, token: str, *, is_retried: bool) -> Caller | None:
        """The owner of a token. Executors do not repeat a validation, so it is retried here."""
        try:
            return await self._store.caller(secret_hash(token))
        except DatabaseUnavailable:
            if not is_retried:
                raise
        return await self._store.caller(secret_hash(token))

    async def _register(self, caller: Caller, environment_id: str, request: Request) -> Answer:
        key = bodies.read_registration(request.body)
        if self._node.is_full():
            raise unavailable(REGISTER)
        has_socket = self._node.holds(caller.tenant, environment_id)
        if not has_socket and self._has_all_sockets(caller):
            raise self._conflict(environment_id, request)
        registration_id = f"reg-{secrets.token_hex(16)}"
        now = await self._store.register(
            caller, environment_id, registration_id, key.text, takeover=self._policy.takeover
        )
        if now is None:
            raise self._conflict(environment_id, request)
        self._node.superseded(caller.tenant, environment_id, registration_id)
        log.info(
            "%s: %s registered as %s by %s",
            *(request.peer, environment_id, registration_id, caller.token_id),
        )
        url = self._url(caller, environment_id, registration_id, EXECUTOR_ROLE, now)
        return json_answer(
            {
                "environment_id": environment_id,
                "security_profile": bodies.SECURITY_PROFILE,
                "executor_registration_id": registration_id,
                "url": url,
            }
        )

    async def _connect(self, caller: Caller, environment_id: str, request: Request) -> Answer:
        key = bodies.read_connection(request.body)
        if self._node.is_full():
            raise unavailable(CONNECT)
        if self._has_all_sockets(caller):
            raise _too_many(1.0)
        secret = secret_text(secrets.token_bytes(SECRET_BYTES))
        grant = await self._store.authorize(
            caller,
            environment_id,
            secret_hash(secret),
            key.hash,
            self._policy.authorization_seconds,
        )
        if grant is None:
            raise await self._absent(caller.tenant, environment_id)
        if self._node.is_dead(grant.node, grant.node_expires):
            raise _offline()
        pair = (caller.token_id, caller.tenant, environment_id)
        wait = self._handshakes.take(pair, self._clock())
        if wait:
            raise _too_many(wait)
        log.info("%s: %s may connect to %s", request.peer, caller.token_id, environment_id)
        return json_answer(
            {
                "environment_id": environment_id,
                "security_profile": bodies.SECURITY_PROFILE,
                "url": self._url(
                    caller, environment_id, grant.registration_id, CLIENT_ROLE, grant.now
                ),
                "executor_registration_id": grant.registration_id,
                "executor_public_key": json.loads(grant.executor_key),
                "harness_key_authorization": secret,
            }
        )

    def _has_all_sockets(self, caller: Caller) -> bool:
        return self._node.tenant_sockets(caller.tenant) >= caller.limits.sockets

    def _conflict(self, environment_id: str, request: Request) -> Refusal:
        """An executor waits after this answer; 429 would end it."""
        log.info("%s: registration of %s refused", request.peer, environment_id)
        return Refusal(
            503,
            "registration_conflict",
            "another executor is online, or the tenant has its limit of environments or sockets",
        )

    async def _absent(self, tenant: str, environment_id: str) -> Refusal:
        if await self._store.is_known(tenant, environment_id):
            return _offline()
        return Refusal(404, "environment_not_found", "no such environment is registered")

    async def _validate(self, caller: Caller, environment_id: str, request: Request) -> Answer:
        asked = bodies.read_validation(request.body)
        is_valid = await self._store.consume(
            caller.tenant,
            environment_id,
            asked.registration_id,
            asked.key.hash,
            secret_hash(asked.authorization),
        )
        self._metrics.validations.add("valid" if is_valid else "invalid")
        if not is_valid:
            log.info("%s: authorization for %s refused", request.peer, environment_id)
        return json_answer({"valid": is_valid})

    def _url(
        self, caller: Caller, environment_id: str, registration_id: str, role: str, now: float
    ) -> str:
        is_executor = role == EXECUTOR_ROLE
        seconds = EXECUTOR_SECONDS if is_executor else self._policy.ticket_seconds
        ticket = Ticket(
            caller.tenant,
            environment_id,
            role,
            registration_id,
            # Rounded up: a ticket of one second lives for at least one.
            math.ceil(now) + seconds,
            secret_text(secrets.token_bytes(16)),
            caller.token_id,
        )
        kid, key = next(iter(self._node.keys().items()))
        return self._policy.websocket_url + sign(ticket, kid, key)


def unavailable(name: str, message: str = "try again") -> Refusal:
    """The answer that makes a peer come back: a database that is away, drain, overload."""
    if name == REGISTER:
        return Refusal(502, "authentication_service_unavailable", message)
    return Refusal(503, "unavailable", message)


def _offline() -> Refusal:
    return Refusal(409, "environment_offline", "the executor is not connected")


def _too_many(wait: float) -> Refusal:
    headers = {"retry-after": str(math.ceil(wait))}
    return Refusal(429, "too_many_requests", "a limit of the tenant is reached", **headers)
