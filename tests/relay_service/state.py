"""The state of the registry: registrations, authorizations, tokens. No sockets, no HTTP.

Time comes in as a clock. Everything lives in memory behind a few methods, so that a shared
store can take its place.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

SUITE = "Noise_hybridIK_X25519+MLKEM768_AESGCM_SHA256"
PROFILE = "noise_hybrid_ik_v1"
X25519_BYTES, MLKEM768_BYTES = 32, 1184
# Long enough for a slow handshake, short enough that a stolen authorization is useless.
AUTHORIZATION_SECONDS = 60.0
# Handed out and not yet used; beyond it the oldest lapse, which costs a client one retry.
AUTHORIZATIONS_KEPT = 4096
# Environments of one service; the next one to register is refused.
ENVIRONMENTS_KEPT = 4096

Clock = Callable[[], float]
_SOMEBODY = "somebody"


class Refused(Exception):
    """A request gets this status and error code."""

    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(f"{status} {code}")
        self.status = status
        self.code = code
        self.message = message or code.replace("_", " ")


class Form(StrEnum):
    """How an executor speaks on its socket."""

    NOISE = "noise"  # relay frames, encrypted
    RELAY = "relay"  # relay frames with plain payloads, historical
    TEXT = "text"  # one message per WebSocket message, historical
    DIRECT = "direct"  # the same with signed requests

    @property
    def is_bridged(self) -> bool:
        """Whether one client socket is joined to the executor's, without relay frames."""
        return self in (Form.TEXT, Form.DIRECT)


@dataclass(frozen=True, slots=True)
class Key:
    """A public key, in decoded bytes: only those are ever compared."""

    x25519: bytes
    mlkem768: bytes

    @classmethod
    def from_json(cls, value: Any) -> Key:
        """Read a key object; raises Refused."""
        members = {"suite", "x25519_public_key", "mlkem768_public_key"}
        if not isinstance(value, dict) or set(value) != members or value["suite"] != SUITE:
            raise Refused(400, "invalid_public_key")
        return cls(
            _decoded(value["x25519_public_key"], X25519_BYTES),
            _decoded(value["mlkem768_public_key"], MLKEM768_BYTES),
        )

    def to_json(self) -> dict[str, str]:
        return {
            "suite": SUITE,
            "x25519_public_key": base64.b64encode(self.x25519).decode(),
            "mlkem768_public_key": base64.b64encode(self.mlkem768).decode(),
        }


def _decoded(text: Any, size: int) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise Refused(400, "invalid_public_key") from None
    if len(data) != size:
        raise Refused(400, "invalid_public_key")
    return data


class Callers:
    """Whose request this is, from its Authorization header.

    Accepted values may be mapped to the subject they stand for; a plain list stands for one
    subject, and without any every header will do.
    """

    def __init__(self, accepted: Mapping[str, str] | Iterable[str] | None = None) -> None:
        if accepted is not None and not isinstance(accepted, Mapping):
            accepted = dict.fromkeys(accepted, _SOMEBODY)
        self._accepted: dict[str, str] | None = None
        if accepted is not None:
            self._accepted = {_digest(text): who for text, who in accepted.items()}

    def subject(self, authorization: str | None) -> str:
        """Name the caller; raises Refused."""
        if not authorization or not authorization.strip():
            raise Refused(401, "invalid_token")
        if self._accepted is None:
            return _SOMEBODY
        # Found by its hash, so that the time of the search reveals nothing about the value.
        subject = self._accepted.get(_digest(authorization))
        if subject is None:
            raise Refused(401, "invalid_token")
        return subject


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


@dataclass(eq=False, slots=True)
class Registration:
    """One successful register call; a later one of the same environment supersedes it."""

    id: str
    environment_id: str
    form: Form
    key: Key | None
    subject: str
    online: bool = False


class Directory:
    """Which registration speaks for an environment."""

    def __init__(self, *, known: Iterable[str] | None = None, takeover: bool = True) -> None:
        self._known = None if known is None else frozenset(known)
        self._takeover = takeover
        self._current: dict[str, Registration] = {}

    def register(
        self, environment_id: str, form: Form, key: Key | None, subject: str
    ) -> Registration:
        """Make a new registration the current one; raises Refused."""
        self.check_known(environment_id)
        old = self._current.get(environment_id)
        if old is None and len(self._current) >= ENVIRONMENTS_KEPT:
            raise Refused(429, "too_many_environments")
        # The same executor coming back, known by its key, does not take anything over.
        if (
            old is not None
            and old.online
            and not self._takeover
            and (key is None or key != old.key)
        ):
            raise Refused(503, "registration_conflict")
        name = f"reg-{secrets.token_hex(16)}"
        registration = Registration(name, environment_id, form, key, subject)
        self._current[environment_id] = registration
        return registration

    def check_known(self, environment_id: str) -> None:
        if self._known is not None and environment_id not in self._known:
            raise Refused(404, "environment_not_found")

    def current(self, environment_id: str) -> Registration | None:
        return self._current.get(environment_id)

    def forget(self, environment_id: str) -> None:
        """Forget all registrations; an executor that reconnects must register again."""
        self._current.pop(environment_id, None)


@dataclass(frozen=True, slots=True)
class _Grant:
    registration_id: str
    key: Key
    expires: float


class Authorizations:
    """Single-use permissions of one client key to talk to one registration."""

    def __init__(self, clock: Clock, seconds: float = AUTHORIZATION_SECONDS) -> None:
        self._clock = clock
        self._seconds = seconds
        self._grants: dict[str, _Grant] = {}

    def issue(self, registration: Registration, key: Key) -> str:
        """A new permission, to be handed to the client."""
        text = secrets.token_urlsafe(32)
        # All live equally long, so those at the front are the first to lapse.
        self._grants[_digest(text)] = _Grant(registration.id, key, self._clock() + self._seconds)
        while len(self._grants) > AUTHORIZATIONS_KEPT:
            del self._grants[next(iter(self._grants))]
        return text

    def consume(self, text: str, registration: Registration, key: Key) -> bool:
        """Whether the permission holds for exactly this; if so, it is used up."""
        name = _digest(text)
        grant = self._grants.get(name)
        if grant is None:
            return False
        if grant.expires <= self._clock():
            del self._grants[name]
            return False
        if grant.registration_id != registration.id or grant.key != key:
            return False
        del self._grants[name]
        return True
