"""Opens a NaCl sealed box: the form in which an agent's task id may come.

X25519 with a throw-away key, XSalsa20 for the text, Poly1305 for its integrity. The library has
all but Salsa20, and texts are a few dozen bytes: plain Python is fast enough.
"""

from __future__ import annotations

import struct
from hashlib import blake2b, sha512

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.poly1305 import Poly1305

# Of a box. Task ids are short; what is longer would keep the loop busy.
BOX_BYTES = 4096

_KEY_BYTES = 32
_TAG_BYTES = 16
_NONCE_BYTES = 24
_SIGMA = struct.unpack("<4I", b"expand 32-byte k")
# Where the quarter rounds of a double round look: down the columns, then along the rows.
_COLUMNS = ((0, 4, 8, 12), (5, 9, 13, 1), (10, 14, 2, 6), (15, 3, 7, 11))
_ROWS = ((0, 1, 2, 3), (5, 6, 7, 4), (10, 11, 8, 9), (15, 12, 13, 14))


def open_sealed(box: bytes, key: Ed25519PrivateKey) -> bytes:
    """The text of a box for the Curve25519 form of a signing key; raises ValueError."""
    if not _KEY_BYTES + _TAG_BYTES <= len(box) <= BOX_BYTES:
        raise ValueError("sealed box of a wrong size")
    ours = X25519PrivateKey.from_private_bytes(sha512(key.private_bytes_raw()).digest()[:32])
    sender, sealed = box[:_KEY_BYTES], box[_KEY_BYTES:]
    nonce = blake2b(
        sender + ours.public_key().public_bytes_raw(), digest_size=_NONCE_BYTES
    ).digest()
    shared = ours.exchange(X25519PublicKey.from_public_bytes(sender))
    secret = _hsalsa20(shared, bytes(16))
    tag, ciphertext = sealed[:_TAG_BYTES], sealed[_TAG_BYTES:]
    stream = _xsalsa20(secret, nonce, 32 + len(ciphertext))
    try:
        Poly1305.verify_tag(stream[:32], ciphertext, tag)
    except InvalidSignature:
        raise ValueError("sealed box is not for this key") from None
    return bytes(a ^ b for a, b in zip(ciphertext, stream[32:], strict=True))


def _xsalsa20(key: bytes, nonce: bytes, size: int) -> bytes:
    """The first bytes of the key stream."""
    inner = struct.unpack("<8I", _hsalsa20(key, nonce[:16]))
    rest = struct.unpack("<2I", nonce[16:])
    stream = bytearray()
    for counter in range(-(-size // 64)):
        start = _matrix(inner, (*rest, counter, 0))
        mixed = _double_rounds(start)
        added = ((a + b) & 0xFFFFFFFF for a, b in zip(start, mixed, strict=True))
        stream += struct.pack("<16I", *added)
    return bytes(stream[:size])


def _hsalsa20(key: bytes, nonce: bytes) -> bytes:
    mixed = _double_rounds(_matrix(struct.unpack("<8I", key), struct.unpack("<4I", nonce)))
    return struct.pack("<8I", *(mixed[index] for index in (0, 5, 10, 15, 6, 7, 8, 9)))


def _matrix(key: tuple[int, ...], middle: tuple[int, ...]) -> list[int]:
    return [
        *(_SIGMA[0], *key[:4]),
        *(_SIGMA[1], *middle),
        *(_SIGMA[2], *key[4:]),
        _SIGMA[3],
    ]


def _double_rounds(start: list[int]) -> list[int]:
    x = list(start)
    for _ in range(10):
        for a, b, c, d in (*_COLUMNS, *_ROWS):
            x[b] ^= _rotated(x[a] + x[d], 7)
            x[c] ^= _rotated(x[b] + x[a], 9)
            x[d] ^= _rotated(x[c] + x[b], 13)
            x[a] ^= _rotated(x[d] + x[c], 18)
    return x


def _rotated(value: int, by: int) -> int:
    value &= 0xFFFFFFFF
    return (value << by | value >> (32 - by)) & 0xFFFFFFFF
