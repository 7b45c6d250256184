"""The handshake, step by step, against recorded ones; and everything that must make it fail.

The recorded handshakes say which random numbers were drawn, so that each side can be played
again; two of them were held with the reference, once in each role.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from exec_server.errors import CredentialRejected, RelayError
from exec_server.relay import noise
from exec_server.relay.noise import (
    FIRST_BYTES,
    MESSAGE_BYTES,
    REJECTION,
    SECOND_BYTES,
    Cipher,
    Ciphers,
    Identity,
    Initiator,
    PublicKey,
    Responder,
    prologue,
)

_FILE = json.loads((Path(__file__).parents[2] / "vectors" / "noise.json").read_text())
_VECTORS = {vector["name"]: vector for vector in _FILE["vectors"]}
_FIRST_VECTOR = _VECTORS["deterministic-1"]
_BOTH_SECRETS = [vector for vector in _FILE["vectors"] if vector["name"].startswith("determin")]
_INITIATOR_SECRETS = [vector for vector in _FILE["vectors"] if "initiator_static" in vector]
_RESPONDER_SECRETS = [vector for vector in _FILE["vectors"] if "responder_static" in vector]

# The parts of both messages, as their sizes, in order.
_FIRST_PARTS = {"skem": 1088, "e": 32, "e kem": 1184, "s": 48, "s kem": 1200, "payload": 16 + 21}
_SECOND_PARTS = {"ekem": 1088, "skem": 1104, "e": 32, "e kem": 1184, "payload": 16}
# How many calls of the transcript each token makes: tells after which one a token is done.
_CALLS = [("skem", 2), ("e", 2), ("es", 1), ("s", 2), ("ss", 1), ("payload", 1)]
_CALLS += [("ekem", 2), ("skem", 2), ("e", 2), ("ee", 1), ("se", 1), ("payload", 1)]

_CONTEXT = prologue("env-1", "reg-1", "stream-1")
# Points whose multiples by any private key are zero: all of small order.
_SMALL_ORDER = [
    bytes(32),
    b"\x01" + bytes(31),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
    bytes.fromhex("ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
]
_NO_KEM_KEY = b"\xff" * 1184  # coefficients beyond the modulus


class _Recorder(noise._Transcript):
    """Notes h and ck after each call from outside."""

    def __init__(self, context: bytes, responder: PublicKey) -> None:
        self.states: list[tuple[str, str]] = []
        self._depth = 0
        super().__init__(context, responder)
        self.states.clear()  # what both sides know before

    def _note(self, method: Callable[[bytes], Any], data: bytes) -> Any:
        self._depth += 1
        result = method(data)
        self._depth -= 1
        if self._depth == 0:
            self.states.append((self.h.hex(), self.ck.hex()))
        return result

    def mix_hash(self, data: bytes) -> None:
        self._note(super().mix_hash, data)

    def mix_key(self, secret: bytes) -> None:
        self._note(super().mix_key, secret)

    def mix_key_and_hash(self, secret: bytes) -> None:
        self._note(super().mix_key_and_hash, secret)

    def encrypt(self, plaintext: bytes) -> bytes:
        result: bytes = self._note(super().encrypt, plaintext)
        return result

    def decrypt(self, ciphertext: bytes) -> bytes:
        result: bytes = self._note(super().decrypt, ciphertext)
        return result


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "_Transcript", _Recorder)


def _states(side: Initiator | Responder) -> list[dict[str, Any]]:
    """What the vectors call states after tokens."""
    assert isinstance(side.transcript, _Recorder)
    seen = side.transcript.states
    ends = accumulate(count for _, count in _CALLS)
    return [
        {
            "message": 1 if index < 6 else 2,
            "token": token,
            "h": seen[end - 1][0],
            "ck": seen[end - 1][1],
        }
        for index, ((token, _), end) in enumerate(zip(_CALLS, ends, strict=True))
        if end <= len(seen)
    ]


def _hex(value: str) -> bytes:
    return bytes.fromhex(value)


def _identity(values: dict[str, str]) -> Identity:
    identity = Identity(
        X25519PrivateKey.from_private_bytes(_hex(values["x25519_private"])),
        MLKEM768PrivateKey.from_seed_bytes(_hex(values["mlkem768_seed_d_z"])),
    )
    assert identity.public == _public(values)
    return identity


def _public(values: dict[str, str]) -> PublicKey:
    return PublicKey(_hex(values["x25519_public"]), _hex(values["mlkem768_public"]))


def _drawn(vector: dict[str, Any], **targets: bytes) -> noise.Encapsulate:
    """The encapsulations of a vector, each for the key that it was made for."""
    known = {}
    for name, key in targets.items():
        values = vector["encapsulations"][name]
        known[key] = (_hex(values["shared_secret"]), _hex(values["ciphertext"]))
    return lambda key: known.pop(key.public_bytes_raw())


def _initiator(vector: dict[str, Any], context: bytes | None = None) -> Initiator:
    responder = _public(vector.get("responder_static") or vector["responder_static_public"])
    return Initiator(
        _identity(vector["initiator_static"]),
        responder,
        _hex(vector["prologue"]) if context is None else context,
        ephemeral=_identity(vector["initiator_ephemeral"]),
        encapsulate=_drawn(vector, message1_skem_to_responder_static=responder.mlkem768),
    )


def _responder(vector: dict[str, Any], context: bytes | None = None) -> Responder:
    static = _public(vector.get("initiator_static") or vector["initiator_static_public"])
    return Responder(
        _identity(vector["responder_static"]),
        _hex(vector["prologue"]) if context is None else context,
        make_ephemeral=lambda: _identity(vector["responder_ephemeral"]),
        encapsulate=_drawn(
            vector,
            message2_ekem_to_initiator_ephemeral=_hex(vector["message1"])[1120:2304],
            message2_skem_to_initiator_static=static.mlkem768,
        ),
    )


def _check_records(vector: dict[str, Any], ciphers: Ciphers, role: str) -> None:
    """All records of a vector, sealed and opened by the side that has these ciphers."""
    keys = {
        direction: Cipher(_hex(vector[f"key_{direction}"]))
        for direction in ("initiator_to_responder", "responder_to_initiator")
    }
    numbers = dict.fromkeys(keys, 0)
    for record in vector["records"]:
        direction = record["direction"]
        plaintext, ciphertext = _hex(record["plaintext"]), _hex(record["ciphertext"])
        assert record["nonce"] == numbers[direction]
        numbers[direction] += 1
        assert keys[direction].seal(plaintext) == ciphertext
        if direction.startswith(role):
            assert ciphers.sending.seal(plaintext) == ciphertext
        else:
            assert ciphers.receiving.open(ciphertext) == plaintext


def _flipped(message: bytes, position: int) -> bytes:
    changed = bytearray(message)
    changed[position] ^= 1 << position % 8
    return bytes(changed)


def _positions(parts: dict[str, int]) -> list[int]:
    """The edges of all parts, and some places between."""
    edges = list(accumulate(parts.values(), initial=0))
    return sorted({*edges[:-1], *(edge - 1 for edge in edges[1:]), *range(0, edges[-1], 61)})


def _refusal(call: Callable[..., object], *arguments: bytes) -> str:
    with pytest.raises(RelayError) as refused:
        call(*arguments)
    return str(refused.value)


# ---- recorded handshakes --------------------------------------------------------------


def test_names_and_sizes_are_the_recorded_ones() -> None:
    assert _FILE["noise_protocol_name"].encode() == noise.PROTOCOL_NAME
    assert _FILE["suite_tag"] == noise.SUITE
    assert {sha256(noise.PROTOCOL_NAME).hexdigest()} == {v["initial_h"] for v in _BOTH_SECRETS}
    assert _FILE["sizes"] == {
        "message1_overhead": FIRST_BYTES,
        "message2_overhead": SECOND_BYTES,
        "tag": noise.TAG_BYTES,
        "x25519_public": noise.X25519_BYTES,
        "mlkem768_public": noise.KEM_PUBLIC_BYTES,
        "mlkem768_ciphertext": noise.KEM_CIPHERTEXT_BYTES,
        "shared_secret": 32,
    }
    assert sum(_FIRST_PARTS.values()) == _FIRST_VECTOR["message1_len"]
    assert sum(_SECOND_PARTS.values()) == SECOND_BYTES


@pytest.mark.parametrize("example", _FILE["prologue_examples"] + _FILE["vectors"])
def test_prologue(example: dict[str, str]) -> None:
    ids = (example[name] for name in ("environment_id", "executor_registration_id", "stream_id"))
    assert prologue(*ids).hex() == example["prologue"]


@pytest.mark.parametrize("vector", _INITIATOR_SECRETS, ids=lambda vector: vector["name"])
def test_recorded_handshake_as_initiator(vector: dict[str, Any]) -> None:
    initiator = _initiator(vector)
    assert initiator.write_first(vector["payload_utf8"].encode()).hex() == vector["message1"]
    assert _states(initiator) == vector["states_after_token"][:6]
    ciphers = initiator.read_second(_hex(vector["message2"]))
    assert _states(initiator) == vector["states_after_token"]
    assert initiator.transcript.h.hex() == vector["handshake_hash"]
    _check_records(vector, ciphers, "initiator")


@pytest.mark.parametrize("vector", _RESPONDER_SECRETS, ids=lambda vector: vector["name"])
def test_recorded_handshake_as_responder(vector: dict[str, Any]) -> None:
    responder = _responder(vector)
    key, payload = responder.read_first(_hex(vector["message1"]))
    assert key == _public(vector.get("initiator_static") or vector["initiator_static_public"])
    assert payload.decode() == vector["payload_utf8"]
    message, ciphers = responder.write_second()
    assert message.hex() == vector["message2"]
    if "states_after_token" in vector:
        assert _states(responder) == vector["states_after_token"]
    assert responder.transcript.h.hex() == vector["handshake_hash"]
    _check_records(vector, ciphers, "responder")


@pytest.mark.parametrize("case", _FILE["negative"], ids=lambda case: case["name"])
def test_recorded_failures(case: dict[str, Any]) -> None:
    vector = _VECTORS[case["base"]]
    message = bytearray(_hex(vector["message1"]))
    message[-1] ^= case.get("xor_last_byte", 0)
    context = _hex(case.get("prologue", vector["prologue"]))
    text = _refusal(
        _responder(vector, context).read_first, bytes(message[: case.get("truncate_to")])
    )
    expected = {
        "authentication failure": "decryption failed",
        "too short": "handshake has a wrong length",
    }
    assert text == expected[case["expect"]]


# ---- handshakes with fresh keys -------------------------------------------------------


def test_fresh_handshake_gives_matching_ciphers() -> None:
    harness, executor = Identity.generate(), Identity.generate()
    initiator = Initiator(harness, executor.public, _CONTEXT)
    responder = Responder(executor, _CONTEXT)
    assert responder.read_first(initiator.write_first(b"may I?")) == (harness.public, b"may I?")
    answer, theirs = responder.write_second()
    ours = initiator.read_second(answer)
    assert _states(initiator) == _states(responder)
    for text in (b"one", b"", b"three"):
        assert theirs.receiving.open(ours.sending.seal(text)) == text
        assert ours.receiving.open(theirs.sending.seal(text)) == text


def test_no_two_handshakes_are_alike() -> None:
    harness, executor = Identity.generate(), Identity.generate()
    firsts = [Initiator(harness, executor.public, _CONTEXT).write_first(b"") for _ in range(2)]
    start = 0
    for size in _FIRST_PARTS.values():
        assert firsts[0][start : start + size] != firsts[1][start : start + size]
        start += size
    seconds = []
    for _ in range(2):
        responder = Responder(executor, _CONTEXT)
        responder.read_first(firsts[0])
        seconds.append(responder.write_second()[0])
    start = 0
    for size in _SECOND_PARTS.values():
        assert seconds[0][start : start + size] != seconds[1][start : start + size]
        start += size


@pytest.mark.parametrize("position", _positions(_FIRST_PARTS))
def test_no_bit_of_the_first_message_can_be_changed(position: int) -> None:
    message = _flipped(_hex(_FIRST_VECTOR["message1"]), position)
    assert _refusal(_responder(_FIRST_VECTOR).read_first, message) == "decryption failed"


@pytest.mark.parametrize("position", _positions(_SECOND_PARTS))
def test_no_bit_of_the_second_message_can_be_changed(position: int) -> None:
    initiator = _initiator(_FIRST_VECTOR)
    initiator.write_first(_FIRST_VECTOR["payload_utf8"].encode())
    message = _flipped(_hex(_FIRST_VECTOR["message2"]), position)
    assert _refusal(initiator.read_second, message) == "decryption failed"


def test_messages_of_wrong_lengths_are_refused() -> None:
    message = _hex(_FIRST_VECTOR["message1"])
    for size in (0, 1, 1088, FIRST_BYTES - 1):
        text = _refusal(_responder(_FIRST_VECTOR).read_first, message[:size])
        assert text == "handshake has a wrong length"
    for size in (FIRST_BYTES, len(message) - 1):
        assert _refusal(_responder(_FIRST_VECTOR).read_first, message[:size]) == "decryption failed"
    assert _refusal(_responder(_FIRST_VECTOR).read_first, message + b"x") == "decryption failed"
    answer = _hex(_FIRST_VECTOR["message2"])
    for wrong, text in (
        (b"", "handshake response has a wrong length"),
        (answer[:-1], "handshake response has a wrong length"),
        (answer + bytes(MESSAGE_BYTES), "handshake response has a wrong length"),
        (answer + b"x", "decryption failed"),
    ):
        initiator = _initiator(_FIRST_VECTOR)
        initiator.write_first(_FIRST_VECTOR["payload_utf8"].encode())
        assert _refusal(initiator.read_second, wrong) == text


def test_longest_payload_of_the_first_message() -> None:
    executor = Identity.generate()
    longest = bytes(MESSAGE_BYTES - FIRST_BYTES)
    initiator = Initiator(Identity.generate(), executor.public, _CONTEXT)
    assert _refusal(initiator.write_first, longest + b"x") == "handshake payload is too long"
    message = initiator.write_first(longest)
    assert len(message) == 65_535
    assert Responder(executor, _CONTEXT).read_first(message)[1] == longest
    text = _refusal(Responder(executor, _CONTEXT).read_first, message + b"x")
    assert text == "handshake has a wrong length"


def test_payload_of_the_second_message_must_be_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Identity.generate()
    initiator = Initiator(Identity.generate(), executor.public, _CONTEXT)
    responder = Responder(executor, _CONTEXT)
    responder.read_first(initiator.write_first(b""))
    honest = responder.transcript.encrypt
    monkeypatch.setattr(responder.transcript, "encrypt", lambda data: honest(data or b"extra"))
    answer, _ = responder.write_second()
    assert len(answer) == SECOND_BYTES + len(b"extra")
    assert _refusal(initiator.read_second, answer) == "handshake response payload must be empty"


@pytest.mark.parametrize("part", ["environment", "registration", "stream"])
def test_both_sides_must_mean_the_same_stream(part: str) -> None:
    ids = {"environment": "env-1", "registration": "reg-1", "stream": "stream-1"}
    executor = Identity.generate()
    context = prologue(*(ids | {part: "another"}).values())
    message = Initiator(Identity.generate(), executor.public, context).write_first(b"")
    assert _refusal(Responder(executor, _CONTEXT).read_first, message) == "decryption failed"


@pytest.mark.parametrize("half", ["x25519", "mlkem768"])
def test_handshake_with_another_executor_fails(half: str) -> None:
    executor, stranger = Identity.generate(), Identity.generate()
    halves = {"x25519": executor.x25519, "mlkem768": executor.mlkem768}
    halves[half] = getattr(stranger, half)
    mixed = Identity(halves["x25519"], halves["mlkem768"])  # type: ignore[arg-type]
    message = Initiator(Identity.generate(), executor.public, _CONTEXT).write_first(b"")
    assert _refusal(Responder(mixed, _CONTEXT).read_first, message) == "decryption failed"


@pytest.mark.parametrize("half", ["x25519", "mlkem768"])
def test_key_of_somebody_else_cannot_be_claimed(half: str) -> None:
    """The private half must be there: for X25519 in the first message, else in the second."""
    executor, victim, thief = (Identity.generate() for _ in range(3))
    thief.public = thief.public._replace(**{half: getattr(victim.public, half)})
    initiator = Initiator(thief, executor.public, _CONTEXT)
    responder = Responder(executor, _CONTEXT)
    message = initiator.write_first(b"")
    if half == "x25519":
        assert _refusal(responder.read_first, message) == "decryption failed"
    else:
        responder.read_first(message)
        assert _refusal(initiator.read_second, responder.write_second()[0]) == "decryption failed"


# ---- keys that nobody has -------------------------------------------------------------


@pytest.mark.parametrize("point", _SMALL_ORDER)
def test_points_of_small_order_are_refused(point: bytes) -> None:
    executor = Identity.generate()
    # As the executor's static key, from a registry that means harm.
    harness = Initiator(Identity.generate(), executor.public._replace(x25519=point), _CONTEXT)
    assert _refusal(harness.write_first, b"") == "invalid public key"
    # As the ephemeral key of the harness, then as its static one.
    for role in ("ephemeral", "static"):
        keys = {"ephemeral": Identity.generate(), "static": Identity.generate()}
        keys[role].public = keys[role].public._replace(x25519=point)
        harness = Initiator(keys["static"], executor.public, _CONTEXT, ephemeral=keys["ephemeral"])
        text = _refusal(Responder(executor, _CONTEXT).read_first, harness.write_first(b""))
        # The true exchanges of the harness differ from those of zeros, but it is refused before.
        assert text == "invalid public key"
    # As the ephemeral key of the executor.
    harness = Initiator(Identity.generate(), executor.public, _CONTEXT)
    responder = Responder(executor, _CONTEXT)
    responder.read_first(harness.write_first(b""))
    answer = responder.write_second()[0]
    start = _SECOND_PARTS["ekem"] + _SECOND_PARTS["skem"]
    forged = answer[:start] + point + answer[start + 32 :]
    assert _refusal(harness.read_second, forged) == "invalid public key"


@pytest.mark.parametrize("role", ["ephemeral", "static"])
def test_kem_keys_of_the_harness_are_checked(role: str) -> None:
    executor = Identity.generate()
    keys = {"ephemeral": Identity.generate(), "static": Identity.generate()}
    keys[role].public = keys[role].public._replace(mlkem768=_NO_KEM_KEY)
    harness = Initiator(keys["static"], executor.public, _CONTEXT, ephemeral=keys["ephemeral"])
    responder = Responder(executor, _CONTEXT)
    responder.read_first(harness.write_first(b""))
    assert _refusal(responder.write_second) == "invalid public key"


@pytest.mark.parametrize("key", [b"", bytes(1183), bytes(1185), _NO_KEM_KEY])
def test_kem_key_of_the_executor_is_checked(key: bytes) -> None:
    harness = Initiator(Identity.generate(), PublicKey(bytes(32), key), _CONTEXT)
    assert _refusal(harness.write_first, b"") == "invalid public key"


def test_public_keys_can_be_checked_before_use() -> None:
    good = Identity.generate().public
    good.check()
    for wrong in (b"", bytes(31), bytes(33)):
        with pytest.raises(ValueError, match="X25519"):
            good._replace(x25519=wrong).check()
    for wrong in (b"", bytes(1183), bytes(1185), _NO_KEM_KEY):
        with pytest.raises(ValueError):
            good._replace(mlkem768=wrong).check()


def test_fingerprint_covers_both_halves() -> None:
    key = PublicKey(b"x" * 32, b"k" * 1184)
    assert key.fingerprint == "sha256:" + sha256(b"x" * 32 + b"k" * 1184).hexdigest()
    others = {key._replace(x25519=bytes(32)), key._replace(mlkem768=bytes(1184))}
    assert len({key.fingerprint, *(other.fingerprint for other in others)}) == 3


def test_generated_identities_differ() -> None:
    first, second = Identity.generate(), Identity.generate()
    assert first.public.x25519 != second.public.x25519
    assert first.public.mlkem768 != second.public.mlkem768
    secret, ciphertext = noise._encapsulate(
        MLKEM768PublicKey.from_public_bytes(first.public.mlkem768)
    )
    assert first.mlkem768.decapsulate(ciphertext) == secret


# ---- ciphers --------------------------------------------------------------------------


def test_numbers_of_a_cipher_count_up_from_zero() -> None:
    key = bytes(range(32))
    cipher, plain = Cipher(key), AESGCM(key)
    for number in range(300):
        nonce = bytes(4) + number.to_bytes(8, "big")
        assert cipher.seal(b"same", b"context") == plain.encrypt(nonce, b"same", b"context")


def test_number_of_a_failed_record_is_not_used_again() -> None:
    key = bytes(32)
    sender, receiver = Cipher(key), Cipher(key)
    first, second = sender.seal(b"first"), sender.seal(b"second")
    assert _refusal(receiver.open, _flipped(first, 0)) == "decryption failed"
    assert receiver.open(memoryview(second)) == b"second"
    assert _refusal(receiver.open, second) == "decryption failed"


@pytest.mark.parametrize("size", [0, 1, 15])
def test_record_shorter_than_its_tag_is_refused(size: int) -> None:
    assert _refusal(Cipher(bytes(32)).open, bytes(size)) == "decryption failed"


def test_associated_data_must_match() -> None:
    record = Cipher(bytes(32)).seal(memoryview(b"text"), b"context")
    assert Cipher(bytes(32)).open(record, b"context") == b"text"
    assert _refusal(Cipher(bytes(32)).open, record, b"") == "decryption failed"


def test_cipher_ends_before_its_numbers_do() -> None:
    sender, receiver = Cipher(bytes(32)), Cipher(bytes(32))
    sender._counter = receiver._counter = 2**64 - 2
    assert receiver.open(sender.seal(b"last")) == b"last"
    for call in (sender.seal, receiver.open):
        for _ in range(2):
            assert _refusal(call, b"one more") == "cipher is exhausted"


# ---- the rejection of the executor's credential ----------------------------------------


def test_recorded_rejection_is_recognised() -> None:
    path = Path(__file__).parents[2] / "vectors" / "noise_rejection.json"
    vector = json.loads(path.read_text())
    assert vector["message2_payload_utf8"].encode() == REJECTION
    key = _public(vector["responder_static_public"])
    known = (_hex(vector["message1_skem_shared_secret"]), _hex(vector["message1_skem_ciphertext"]))
    initiator = Initiator(
        _identity(vector["initiator_static"]),
        key,
        prologue(vector["environment_id"], vector["executor_registration_id"], vector["stream_id"]),
        ephemeral=_identity(vector["initiator_ephemeral"]),
        encapsulate=lambda _: known,
    )
    assert initiator.write_first(vector["payload1_utf8"].encode()) == _hex(vector["message1"])
    with pytest.raises(CredentialRejected):
        initiator.read_second(_hex(vector["message2"]))


@pytest.mark.parametrize("payload", [b"x", REJECTION[:-1], REJECTION + b"x", REJECTION.upper()])
def test_other_payload_of_a_response_is_an_error(payload: bytes) -> None:
    client, executor = Identity.generate(), Identity.generate()
    initiator = Initiator(client, executor.public, _CONTEXT)
    responder = Responder(executor, _CONTEXT)
    responder.read_first(initiator.write_first(b""))
    with pytest.raises(RelayError, match="handshake response payload must be empty") as caught:
        initiator.read_second(responder.write_second(payload)[0])
    assert not isinstance(caught.value, CredentialRejected)
