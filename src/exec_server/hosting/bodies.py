"""Request bodies of the registry: JSON text in, checked values out. No I/O."""

from __future__ import annotations

import binascii
import hashlib
from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from exec_server.hosting.rules import Refusal
from exec_server.relay.noise import SUITE

# A key object has 1.7 KiB and an authorization at most 4 KiB.
BODY_BYTES: Final = 65_536
SECURITY_PROFILE: Final = "noise_hybrid_ik_v1"

_SIZES: Final = {"x25519_public_key": 32, "mlkem768_public_key": 1184}
_MEMBERS: Final = {"suite", *_SIZES}


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
