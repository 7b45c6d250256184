"""Sealed boxes: known answers of the ciphers, and a box that the reference has opened."""

from __future__ import annotations

from base64 import b64decode

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from exec_server.registry import sealed_box
from exec_server.registry.sealed_box import BOX_BYTES, open_sealed

_KEY = Ed25519PrivateKey.from_private_bytes(
    bytes.fromhex("ac7d335e5b0c236d25598c99dfa63933921cc1d19fd4d7ecf20ef4b92ec17a9f")
)
_BOX = b64decode("pz/feszVMgWCjgwQaEhOSTFE+DlQNoUJtaRd7T2G6kIVZHh/oW0nw/dAO6hX4Cx+s2XK7V/mTtaYicI=")

# From "Cryptography in NaCl": the shared secret, the key from it, and its stream.
_SHARED = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
_FIRST_KEY = "1b27556473e985d462cd51197a9a46c76009549eac6474f206c4ee0844f68389"
_NONCE = "69696ee955b62b73cd62bda875fc73d68219e0036b7a0b37"
_STREAM = "eea6a7251c1e72916d11c2cb214d3c252539121d8e234e652d651fa4c8cff880"


def test_known_answers() -> None:
    key = sealed_box._hsalsa20(bytes.fromhex(_SHARED), bytes(16))
    assert key.hex() == _FIRST_KEY
    assert sealed_box._xsalsa20(key, bytes.fromhex(_NONCE), 32).hex() == _STREAM


def test_open() -> None:
    assert open_sealed(_BOX, _KEY) == b"task-sealed"


@pytest.mark.parametrize("index", [0, 31, 32, 47, 48, len(_BOX) - 1])
def test_changed_box(index: int) -> None:
    changed = bytearray(_BOX)
    changed[index] ^= 1
    with pytest.raises(ValueError, match="not for this key"):
        open_sealed(bytes(changed), _KEY)


def test_another_key() -> None:
    with pytest.raises(ValueError, match="not for this key"):
        open_sealed(_BOX, Ed25519PrivateKey.generate())


@pytest.mark.parametrize("box", [b"", _BOX[:47], bytes(BOX_BYTES + 1)])
def test_sizes(box: bytes) -> None:
    with pytest.raises(ValueError, match="wrong size"):
        open_sealed(box, _KEY)


def test_worthless_sender_key() -> None:
    with pytest.raises(ValueError):
        open_sealed(bytes(80), _KEY)
