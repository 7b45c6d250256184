"""Sealed boxes: one that the reference has opened, and boxes that nothing opens."""

from __future__ import annotations

import sys
from base64 import b64decode

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from nacl.public import SealedBox
from nacl.signing import SigningKey

from exec_server.errors import StartupError
from exec_server.registry.agent_identity import BOX_BYTES, open_sealed

_KEY = Ed25519PrivateKey.from_private_bytes(
    bytes.fromhex("ac7d335e5b0c236d25598c99dfa63933921cc1d19fd4d7ecf20ef4b92ec17a9f")
)
_BOX = b64decode("pz/feszVMgWCjgwQaEhOSTFE+DlQNoUJtaRd7T2G6kIVZHh/oW0nw/dAO6hX4Cx+s2XK7V/mTtaYicI=")


# The sender's throw-away key and the authentication tag.
_OVERHEAD = 32 + 16


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


@pytest.mark.parametrize("box", [b"", _BOX[:31], _BOX[:32], _BOX[:47]])
def test_truncated_box(box: bytes) -> None:
    with pytest.raises(ValueError, match="not for this key"):
        open_sealed(box, _KEY)


def test_longest_box() -> None:
    public = SigningKey(_KEY.private_bytes_raw()).to_curve25519_private_key().public_key
    text = bytes(BOX_BYTES - _OVERHEAD)
    assert open_sealed(SealedBox(public).encrypt(text), _KEY) == text
    with pytest.raises(ValueError, match="too long"):
        open_sealed(SealedBox(public).encrypt(text + b"x"), _KEY)


def test_sender_key_of_low_order() -> None:
    with pytest.raises(ValueError, match="not for this key"):
        open_sealed(bytes(80), _KEY)


def test_without_pynacl_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "nacl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "nacl", None)
    with pytest.raises(StartupError, match=r"pip install '\.\[agent-identity\]'"):
        open_sealed(_BOX, _KEY)
