"""Who may do what: ids, tokens, scopes and rates of the registry. No I/O, no clock, no randomness.

The order of checks (token, scope, id, existence) lets answers tell nothing about other tenants.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from base64 import urlsafe_b64encode
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from exec_server.errors import ExecServerError

# Random bytes of a token, an authorization and the other secrets that are found by their hash.
SECRET_BYTES: Final = 32
# Pairs of token and environment whose handshakes of the last second are counted. Beyond it the
# oldest are forgotten.
COUNTED_PAIRS: Final = 16_384
# Limits of a tenant without its own, for each node.
TENANT_ENVIRONMENTS: Final = 1000
TENANT_SOCKETS: Final = 2000
TENANT_BYTES_PER_SECOND: Final = 50_000_000
# Handshakes that one token may begin with one executor in any second, 1,200 a minute: more than a
# shell loop of commands begins, and 20 ms of work for an executor.
TENANT_HANDSHAKES_PER_SECOND: Final = 20
# How many seconds of its rate a tenant may use at once, and how far it may go into debt before a
# socket is paused: pausing for less than a few milliseconds costs more than it evens out.
RATE_BURST_SECONDS: Final = 0.25

TOKEN_PREFIX: Final = "esr_"
_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SCOPE: Final = re.compile(r"(executor|connect):([A-Za-z0-9._-]{1,128}|[A-Za-z0-9._-]{0,127}\*)")
_TENANT: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


VERSION: Final = "1"
EXECUTOR_ROLE: Final = "environment"
CLIENT_ROLE: Final = "harness"
# An executor keeps its URL for as long as it reconnects; an expired one costs it a registration.
EXECUTOR_SECONDS: Final = 86_400
PATH: Final = "/rendezvous/"
REASON_HEADER: Final = "x-codex-rendezvous-rejection-reason"

_ROLES: Final = frozenset({EXECUTOR_ROLE, CLIENT_ROLE})
_ROUTE: Final = re.compile(r"([0-9a-f]{16})\.(.+)")
_PAIR: Final = re.compile(r"([a-z_]{1,32})=([A-Za-z0-9._~-]{1,200})")
_NUMBER: Final = re.compile(r"[0-9]{1,12}")
# The parameters in the order of their checks, with the reason for a missing one.
_MISSING: Final = {
    "v": "missing_version",
    "role": "missing_role",
    "executor_registration_id": "missing_executor_registration_id",
    "exp": "missing_expiry",
    "nonce": "malformed_query",
    "kid": "malformed_query",
    "sig": "missing_signature",
}


class Operation(Enum):
    """The first word of a scope."""

    EXECUTOR = "executor"
    CONNECT = "connect"


class Refusal(ExecServerError):
    """An answer with status, code and message; `reason` may tell more, to log and metrics only."""

    def __init__(
        self, status: int, code: str, message: str, *, reason: str = "", **headers: str
    ) -> None:
        super().__init__(f"{status} {code}")
        self.status = status
        self.code = code
        self.message = message
        self.reason = reason or code
        self.headers = headers
        self.token_id = self.tenant = ""  # of the caller, for the log: the tenant's name


def invalid_token(reason: str) -> Refusal:
    """The same answer for a token that is missing, unknown, expired or revoked."""
    message = "the bearer token is missing or not valid"
    return Refusal(401, "invalid_token", message, reason=reason)


def is_environment_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def is_tenant_name(text: str) -> bool:
    return _TENANT.fullmatch(text) is not None


def secret_text(random: bytes) -> str:
    """Random bytes as text for URLs and headers."""
    return urlsafe_b64encode(random).rstrip(b"=").decode()


def token_text(random: bytes) -> str:
    return TOKEN_PREFIX + secret_text(random)


def secret_hash(text: str) -> str:
    """The form in which a secret is stored. Secrets are random, so no salt is needed."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def bearer_token(authorization: str | None) -> str:
    """The token of an Authorization header; raises Refusal."""
    scheme, _, token = (authorization or "").strip().partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token:
        raise invalid_token("no_token")
    return token


def check_scope(text: str) -> str:
    """A scope as `token create` takes it; raises ValueError with a text for people."""
    if _SCOPE.fullmatch(text) is None:
        raise ValueError(
            f"invalid scope `{text}`: expected executor:ID or connect:ID, where ID is an "
            "environment id, or a prefix and *"
        )
    return text


def covers(scopes: Iterable[str], operation: Operation, environment_id: str) -> bool:
    """Whether one of the scopes allows the operation on this environment."""
    for scope in scopes:
        name, _, pattern = scope.partition(":")
        if name != operation.value:
            continue
        if pattern == environment_id:
            return True
        if pattern.endswith("*") and environment_id.startswith(pattern[:-1]):
            return True
    return False


def check_permission(scopes: Iterable[str], operation: Operation, environment_id: str) -> None:
    """Raise Refusal unless the scopes allow the operation and the id is one."""
    if not covers(scopes, operation, environment_id):
        raise Refusal(403, "forbidden", "the token does not allow this for this environment")
    if not is_environment_id(environment_id):
        raise Refusal(
            400, "invalid_environment_id", "an environment id has 1 to 128 of A-Z a-z 0-9 . _ -"
        )


class HandshakeRate:
    """Handshakes of each token with each executor in the last second."""

    def __init__(self, keys: int = COUNTED_PAIRS) -> None:
        self._keys = keys
        # The times of each pair, oldest first; the pair that was counted last is at the end.
        self._times: dict[tuple[str, ...], deque[float]] = {}

    def take(self, pair: tuple[str, ...], limit: int, now: float) -> float:
        """Count one handshake; if it is too many, return the seconds to wait instead."""
        self._forget(now - 1.0)
        times = self._times.get(pair, deque())
        while times and times[0] <= now - 1.0:
            times.popleft()
        if len(times) >= limit:
            return times[-limit] + 1.0 - now
        times.append(now)
        self._times.pop(pair, None)
        self._times[pair] = times
        if len(self._times) > self._keys:
            del self._times[next(iter(self._times))]
        return 0.0

    def _forget(self, before: float) -> None:
        """Drop pairs without a handshake since then, so that only recent ones take memory."""
        while self._times:
            pair = next(iter(self._times))
            if self._times[pair][-1] > before:
                break
            del self._times[pair]


class ByteRate:
    """Bytes per second of a tenant, which slows reading down and drops nothing."""

    __slots__ = ("_at", "_available", "rate")

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self._available = rate * RATE_BURST_SECONDS
        self._at = now

    def spend(self, count: int, now: float) -> float:
        """Count received bytes; returns for how many seconds to read no more."""
        earned = self._available + (now - self._at) * self.rate
        self._available = min(earned, self.rate * RATE_BURST_SECONDS) - count
        self._at = now
        return 0.0 if self._available >= 0 else -self._available / self.rate


# Signed rendezvous URLs: the URL is the credential. The query is compared as it stands, so each
# ticket has one spelling, and every other one is refused.
class Rejection(Refusal):
    """An upgrade is refused; `code`, from a fixed list, is a header of the answer."""

    def __init__(self, status: int, code: str, reason: str = "") -> None:
        super().__init__(status, code, "the upgrade is refused", reason=reason)
        self.headers[REASON_HEADER] = code


@dataclass(frozen=True, slots=True)
class Ticket:
    """The rights that a URL gives, and the token that it came of."""

    tenant: str  # the random id of the tenant, not its name
    environment_id: str
    role: str
    registration_id: str
    expires: int
    nonce: str
    token_id: str

    @property
    def is_executor(self) -> bool:
        return self.role == EXECUTOR_ROLE


def sign(ticket: Ticket, kid: str, key: bytes) -> str:
    """Path and query of the URL for this ticket."""
    path = f"{PATH}{ticket.tenant}.{ticket.environment_id}"
    values = {
        "v": VERSION,
        "role": ticket.role,
        "executor_registration_id": ticket.registration_id,
        "exp": str(ticket.expires),
        "nonce": f"{ticket.nonce}.{ticket.token_id}",
        "kid": kid,
    }
    values["sig"] = _signature(path, values, key)
    return f"{path}?" + "&".join(f"{name}={value}" for name, value in values.items())


def check(path: str, query: str, keys: Mapping[str, bytes]) -> Ticket:
    """The ticket of a request; raises Rejection. Its expiry and its use are not checked here."""
    route = _ROUTE.fullmatch(path.removeprefix(PATH)) if path.startswith(PATH) else None
    if route is None or not is_environment_id(route[2]):
        raise Rejection(404, "unknown_route")
    values = _values(query)
    signature = _signature(path, values, keys.get(values["kid"], b""))
    if values["kid"] not in keys or not hmac.compare_digest(values["sig"], signature):
        raise Rejection(401, "invalid_signature")
    nonce, _, token_id = values["nonce"].partition(".")
    return Ticket(
        route[1],
        route[2],
        values["role"],
        values["executor_registration_id"],
        int(values["exp"]),
        nonce,
        token_id,
    )


def key_id(query: str) -> str:
    """The key that a query names, empty if it names none; for a node that lacks a new key."""
    for pair in query.split("&"):
        if pair.startswith("kid="):
            return pair[4:]
    return ""


def _values(query: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for text in query.split("&"):
        pair = _PAIR.fullmatch(text)
        if pair is None or pair[1] in values:
            raise Rejection(401, "malformed_query")
        values[pair[1]] = pair[2]
    if values.keys() - _MISSING.keys():
        raise Rejection(401, "extra_query_param")
    for name, reason in _MISSING.items():
        if name not in values:
            raise Rejection(401, reason)
    if values["v"] != VERSION:
        raise Rejection(401, "malformed_query")
    if values["role"] not in _ROLES:
        raise Rejection(401, "invalid_role")
    if _NUMBER.fullmatch(values["exp"]) is None:
        raise Rejection(401, "invalid_expiry")
    return values


def _signature(path: str, values: Mapping[str, str], key: bytes) -> str:
    signed = sorted((name, value) for name, value in values.items() if name != "sig")
    text = f"{path}?" + "&".join(f"{name}={value}" for name, value in signed)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
