"""Bearer authentication of the upgrade: both modes, the order of checks, the texts."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import HttpReply, Server, start_server, upgrade_request

pytestmark = pytest.mark.quick

_TOKEN = "correct horse-battery"
_SECRET = "0123456789abcdef0123456789abcdef"
_FAR_FUTURE = 4102444800


def _b64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _jwt(claims: Any, *, secret: str = _SECRET, algorithm: str = "HS256", **header: Any) -> str:
    head = _b64url(json.dumps({"alg": algorithm, "typ": "JWT"} | header).encode())
    body = _b64url(json.dumps(claims).encode())
    digest = {"HS256": hashlib.sha256, "HS512": hashlib.sha512}.get(algorithm, hashlib.sha256)
    signature = hmac.new(secret.encode(), f"{head}.{body}".encode(), digest).digest()
    return f"{head}.{body}.{_b64url(signature)}"


def _ask(server: Server, *headers: tuple[str, str]) -> HttpReply:
    return server.http(upgrade_request("/", headers))


def _refused(server: Server, text: str, *headers: tuple[str, str]) -> None:
    reply = _ask(server, *headers)
    assert (reply.status, reply.body.decode()) == (401, text)
    assert reply.header("content-type") == "text/plain; charset=utf-8"


@pytest.fixture(scope="module")
def guarded(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that asks for a capability token, named by a relative path."""
    folder = tmp_path_factory.mktemp("token")
    (folder / "token").write_text(f"  {_TOKEN}\n")
    flags = ("--ws-auth", "capability-token", "--ws-token-file", "token")
    with start_server(kind, *flags, cwd=folder) as running:
        yield running


@pytest.fixture(scope="module")
def signed(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that asks for signed tokens of one issuer and audience."""
    secret = tmp_path_factory.mktemp("secret") / "secret"
    secret.write_text(f"\n{_SECRET}\n")
    flags = ("--ws-auth", "signed-bearer-token", "--ws-shared-secret-file", str(secret))
    expected = ("--ws-issuer", " me ", "--ws-audience", "here", "--ws-max-clock-skew-seconds", "5")
    with start_server(kind, *flags, *expected) as running:
        yield running


@pytest.mark.parametrize("value", [f"Bearer {_TOKEN}", f"bearer {_TOKEN}", f"BEARER    {_TOKEN}  "])
def test_right_token(guarded: Server, value: str) -> None:
    assert _ask(guarded, ("Authorization", value)).status == 101


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("Bearer wrong", "invalid websocket bearer token"),
        (f"Bearer {_TOKEN}x", "invalid websocket bearer token"),
        ("Bearer", "invalid authorization header"),
        ("Bearer ", "invalid authorization header"),
        (f"Basic {_TOKEN}", "invalid authorization header"),
        (_TOKEN, "invalid authorization header"),
        ("", "invalid authorization header"),
        ("Bearer schlüssel", "invalid authorization header"),
    ],
)
def test_wrong_token(guarded: Server, value: str, text: str) -> None:
    _refused(guarded, text, ("Authorization", value))


def test_missing_token(guarded: Server) -> None:
    _refused(guarded, "missing websocket bearer token")
    reply = guarded.http(upgrade_request("/?token=correct"))
    assert reply.status == 401


def test_first_of_two_headers_counts(guarded: Server) -> None:
    good, bad = ("Authorization", f"Bearer {_TOKEN}"), ("Authorization", "Bearer no")
    assert _ask(guarded, good, bad).status == 101
    assert _ask(guarded, bad, good).status == 401


def test_other_checks_come_first(guarded: Server) -> None:
    assert guarded.http(b"GET /readyz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n").status == 200
    assert guarded.http(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n").status == 400
    assert guarded.http(upgrade_request("/other")).status == 404
    assert _ask(guarded, ("Origin", "x"), ("Authorization", f"Bearer {_TOKEN}")).status == 403


def test_digest_of_a_token(kind: str) -> None:
    digest = hashlib.sha256(_TOKEN.encode()).hexdigest().upper()
    flags = ("--ws-auth", "capability-token", "--ws-token-sha256", digest)
    with start_server(kind, *flags) as server:
        assert _ask(server, ("Authorization", f"Bearer {_TOKEN}")).status == 101
        _refused(server, "invalid websocket bearer token", ("Authorization", "Bearer x"))
        with server.connect(headers=[("Authorization", f"Bearer {_TOKEN}")]) as client:
            assert client.call("environment/status") == {"status": "ready"}


def _claims(**changes: Any) -> dict[str, Any]:
    claims = {"exp": _FAR_FUTURE, "iss": "me", "aud": "here"} | changes
    return {name: value for name, value in claims.items() if value is not ...}


@pytest.mark.parametrize(
    ("claims", "from_now"),
    [
        ({}, {}),
        ({"aud": ["there", "here"]}, {}),
        ({"sub": "anyone", "iat": "not checked"}, {}),
        ({}, {"nbf": -10}),
        # Both are wrong by less than the five seconds of tolerance.
        ({}, {"exp": -2}),
        ({}, {"nbf": 3}),
    ],
)
def test_good_signed_token(
    signed: Server, claims: dict[str, Any], from_now: dict[str, int]
) -> None:
    times = {name: int(time.time()) + seconds for name, seconds in from_now.items()}
    reply = _ask(signed, ("Authorization", f"Bearer {_jwt(_claims(**claims, **times))}"))
    assert (reply.status, reply.body) == (101, b"")


@pytest.mark.parametrize(
    ("token", "text"),
    [
        ("x", "invalid websocket jwt"),
        ("a.b.c", "invalid websocket jwt"),
        (_jwt(_claims(), secret="another secret of thirty-two by."), "invalid websocket jwt"),
        (_jwt(_claims(), algorithm="HS512"), "invalid websocket jwt"),
        (_jwt(_claims(), algorithm="none"), "invalid websocket jwt"),
        (_jwt(_claims(exp=...)), "invalid websocket jwt"),
        (_jwt(_claims(exp="soon")), "invalid websocket jwt"),
        (_jwt(_claims(exp=1000.5)), "invalid websocket jwt"),
        (_jwt(_claims(nbf="soon")), "invalid websocket jwt"),
        (_jwt([1]), "invalid websocket jwt"),
        (_jwt(_claims(exp=1000)), "expired websocket jwt"),
        (_jwt(_claims(exp=1000, iss="x")), "expired websocket jwt"),
        (_jwt(_claims(nbf=_FAR_FUTURE)), "websocket jwt is not valid yet"),
        (_jwt(_claims(iss="you")), "websocket jwt issuer mismatch"),
        (_jwt(_claims(iss=...)), "websocket jwt issuer mismatch"),
        (_jwt(_claims(iss="you", aud="x")), "websocket jwt issuer mismatch"),
        (_jwt(_claims(aud="there")), "websocket jwt audience mismatch"),
        (_jwt(_claims(aud=[])), "websocket jwt audience mismatch"),
        (_jwt(_claims(aud=...)), "websocket jwt audience mismatch"),
    ],
)
def test_bad_signed_token(signed: Server, token: str, text: str) -> None:
    _refused(signed, text, ("Authorization", f"Bearer {token}"))


def test_issuer_and_audience_matter_only_when_set(kind: str, folder: Path) -> None:
    (folder / "secret").write_text(_SECRET)
    flags = ("--ws-auth", "signed-bearer-token", "--ws-shared-secret-file", "secret")
    with start_server(kind, *flags, "--ws-issuer", " ", cwd=folder) as server:
        token = _jwt({"exp": int(time.time()) + 60, "iss": "whoever", "aud": ["whatever"]})
        assert _ask(server, ("Authorization", f"Bearer {token}")).status == 101
        _refused(server, "missing websocket bearer token")
