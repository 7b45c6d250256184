"""Who may connect: bearer headers, the one token, signed tokens."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import Any

import pytest

from exec_server.net.auth import (
    Authenticator,
    SignedTokens,
    capability_token,
    is_digest,
    is_strong_secret,
    signed_bearer_token,
)
from exec_server.net.websocket.handshake import HttpRefusal

_SECRET = b"s" * 32
_NOW = 1_000_000


def _b64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def _jwt(claims: object, *, secret: bytes = _SECRET, header: Any = None) -> str:
    """A token made by hand, so that nothing but the signature is right about it if need be."""
    header = {"alg": "HS256", "typ": "JWT"} if header is None else header
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    signed = _b64(text) + b"." + _b64(json.dumps(claims).encode())
    return (signed + b"." + _b64(hmac.digest(secret, signed, "sha256"))).decode()


def _signed(**rules: Any) -> Authenticator:
    defaults: dict[str, Any] = {"issuer": None, "audience": None, "clock_skew": 30}
    return signed_bearer_token(SignedTokens(_SECRET, now=lambda: _NOW, **(defaults | rules)))


def _text(authenticate: Authenticator, token: str) -> str | None:
    return _refusal(authenticate, {"authorization": f"Bearer {token}"})


def _refusal(authenticate: Authenticator, headers: dict[str, str]) -> str | None:
    try:
        authenticate(headers)
    except HttpRefusal as refusal:
        return refusal.text if refusal.status == 401 else f"status {refusal.status}"
    return None


_CAPABILITY = capability_token(hashlib.sha256(b"the-token").digest())


@pytest.mark.parametrize(
    "value", ["Bearer the-token", "bearer the-token", "BEARER   the-token  ", "Bearer \tthe-token"]
)
def test_bearer_header_forms(value: str) -> None:
    assert _refusal(_CAPABILITY, {"authorization": value}) is None


def test_missing_header() -> None:
    assert _refusal(_CAPABILITY, {}) == "missing websocket bearer token"


@pytest.mark.parametrize(
    "value", ["", "the-token", "Bearer", "Bearer ", "Basic the-token", "Bearer\tx", "Bearer t\xe9"]
)
def test_invalid_header(value: str) -> None:
    assert _refusal(_CAPABILITY, {"authorization": value}) == "invalid authorization header"


@pytest.mark.parametrize("token", ["other", "the-token2", "THE-TOKEN", "the- token"])
def test_wrong_token(token: str) -> None:
    assert _text(_CAPABILITY, token) == "invalid websocket bearer token"


def test_what_is_a_digest() -> None:
    assert is_digest("0aF" + "1" * 61)
    for text in ("", "0" * 63, "0" * 65, "g" * 64, "0" * 64 + "\n"):
        assert not is_digest(text)


def test_what_is_a_strong_secret() -> None:
    assert is_strong_secret(b"x" * 32)
    assert not is_strong_secret(b"x" * 31)


def test_signed_token() -> None:
    assert _text(_signed(), _jwt({"exp": _NOW})) is None
    ignored = {"exp": _NOW, "iss": "any", "aud": ["any"], "sub": 5, "iat": "x", "jti": []}
    assert _text(_signed(), _jwt(ignored)) is None


@pytest.mark.parametrize(
    "claims",
    [
        {},
        {"exp": None},
        {"exp": "1"},
        {"exp": 2e9},
        {"exp": True},
        {"exp": _NOW, "nbf": "x"},
        {"exp": _NOW, "nbf": 1.5},
        {"exp": _NOW, "iss": 5},
        {"exp": _NOW, "aud": 5},
        {"exp": _NOW, "aud": [5]},
        {"exp": _NOW, "aud": {}},
        [],
        "text",
        None,
    ],
)
def test_claims_of_the_wrong_shape(claims: object) -> None:
    assert _text(_signed(), _jwt(claims)) == "invalid websocket jwt"


@pytest.mark.parametrize(
    "token",
    [
        "x",
        "a.b.c",
        "..",
        _jwt({"exp": _NOW}, secret=b"t" * 32),
        _jwt({"exp": _NOW}, header={"alg": "none"}),
        _jwt({"exp": _NOW}, header={"alg": "HS512"}),
        _jwt({"exp": _NOW}, header={"alg": "hs256"}),
        _jwt({"exp": _NOW}, header={}),
        _jwt({"exp": _NOW}, header=[]),
        _jwt({"exp": _NOW}, header={"alg": "HS256", "crit": ["x"]}),
        _jwt({"exp": _NOW}, header=b"\xff"),
        _jwt({"exp": _NOW}, header=b"[" * 6000),
        _jwt({"exp": _NOW})[:-2],
        _jwt({"exp": _NOW}) + ".x",
    ],
)
def test_tokens_that_are_none(token: str) -> None:
    assert _text(_signed(), token) == "invalid websocket jwt"


def test_expiry_and_start_have_a_tolerance() -> None:
    expired, early = "expired websocket jwt", "websocket jwt is not valid yet"
    assert _text(_signed(), _jwt({"exp": _NOW - 30})) is None
    assert _text(_signed(), _jwt({"exp": _NOW - 31})) == expired
    assert _text(_signed(clock_skew=0), _jwt({"exp": _NOW - 1})) == expired
    assert _text(_signed(), _jwt({"exp": _NOW, "nbf": _NOW + 30})) is None
    assert _text(_signed(), _jwt({"exp": _NOW, "nbf": _NOW + 31})) == early
    assert _text(_signed(), _jwt({"exp": _NOW, "nbf": None})) is None


def test_issuer() -> None:
    wanted = _signed(issuer="us")
    assert _text(wanted, _jwt({"exp": _NOW, "iss": "us"})) is None
    for claims in ({}, {"iss": "them"}, {"iss": None}):
        assert _text(wanted, _jwt({"exp": _NOW} | claims)) == "websocket jwt issuer mismatch"


def test_audience() -> None:
    wanted = _signed(audience="us")
    for audience in ("us", ["us"], ["them", "us"]):
        assert _text(wanted, _jwt({"exp": _NOW, "aud": audience})) is None
    others: list[dict[str, Any]] = [{}, {"aud": "them"}, {"aud": []}, {"aud": ["us2"]}]
    for claims in others:
        assert _text(wanted, _jwt({"exp": _NOW} | claims)) == "websocket jwt audience mismatch"


def test_checks_come_in_the_order_of_the_protocol() -> None:
    wanted = _signed(issuer="us", audience="us")
    bad = {"exp": 0, "nbf": _NOW * 2, "iss": "them", "aud": "them"}
    texts = []
    for name, good in [("exp", _NOW), ("nbf", 0), ("iss", "us"), ("aud", "us")]:
        texts.append(_text(wanted, _jwt(bad)))
        bad[name] = good
    assert texts == [
        "expired websocket jwt",
        "websocket jwt is not valid yet",
        "websocket jwt issuer mismatch",
        "websocket jwt audience mismatch",
    ]
    assert _text(wanted, _jwt(bad)) is None
