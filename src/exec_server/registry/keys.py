"""The JSON form of public keys in requests and responses of a registry."""

from __future__ import annotations

from base64 import b64decode, b64encode

import msgspec

from exec_server.relay.noise import SUITE, PublicKey


class KeyObject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON form of a public key."""

    suite: str
    x25519_public_key: str
    mlkem768_public_key: str


def key_object(key: PublicKey) -> KeyObject:
    return KeyObject(SUITE, b64encode(key.x25519).decode(), b64encode(key.mlkem768).decode())


def public_key(encoded: KeyObject) -> PublicKey:
    """Decode a key; raises ValueError unless it is valid."""
    if encoded.suite != SUITE:
        raise ValueError(f"unsupported suite `{encoded.suite}`")
    key = PublicKey(
        b64decode(encoded.x25519_public_key, validate=True),
        b64decode(encoded.mlkem768_public_key, validate=True),
    )
    key.check()
    return key
