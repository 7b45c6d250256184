"""Requests and answers of the registry as values; their bytes are made in one place. No I/O."""

from __future__ import annotations

import binascii
import hashlib
import json
from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Any, Final

import msgspec

from exec_server.hosting.rules import Refusal
from exec_server.net.http1 import encode_response, upgrade_flaw
from exec_server.relay.noise import SUITE

Networks = tuple[IPv4Network | IPv6Network, ...]

PASSED_ON: Final = "x-exec-server-passed-on"

# A key object has 1.7 KiB and an authorization at most 4 KiB.
BODY_BYTES: Final = 65_536
SECURITY_PROFILE: Final = "noise_hybrid_ik_v1"

_SIZES: Final = {"x25519_public_key": 32, "mlkem768_public_key": 1184}
_MEMBERS: Final = {"suite", *_SIZES}


@dataclass(frozen=True, slots=True)
class ServiceRequest:
    """One request; of a repeated header the first one counts, of Authorization none."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes = b""
    peer: str = ""
    head: bytes = b""  # as it was received, with the empty line

    def is_complete_upgrade(self) -> bool:
        """Whether everything is there that RFC 6455 demands."""
        has_key = bool(self.headers.get("sec-websocket-key"))
        return self.method == "GET" and has_key and upgrade_flaw(self.headers) is None


@dataclass(frozen=True, slots=True)
class ServiceAnswer:
    """One answer; the connection ends after it."""

    status: int
    body: bytes = b""
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        headers = list(self.headers.items())
        if self.body:
            headers.append(("content-type", self.content_type))
        headers += [("content-length", str(len(self.body))), ("connection", "close")]
        return encode_response(self.status, headers, self.body)


def json_answer(value: object) -> ServiceAnswer:
    return ServiceAnswer(200, json.dumps(value).encode())


def refusal_answer(refusal: Refusal) -> ServiceAnswer:
    body = {"error": {"code": refusal.code, "message": refusal.message}}
    return ServiceAnswer(refusal.status, json.dumps(body).encode(), headers=dict(refusal.headers))


def peer_address(direct: str, forwarded: str, trusted: Networks) -> str:
    """The address of a client, from X-Forwarded-For if the direct peer is a trusted proxy."""
    if not trusted or not forwarded:
        return direct
    try:
        if not any(ip_address(direct) in network for network in trusted):
            return direct
        return str(ip_address(forwarded.rpartition(",")[2].strip()))
    except ValueError:
        return direct


@dataclass(frozen=True, slots=True)
class Key:
    """A checked public key: its JSON text, one for all spellings, and the hash of its bytes."""

    text: str
    hash: str


@dataclass(frozen=True, slots=True)
class Validation:
    """What an executor asks about a client."""

    registration_id: str
    key: Key
    authorization: str


def read_registration(body: bytes) -> Key:
    """The key of an executor; raises Refusal."""
    if not body.strip():
        # The historical forms have no body; they speak plaintext.
        raise plaintext_disabled()
    members = _members(body)
    if members.get("security_profile") != SECURITY_PROFILE:
        raise _invalid(f"security_profile must be {SECURITY_PROFILE}")
    return _key(members.get("executor_public_key"))


def read_connection(body: bytes) -> Key:
    """The key of a client; raises Refusal."""
    return _key(_members(body).get("harness_public_key"))


def read_validation(body: bytes) -> Validation:
    """Raises Refusal."""
    members = _members(body)
    registration = members.get("executor_registration_id")
    authorization = members.get("harness_key_authorization")
    if not isinstance(registration, str) or not isinstance(authorization, str):
        raise _invalid("executor_registration_id and harness_key_authorization must be strings")
    if not registration.isascii() or not registration.isprintable():
        # PostgreSQL refuses a NUL with an error, which must not look like one of the service.
        raise _invalid("executor_registration_id has characters that no registration has")
    return Validation(registration, _key(members.get("harness_public_key")), authorization)


def plaintext_disabled() -> Refusal:
    return Refusal(403, "plaintext_disabled", "this registry serves encrypted streams only")


def _members(body: bytes) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _invalid("the body is not JSON") from None
    if not isinstance(decoded, dict):
        raise _invalid("the body is not a JSON object")
    return decoded


def _key(value: object) -> Key:
    if not isinstance(value, dict) or set(value) != _MEMBERS or value["suite"] != SUITE:
        raise _invalid_key()
    digest = hashlib.sha256()
    members = {"suite": SUITE}
    for name, size in _SIZES.items():
        data = _decoded(value[name], size)
        digest.update(data)
        members[name] = b64encode(data).decode()
    return Key(msgspec.json.encode(members).decode(), digest.hexdigest())


def _decoded(text: object, size: int) -> bytes:
    if not isinstance(text, str):
        raise _invalid_key()
    try:
        data = b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _invalid_key() from None
    if len(data) != size:
        raise _invalid_key()
    return data


def _invalid(message: str) -> Refusal:
    return Refusal(400, "invalid_body", message)


def _invalid_key() -> Refusal:
    return Refusal(400, "invalid_public_key", "a public key has an unknown form")
