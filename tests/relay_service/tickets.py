"""Signed WebSocket addresses: the address is the credential, as nothing else is sent along."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, unquote, urlencode

from tests.relay_service.state import Clock, Registration

# An executor keeps its address for as long as it reconnects; expiry costs it a registration.
EXECUTOR_SECONDS = 86_400.0
# A client connects at once, and asks for a new address each time.
HARNESS_SECONDS = 60.0
# Used addresses that have not expired; more than this many a minute are not handed out here.
SPENT_KEPT = 65_536

EXECUTOR, HARNESS, CLIENT = "environment", "harness", "client"
_ROLES = (EXECUTOR, HARNESS, CLIENT)
# Of a plain form, whose executor registers anew before each connection.
_ANY_REGISTRATION = "*"
_PARAMETERS = {"v", "role", "executor_registration_id", "exp", "nonce", "sig"}
_MISSING = {
    "v": "missing_version",
    "role": "missing_role",
    "executor_registration_id": "missing_executor_registration_id",
    "exp": "missing_expiry",
    "nonce": "malformed_query",
    "sig": "missing_signature",
}


class Rejected(Exception):
    """An upgrade is refused; the reason goes into a header of the answer."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{status} {reason}")
        self.status = status
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Ticket:
    """The rights of an address; without a registration id it is good for any current one."""

    environment_id: str
    role: str
    registration_id: str | None


class Tickets:
    """Signs addresses and checks them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._spent: dict[str, float] = {}

    def for_executor(self, registration: Registration) -> str:
        """A target that the executor of this registration may use again and again."""
        section = "direct" if registration.form.is_bridged else "rendezvous"
        return self._issue(
            section, registration.environment_id, EXECUTOR, registration.id, EXECUTOR_SECONDS
        )

    def for_harness(self, registration: Registration) -> str:
        """A target for one connection to this very registration."""
        return self._issue(
            "rendezvous", registration.environment_id, HARNESS, registration.id, HARNESS_SECONDS
        )

    def for_plain_client(self, registration: Registration) -> str:
        """A reusable target for clients that do not ask the registry each time."""
        # The reference takes `role=harness` for "speak relay frames", so a bridge says client.
        bridged = registration.form.is_bridged
        section, role = ("direct", CLIENT) if bridged else ("rendezvous", HARNESS)
        return self._issue(
            section, registration.environment_id, role, _ANY_REGISTRATION, EXECUTOR_SECONDS
        )

    def _issue(
        self, section: str, environment_id: str, role: str, registration_id: str, seconds: float
    ) -> str:
        path = f"/{section}/{quote(environment_id, safe='')}"
        values = {
            "v": "1",
            "role": role,
            "executor_registration_id": registration_id,
            "exp": str(int(self._clock() + seconds)),
            "nonce": secrets.token_urlsafe(16),
        }
        values["sig"] = self._signature(path, values)
        return f"{path}?{urlencode(values)}"

    def _signature(self, path: str, values: dict[str, str]) -> str:
        signed = sorted((name, value) for name, value in values.items() if name != "sig")
        text = f"{path}?{urlencode(signed)}".encode()
        return hmac.new(self._key, text, hashlib.sha256).hexdigest()

    def check(self, target: str) -> Ticket:
        """The rights of the target; raises Rejected. A single-use one is now used."""
        path, _, query = target.partition("?")
        _, _, rest = path.partition("/")
        section, _, name = rest.partition("/")
        if section not in ("rendezvous", "direct") or not name:
            raise Rejected(404, "unknown_route")
        values = self._values(query)
        if not hmac.compare_digest(values["sig"], self._signature(path, values)):
            raise Rejected(401, "invalid_signature")
        if int(values["exp"]) <= self._clock():
            raise Rejected(401, "expired")
        bound = values["executor_registration_id"] != _ANY_REGISTRATION
        if bound and values["role"] == HARNESS:
            self._spend(values["nonce"], float(values["exp"]))
        registration_id = values["executor_registration_id"] if bound else None
        return Ticket(unquote(name), values["role"], registration_id)

    def _values(self, query: str) -> dict[str, str]:
        try:
            pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True)
            query.encode("ascii")
        except (ValueError, UnicodeEncodeError):
            raise Rejected(401, "malformed_query") from None
        values = dict(pairs)
        if len(values) != len(pairs):
            raise Rejected(401, "malformed_query")
        if values.keys() - _PARAMETERS:
            raise Rejected(401, "extra_query_param")
        for name, reason in _MISSING.items():
            if name not in values:
                raise Rejected(401, reason)
        if values["role"] not in _ROLES:
            raise Rejected(401, "invalid_role")
        if not values["exp"].isascii() or not values["exp"].isdigit():
            raise Rejected(401, "invalid_expiry")
        if not values["sig"].isascii():
            raise Rejected(401, "invalid_signature")
        return values

    def _spend(self, nonce: str, expires: float) -> None:
        if nonce in self._spent:
            raise Rejected(401, "expired")
        while self._spent and next(iter(self._spent.values())) <= self._clock():
            del self._spent[next(iter(self._spent))]
        if len(self._spent) >= SPENT_KEPT:
            raise Rejected(503, "route_unavailable")
        self._spent[nonce] = expires
