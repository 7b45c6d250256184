"""The three requests of the registry: register, connect, validate."""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import Callable
from typing import Final
from urllib.parse import unquote

from exec_server.hosting import http_messages
from exec_server.hosting.database import DatabaseUnavailable
from exec_server.hosting.http_messages import ServiceAnswer, ServiceRequest, json_answer
from exec_server.hosting.metrics import Metrics
from exec_server.hosting.node import Node
from exec_server.hosting.rules import (
    CLIENT_ROLE,
    EXECUTOR_ROLE,
    EXECUTOR_SECONDS,
    SECRET_BYTES,
    HandshakeRate,
    Operation,
    Refusal,
    Ticket,
    bearer_token,
    check_permission,
    invalid_token,
    secret_hash,
    secret_text,
    sign,
)
from exec_server.hosting.store import AuthenticatedToken, Store

log = logging.getLogger(__name__)

REGISTER: Final = "register"
CONNECT: Final = "connect"
VALIDATE: Final = "validate"
OPERATIONS: Final = {
    REGISTER: Operation.EXECUTOR,
    CONNECT: Operation.CONNECT,
    VALIDATE: Operation.EXECUTOR,
}


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
        node: Node,
        *,
        refused: Callable[[str, Refusal, str, str], object],
        clock: Callable[[], float],
    ) -> None:
        """`refused` logs a refusal: endpoint, why, environment, and peer."""
        self._store = store
        self._metrics = metrics
        self._node = node
        self._options = node.options
        self._websocket_url = "ws" + node.options.public_url.removeprefix("http").rstrip("/")
        self._refused = refused
        self._clock = clock
        self._handshakes = HandshakeRate()

    async def answer(
        self, name: str, environment_id: str, request: ServiceRequest
    ) -> ServiceAnswer:
        """Raises Refusal or DatabaseUnavailable."""
        token = bearer_token(request.headers.get("authorization"))
        try:
            caller = await self._store.caller(secret_hash(token))
        except DatabaseUnavailable:
            if name != VALIDATE:
                raise
            # Executors do not repeat a validation.
            caller = await self._store.caller(secret_hash(token))
        if caller is None:
            raise invalid_token("unknown_token")
        try:
            if caller.is_revoked or caller.is_expired:
                raise invalid_token("revoked_token" if caller.is_revoked else "expired_token")
            self._node.used_tokens.add(caller.token_id)
            check_permission(caller.scopes, OPERATIONS[name], environment_id)
            if name == REGISTER:
                return await self._register(caller, environment_id, request)
            if name == CONNECT:
                return await self._connect(caller, environment_id, request)
            return await self._validate(caller, environment_id, request)
        except Refusal as refusal:
            refusal.token_id, refusal.tenant = caller.token_id, caller.tenant_name
            raise

    async def _register(
        self, caller: AuthenticatedToken, environment_id: str, request: ServiceRequest
    ) -> ServiceAnswer:
        key = http_messages.read_registration(request.body)
        if self._node.is_full():
            raise unavailable(REGISTER, reason="queued_bytes")
        has_socket = self._node.holds(caller.tenant, environment_id)
        if not has_socket and self._has_all_sockets(caller):
            raise _conflict(*_sockets_used(caller))
        registration_id = f"reg-{secrets.token_hex(16)}"
        now = await self._store.register(
            caller, environment_id, registration_id, key.text, takeover=self._options.takeover
        )
        if now is None:
            raise await self._register_refusal(caller, environment_id)
        self._node.superseded(caller.tenant, environment_id, registration_id)
        log.info(
            "%s: %s registered as %s by %s",
            *(request.peer, environment_id, registration_id, caller.token_id),
        )
        url = self._url(caller, environment_id, registration_id, EXECUTOR_ROLE, now)
        return json_answer(
            {
                "environment_id": environment_id,
                "security_profile": http_messages.SECURITY_PROFILE,
                "executor_registration_id": registration_id,
                "url": url,
                # The rendezvous writes the token id of each client into its handshake.
                "names_tokens": True,
            }
        )

    async def _connect(
        self, caller: AuthenticatedToken, environment_id: str, request: ServiceRequest
    ) -> ServiceAnswer:
        key = http_messages.read_connection(request.body)
        if self._node.is_full():
            raise unavailable(CONNECT, reason="queued_bytes")
        if self._has_all_sockets(caller):
            raise _too_many(1.0, *_sockets_used(caller))
        # Before the authorization is written: a request beyond the rate costs no statement.
        self._take_handshake(caller, environment_id)
        secret = secret_text(secrets.token_bytes(SECRET_BYTES))
        grant = await self._store.authorize(
            caller,
            environment_id,
            secret_hash(secret),
            key.hash,
            self._options.authorization_seconds,
        )
        if grant is None:
            raise await self._absent(caller.tenant, environment_id)
        if self._node.is_dead(grant.node, grant.node_expires):
            raise _offline()
        log.info("%s: %s may connect to %s", request.peer, caller.token_id, environment_id)
        return json_answer(
            {
                "environment_id": environment_id,
                "security_profile": http_messages.SECURITY_PROFILE,
                "url": self._url(
                    caller, environment_id, grant.registration_id, CLIENT_ROLE, grant.now
                ),
                "executor_registration_id": grant.registration_id,
                "executor_public_key": json.loads(grant.executor_key),
                "harness_key_authorization": secret,
            }
        )

    def _has_all_sockets(self, caller: AuthenticatedToken) -> bool:
        return self._node.tenant_sockets(caller.tenant) >= caller.limits.sockets

    def _take_handshake(self, caller: AuthenticatedToken, environment_id: str) -> None:
        limit = caller.limits.handshakes_per_second
        pair = (caller.token_id, caller.tenant, environment_id)
        wait = self._handshakes.take(pair, limit, self._clock())
        if wait:
            text = f"each token has {limit} with one executor on this node"
            raise _too_many(wait, "handshakes_per_second", text)

    async def _register_refusal(self, caller: AuthenticatedToken, environment_id: str) -> Refusal:
        if await self._store.is_known(caller.tenant, environment_id):
            return _conflict("another_executor", "another executor is online with this id")
        text = f"the tenant has all of its {caller.limits.environments} environments"
        return _conflict("environments", text)

    async def _absent(self, tenant: str, environment_id: str) -> Refusal:
        if await self._store.is_known(tenant, environment_id):
            return _offline()
        return Refusal(404, "environment_not_found", "no such environment is registered")

    async def _validate(
        self, caller: AuthenticatedToken, environment_id: str, request: ServiceRequest
    ) -> ServiceAnswer:
        asked = http_messages.read_validation(request.body)
        is_valid = await self._store.consume(
            caller.tenant,
            environment_id,
            asked.registration_id,
            asked.key.hash,
            secret_hash(asked.authorization),
        )
        self._metrics.validations.add("valid" if is_valid else "invalid")
        if not is_valid:
            # For the log alone: the executor is answered that the authorization is not valid.
            refusal = Refusal(200, "invalid_authorization", "")
            refusal.token_id, refusal.tenant = caller.token_id, caller.tenant_name
            self._refused(VALIDATE, refusal, environment_id, request.peer)
        return json_answer({"valid": is_valid})

    def _url(
        self,
        caller: AuthenticatedToken,
        environment_id: str,
        registration_id: str,
        role: str,
        now: float,
    ) -> str:
        is_executor = role == EXECUTOR_ROLE
        seconds = EXECUTOR_SECONDS if is_executor else self._options.ticket_seconds
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
        kid, key = next(iter(self._node.keys.items()))
        return self._websocket_url + sign(ticket, kid, key)


def unavailable(name: str, message: str = "try again", *, reason: str) -> Refusal:
    """The answer that makes a peer come back: a database that is away, drain, overload."""
    if name == REGISTER:
        return Refusal(502, "authentication_service_unavailable", message, reason=reason)
    return Refusal(503, "unavailable", message, reason=reason)


def _offline() -> Refusal:
    return Refusal(409, "environment_offline", "the executor is not connected")


def _sockets_used(caller: AuthenticatedToken) -> tuple[str, str]:
    """The name of a limit, and the text that names it."""
    return "sockets", f"the tenant has all of its {caller.limits.sockets} sockets on this node"


def _too_many(wait: float, limit: str, text: str) -> Refusal:
    headers = {"retry-after": str(math.ceil(wait))}
    message = f"limit {limit}: {text}"
    return Refusal(429, "too_many_requests", message, reason=limit, **headers)


def _conflict(reason: str, text: str) -> Refusal:
    """An executor waits after this answer; 429 would end it."""
    return Refusal(503, "registration_conflict", f"{reason}: {text}", reason=reason)
