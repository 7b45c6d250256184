"""The Noise handshake of the relay, and the ciphers that it produces.

Noise pattern IK with a post-quantum half beside each Diffie-Hellman half:

    <- s
    ...
    -> skem, e, es, s, ss, payload (the registry's authorization)
    <- ekem, skem, e, ee, se, payload (empty, or REJECTION)

The client initiates. Peer errors raise RelayError, with a text that does not help an attacker.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from hashlib import sha256
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from exec_server.errors import CredentialRejected, RelayError

# The name that is hashed. The registry calls the same suite SUITE, with one letter more.
PROTOCOL_NAME = b"Noise_hybridIK_25519+MLKEM768_AESGCM_SHA256"
SUITE = "Noise_hybridIK_X25519+MLKEM768_AESGCM_SHA256"

X25519_BYTES = 32
KEM_PUBLIC_BYTES = 1184
KEM_CIPHERTEXT_BYTES = 1088
TAG_BYTES = 16
FIRST_BYTES = 3568  # message 1 without its payload
SECOND_BYTES = 3424  # message 2 without its payload
MESSAGE_BYTES = 65_535  # the limit of Noise

# The payload of message 2 from an executor whose own credential the registry has rejected.
REJECTION = b"codex-registry-authentication-rejected/v1"

_CONTEXT = b"codex-exec-server-relay-noise/v1"
_LAST_COUNTER = 2**64 - 2  # Noise reserves 2**64 - 1

# Returns secret and ciphertext for a public key. Replaced in tests: encapsulation is random.
Encapsulate = Callable[[MLKEM768PublicKey], tuple[bytes, bytes]]


def _encapsulate(key: MLKEM768PublicKey) -> tuple[bytes, bytes]:
    return key.encapsulate()  # MLKEM768PublicKey itself is abstract


class PublicKey(NamedTuple):
    """Both public halves of an identity."""

    x25519: bytes
    mlkem768: bytes

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of both halves, for people to compare."""
        return f"sha256:{sha256(self.x25519 + self.mlkem768).hexdigest()}"

    def check(self) -> None:
        """Raise ValueError unless both halves are valid."""
        if len(self.x25519) != X25519_BYTES:
            raise ValueError("invalid X25519 public key")
        _kem_key(self.mlkem768)


class Identity:
    """Both private halves of a static or ephemeral key, in memory only."""

    def __init__(self, x25519: X25519PrivateKey, mlkem768: MLKEM768PrivateKey) -> None:
        self.x25519 = x25519
        self.mlkem768 = mlkem768
        self.public = PublicKey(
            x25519.public_key().public_bytes_raw(), mlkem768.public_key().public_bytes_raw()
        )

    @classmethod
    def generate(cls) -> Identity:
        return cls(X25519PrivateKey.generate(), MLKEM768PrivateKey.generate())


class Cipher:
    """The cipher of one direction; each call uses the next nonce."""

    __slots__ = ("_counter", "_decrypt", "_encrypt")

    def __init__(self, key: bytes) -> None:
        aead = AESGCM(key)
        self._encrypt, self._decrypt = aead.encrypt, aead.decrypt
        self._counter = 0

    def seal(self, plaintext: bytes | memoryview, associated: bytes = b"") -> bytes:
        return self._encrypt(self._nonce(), plaintext, associated)

    def open(self, ciphertext: bytes | memoryview, associated: bytes = b"") -> bytes:
        try:
            return self._decrypt(self._nonce(), ciphertext, associated)
        except InvalidTag:
            raise RelayError("decryption failed") from None

    def _nonce(self) -> bytes:
        counter = self._counter
        if counter > _LAST_COUNTER:
            raise RelayError("cipher is exhausted")
        self._counter = counter + 1
        return counter.to_bytes(12, "big")  # four zero bytes, then 64 bits


class Ciphers(NamedTuple):
    """The ciphers of one side."""

    sending: Cipher
    receiving: Cipher


def prologue(environment_id: str, registration_id: str, stream_id: str) -> bytes:
    """The context that both sides hash first; if theirs differ, decryption fails."""
    parts = (_CONTEXT, environment_id.encode(), registration_id.encode(), stream_id.encode())
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


class _Transcript:
    """The symmetric state of Noise: `h` hashes the messages, `ck` is the chaining key."""

    def __init__(self, context: bytes, responder: PublicKey) -> None:
        self.h = self.ck = sha256(PROTOCOL_NAME).digest()
        self._cipher: Cipher | None = None
        self.mix_hash(context)
        self.mix_hash(responder.x25519)  # <- s, known before
        self.mix_hash(responder.mlkem768)

    def mix_hash(self, data: bytes) -> None:
        self.h = sha256(self.h + data).digest()

    def mix_key(self, secret: bytes) -> None:
        self.ck, key = _hkdf(self.ck, secret, 2)
        self._cipher = Cipher(key)

    def mix_key_and_hash(self, secret: bytes) -> None:
        self.ck, extra, key = _hkdf(self.ck, secret, 3)
        self.mix_hash(extra)
        self._cipher = Cipher(key)

    def encrypt(self, plaintext: bytes) -> bytes:
        ciphertext = plaintext if self._cipher is None else self._cipher.seal(plaintext, self.h)
        self.mix_hash(ciphertext)
        return ciphertext

    def decrypt(self, ciphertext: bytes) -> bytes:
        cipher = self._cipher
        plaintext = ciphertext if cipher is None else cipher.open(ciphertext, self.h)
        self.mix_hash(ciphertext)
        return plaintext

    def split(self) -> tuple[Cipher, Cipher]:
        """The ciphers from initiator to responder and back."""
        to_responder, to_initiator = _hkdf(self.ck, b"", 2)
        return Cipher(to_responder), Cipher(to_initiator)


class Initiator:
    """The client's side: `write_first`, then `read_second`."""

    def __init__(
        self,
        static: Identity,
        responder: PublicKey,
        context: bytes,
        *,
        ephemeral: Identity | None = None,
        encapsulate: Encapsulate = _encapsulate,
    ) -> None:
        self._static = static
        self._ephemeral = ephemeral or Identity.generate()
        self._responder = responder
        self._encapsulate = encapsulate
        self.transcript = _Transcript(context, responder)

    def write_first(self, payload: bytes) -> bytes:
        transcript, static, ephemeral = self.transcript, self._static, self._ephemeral
        if len(payload) > MESSAGE_BYTES - FIRST_BYTES:
            raise RelayError("handshake payload is too long")
        # skem
        secret, ciphertext = self._encapsulate(_peer_kem_key(self._responder.mlkem768))
        message = transcript.encrypt(ciphertext)  # no key yet: plain
        transcript.mix_key_and_hash(secret)
        # e
        for half in ephemeral.public:
            transcript.mix_hash(half)
            message += half
        # es
        transcript.mix_key(_exchange(ephemeral.x25519, self._responder.x25519))
        # s
        message += transcript.encrypt(static.public.x25519)
        message += transcript.encrypt(static.public.mlkem768)
        # ss
        transcript.mix_key(_exchange(static.x25519, self._responder.x25519))
        return message + transcript.encrypt(payload)

    def read_second(self, message: bytes) -> Ciphers:
        """Return the ciphers of the stream; CredentialRejected if the payload is REJECTION."""
        if not SECOND_BYTES <= len(message) <= MESSAGE_BYTES:
            raise RelayError("handshake response has a wrong length")
        transcript, parts = self.transcript, _MessageReader(message)
        # ekem
        ciphertext = parts.take(KEM_CIPHERTEXT_BYTES)
        transcript.mix_hash(ciphertext)
        transcript.mix_key(_decapsulate(self._ephemeral, ciphertext))
        # skem
        ciphertext = transcript.decrypt(parts.take(KEM_CIPHERTEXT_BYTES + TAG_BYTES))
        transcript.mix_key_and_hash(_decapsulate(self._static, ciphertext))
        # e
        ephemeral = PublicKey(parts.take(X25519_BYTES), parts.take(KEM_PUBLIC_BYTES))
        for half in ephemeral:
            transcript.mix_hash(half)
        # ee, se
        transcript.mix_key(_exchange(self._ephemeral.x25519, ephemeral.x25519))
        transcript.mix_key(_exchange(self._static.x25519, ephemeral.x25519))
        payload = transcript.decrypt(parts.rest())
        if payload == REJECTION:
            raise CredentialRejected
        if payload:
            raise RelayError("handshake response payload must be empty")
        to_responder, to_initiator = transcript.split()
        return Ciphers(sending=to_responder, receiving=to_initiator)


class Responder:
    """The executor's side: `read_first`, then `write_second` if the client's key is valid."""

    def __init__(
        self,
        static: Identity,
        context: bytes,
        *,
        make_ephemeral: Callable[[], Identity] = Identity.generate,
        encapsulate: Encapsulate = _encapsulate,
    ) -> None:
        self._static = static
        self._make_ephemeral = make_ephemeral
        self._encapsulate = encapsulate
        self._peer_static = self._peer_ephemeral = PublicKey(b"", b"")
        self._second = b""  # message 2 without its payload
        self.transcript = _Transcript(context, static.public)

    def read_first(self, message: bytes) -> tuple[PublicKey, bytes]:
        """Return the static key that the initiator has proved to own, and its payload."""
        if not FIRST_BYTES <= len(message) <= MESSAGE_BYTES:
            raise RelayError("handshake has a wrong length")
        transcript, parts = self.transcript, _MessageReader(message)
        # skem
        ciphertext = transcript.decrypt(parts.take(KEM_CIPHERTEXT_BYTES))  # no key yet: plain
        transcript.mix_key_and_hash(_decapsulate(self._static, ciphertext))
        # e
        self._peer_ephemeral = PublicKey(parts.take(X25519_BYTES), parts.take(KEM_PUBLIC_BYTES))
        for half in self._peer_ephemeral:
            transcript.mix_hash(half)
        # es
        transcript.mix_key(_exchange(self._static.x25519, self._peer_ephemeral.x25519))
        # s
        self._peer_static = PublicKey(
            transcript.decrypt(parts.take(X25519_BYTES + TAG_BYTES)),
            transcript.decrypt(parts.take(KEM_PUBLIC_BYTES + TAG_BYTES)),
        )
        # ss
        transcript.mix_key(_exchange(self._static.x25519, self._peer_static.x25519))
        return self._peer_static, transcript.decrypt(parts.rest())

    def prepare_second(self) -> None:
        """Compute the response up to its payload, which depends on the registry."""
        if self._second:
            return
        transcript = self.transcript
        # Only now, to spend less on invalid handshakes.
        ephemeral = self._make_ephemeral()
        # ekem
        secret, ciphertext = self._encapsulate(_peer_kem_key(self._peer_ephemeral.mlkem768))
        transcript.mix_hash(ciphertext)
        transcript.mix_key(secret)
        message = ciphertext
        # skem
        secret, ciphertext = self._encapsulate(_peer_kem_key(self._peer_static.mlkem768))
        message += transcript.encrypt(ciphertext)
        transcript.mix_key_and_hash(secret)
        # e: its second half is never encapsulated to, but both sides hash it
        for half in ephemeral.public:
            transcript.mix_hash(half)
            message += half
        # ee, se
        transcript.mix_key(_exchange(ephemeral.x25519, self._peer_ephemeral.x25519))
        transcript.mix_key(_exchange(ephemeral.x25519, self._peer_static.x25519))
        self._second = message

    def write_second(self, payload: bytes = b"") -> tuple[bytes, Ciphers]:
        """Return the response, and the ciphers of the stream that it opens."""
        self.prepare_second()
        message = self._second + self.transcript.encrypt(payload)
        to_responder, to_initiator = self.transcript.split()
        return message, Ciphers(sending=to_initiator, receiving=to_responder)


class _MessageReader:
    """Reads the fields of a message in order."""

    def __init__(self, message: bytes) -> None:
        self._message = message
        self._offset = 0

    def take(self, size: int) -> bytes:
        start, self._offset = self._offset, self._offset + size
        return self._message[start : self._offset]

    def rest(self) -> bytes:
        return self._message[self._offset :]


def _hkdf(chaining_key: bytes, secret: bytes, count: int) -> list[bytes]:
    """HKDF as Noise defines it: `count` keys of 32 bytes."""
    extracted = hmac.digest(chaining_key, secret, "sha256")
    keys = [b""]
    for number in range(1, count + 1):
        keys.append(hmac.digest(extracted, keys[-1] + bytes((number,)), "sha256"))
    return keys[1:]


def _exchange(private: X25519PrivateKey, public: bytes) -> bytes:
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # the shared secret is all zeros: a key of low order
        raise RelayError("invalid public key") from None


def _kem_key(public: bytes) -> MLKEM768PublicKey:
    return MLKEM768PublicKey.from_public_bytes(public)


def _peer_kem_key(public: bytes) -> MLKEM768PublicKey:
    try:
        return _kem_key(public)
    except ValueError:
        raise RelayError("invalid public key") from None


def _decapsulate(identity: Identity, ciphertext: bytes) -> bytes:
    # A ciphertext for another key gives a wrong secret, not an error; the tags detect it.
    return identity.mlkem768.decapsulate(ciphertext)
