"""Public keys in JSON."""

from __future__ import annotations

import base64

import msgspec
import pytest

from exec_server.registry.api import KeyObject, key_object, public_key
from exec_server.relay.noise import Identity

_KEY = Identity.generate().public
_OBJECT = key_object(_KEY)


def test_there_and_back() -> None:
    text = msgspec.json.encode(_OBJECT)
    assert set(msgspec.json.decode(text)) == {"suite", "x25519_public_key", "mlkem768_public_key"}
    assert public_key(msgspec.json.decode(text, type=KeyObject)) == _KEY


def test_unknown_members_are_refused() -> None:
    text = msgspec.json.encode(msgspec.to_builtins(_OBJECT) | {"more": 1})
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=KeyObject)


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    "changes",
    [
        {"suite": "Noise_hybridIK_25519+MLKEM768_AESGCM_SHA256"},
        {"x25519_public_key": _b64(bytes(31))},
        {"x25519_public_key": _b64(bytes(33))},
        {"x25519_public_key": _b64(bytes(32)).rstrip("=")},
        {"x25519_public_key": " " + _b64(bytes(32))},
        {"x25519_public_key": "é"},
        {"mlkem768_public_key": _b64(_KEY.mlkem768[:-1])},
        {"mlkem768_public_key": _b64(b"\xff" * 1184)},  # coefficients out of range
        {"mlkem768_public_key": _b64(_KEY.mlkem768).replace("/", "_").replace("+", "-")},
    ],
)
def test_what_is_no_key(changes: dict[str, str]) -> None:
    with pytest.raises(ValueError):
        public_key(msgspec.structs.replace(_OBJECT, **changes))
