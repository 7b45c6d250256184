"""Bodies of requests: keys by decoded length, unknown members, plaintext forms."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from exec_server.hosting import http_messages
from exec_server.hosting.rules import Refusal
from exec_server.relay.noise import SUITE

KEY = {
    "suite": SUITE,
    "x25519_public_key": base64.b64encode(bytes(32)).decode(),
    "mlkem768_public_key": base64.b64encode(bytes(1184)).decode(),
}
REGISTRATION = {"security_profile": "noise_hybrid_ik_v1", "executor_public_key": KEY}
VALIDATION = {
    "executor_registration_id": "reg",
    "harness_public_key": KEY,
    "harness_key_authorization": "secret",
}


def _refusal(read: Any, body: object) -> str:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(Refusal) as refused:
        read(content)
    return str(refused.value)


def test_the_three_bodies_are_read() -> None:
    key = http_messages.read_registration(json.dumps({**REGISTRATION, "more": 1}).encode())
    assert json.loads(key.text) == KEY
    assert http_messages.read_connection(json.dumps({"harness_public_key": KEY}).encode()) == key
    assert http_messages.read_validation(
        json.dumps(VALIDATION).encode()
    ) == http_messages.Validation("reg", key, "secret")


def test_a_key_has_one_text_whatever_its_spelling() -> None:
    text = base64.b64encode(bytes(32)).decode()
    assert text.endswith("AA=")
    # The last character but one has two bits that no byte uses.
    other = {**dict(reversed(KEY.items())), "x25519_public_key": text[:-2] + "B="}
    spellings = [
        http_messages.read_connection(json.dumps({"harness_public_key": key}).encode())
        for key in (KEY, other)
    ]
    assert spellings[0] == spellings[1]


@pytest.mark.parametrize("body", [b"{", b"", b"[]", b"null", b"\xff", b"[" * 5000])
def test_a_body_is_a_json_object(body: bytes) -> None:
    assert _refusal(http_messages.read_connection, body) == "400 invalid_body"


@pytest.mark.parametrize("body", [b"", b"  "])
def test_plaintext_forms_are_not_served(body: object) -> None:
    assert _refusal(http_messages.read_registration, body) == "403 plaintext_disabled"


@pytest.mark.parametrize("body", [{}, {"name": "x"}, {**REGISTRATION, "security_profile": "none"}])
def test_another_profile_is_refused(body: object) -> None:
    assert _refusal(http_messages.read_registration, body) == "400 invalid_body"


@pytest.mark.parametrize(
    "change",
    [
        {"suite": "Noise_X"},
        {"x25519_public_key": base64.b64encode(bytes(31)).decode()},
        {"mlkem768_public_key": base64.b64encode(bytes(1185)).decode()},
        {"x25519_public_key": "*" * 44},
        {"x25519_public_key": 7},
        {"x25519_public_key": "ä"},
        {"unknown": 1},
    ],
)
def test_keys_are_checked(change: dict[str, object]) -> None:
    body = {"harness_public_key": {**KEY, **change}}
    assert _refusal(http_messages.read_connection, body) == "400 invalid_public_key"


@pytest.mark.parametrize("value", [None, "x", [], {}, {"suite": SUITE}])
def test_a_key_is_an_object_with_all_members(value: object) -> None:
    assert _refusal(http_messages.read_connection, {"harness_public_key": value}) == (
        "400 invalid_public_key"
    )


@pytest.mark.parametrize("name", ["executor_registration_id", "harness_key_authorization"])
def test_a_validation_needs_its_texts(name: str) -> None:
    assert _refusal(http_messages.read_validation, {**VALIDATION, name: 7}) == "400 invalid_body"


@pytest.mark.parametrize("text", ["reg\0", "reg-\u00e4", "a\nb"])
def test_a_registration_has_printable_characters(text: str) -> None:
    body = {**VALIDATION, "executor_registration_id": text}
    assert _refusal(http_messages.read_validation, body) == "400 invalid_body"
