"""Signed rendezvous URLs: the URL is the credential, since nothing else is sent along.

Values have characters that need no quoting, so the query is compared as it stands: there is one
spelling of each ticket, and every other one is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from exec_server.errors import ExecServerError
from exec_server.hosting.rules import is_environment_id

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


class Rejection(ExecServerError):
    """An upgrade is refused; the reason is a header of the answer.

    `cause` is for the log and the metrics: the header has a fixed list of reasons.
    """

    def __init__(self, status: int, reason: str, cause: str = "") -> None:
        super().__init__(f"{status} {reason}")
        self.status = status
        self.reason = reason
        self.cause = cause or reason
        self.tenant_name = ""  # if it is known, for the log


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
