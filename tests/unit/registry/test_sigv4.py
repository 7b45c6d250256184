"""Signatures, made by botocore and computed here once more by the book."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import sys
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import pytest

from exec_server.errors import StartupError
from exec_server.registry.sigv4 import SigV4

_TASKS = cast(Any, None)  # this credential has none

_KEY_ID = "AKIDEXAMPLE"
_SECRET = "wJalrXUtnFEMI"
_BODY = b'{"transport":"direct_jsonrpc_v1"}'
_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^,]+), SignedHeaders=([^,]+), Signature=([0-9a-f]{64})"
)


def _signature(
    method: str, url: str, body: bytes, headers: dict[str, str], *, scope: str, signed: str
) -> str:
    """The signature that a request must have."""
    parts = urlsplit(url)
    lines = [f"{name}:{headers[name]}\n" for name in signed.split(";")]
    digest = hashlib.sha256(body).hexdigest()
    request = [method, parts.path or "/", parts.query, "".join(lines), signed, digest]
    hashed = hashlib.sha256("\n".join(request).encode()).hexdigest()
    text = "\n".join(["AWS4-HMAC-SHA256", headers["x-amz-date"], scope, hashed])
    key = b"AWS4" + _SECRET.encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.digest(key, text.encode(), "sha256").hex()


def test_the_reference_signs_like_the_book() -> None:
    url = "http://127.0.0.1:40267/cloud/environment/env-1/direct/register"
    headers = {
        "content-type": "application/json",
        "host": "127.0.0.1:40267",
        "x-amz-date": "20261116T032851Z",
    }
    scope = "20261116/eu-west-1/execute-api/aws4_request"
    signed = "content-type;host;x-amz-date"
    assert _signature("POST", url, _BODY, headers, scope=scope, signed=signed) == (
        "84ce383f796184a8b6c4c7376592e01b2ae5435345a4d90f00299274539d7377"
    )


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Credentials of nobody, and no files of this machine's user."""
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", _KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", _SECRET)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


def _headers(signer: SigV4, method: str, url: str, body: bytes) -> dict[str, str]:
    async def run() -> list[tuple[str, str]]:
        await signer.ready(_TASKS)
        return await signer.headers(method, url, body)

    found = asyncio.run(run())
    assert len(dict(found)) == len(found)
    return dict(found)


def _check(
    headers: dict[str, str],
    method: str,
    url: str,
    body: bytes,
    *,
    host: str,
    service: str = "execute-api",
) -> str:
    """That the signature is right; returns the names of what is signed."""
    match = _AUTHORIZATION.fullmatch(headers["authorization"])
    assert match is not None
    credential, signed, signature = match.groups()
    date = headers["x-amz-date"]
    scope = f"{date[:8]}/eu-west-1/{service}/aws4_request"
    assert credential == f"{_KEY_ID}/{scope}"
    sent = headers | {"host": host, "content-type": "application/json"}
    assert signature == _signature(method, url, body, sent, scope=scope, signed=signed)
    return signed


def test_signed_request() -> None:
    url = "https://api.example/prod/cloud/environment/env-1/direct/register"
    headers = _headers(SigV4({}, region="eu-west-1"), "POST", url, _BODY)
    signed = _check(headers, "POST", url, _BODY, host="api.example")
    assert signed == "content-type;host;x-amz-date"
    assert set(headers) == {"authorization", "x-amz-date"}


def test_signed_upgrade() -> None:
    url = "wss://api.example:443/x?a=1&b=2"
    signer = SigV4({"AWS_REGION": "eu-west-1"}, service="other")
    headers = _headers(signer, "GET", url, b"")
    assert (
        _check(headers, "GET", url, b"", host="api.example", service="other") == "host;x-amz-date"
    )


def test_session_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "session")
    url = "http://127.0.0.1:9/x"
    signer = SigV4({"AWS_DEFAULT_REGION": "eu-west-1"})
    headers = _headers(signer, "POST", url, b"{}")
    signed = _check(headers, "POST", url, b"{}", host="127.0.0.1:9")
    assert signed == "content-type;host;x-amz-date;x-amz-security-token"
    assert headers["x-amz-security-token"] == "session"


def test_credentials_stay_when_the_environment_forgets_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signer = SigV4({}, region="eu-west-1")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert _KEY_ID in _headers(signer, "GET", "wss://x", b"")["authorization"]


def test_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    (tmp_path / "config").write_text("[profile p]\nregion = eu-west-1\n")
    (tmp_path / "credentials").write_text(
        f"[p]\naws_access_key_id = {_KEY_ID}\naws_secret_access_key = {_SECRET}\n"
    )
    headers = _headers(SigV4({}, profile="p"), "GET", "wss://x/y", b"")
    _check(headers, "GET", "wss://x/y", b"", host="x")


def test_no_region() -> None:
    with pytest.raises(StartupError) as failed:
        SigV4({})
    assert str(failed.value) == "AWS SDK config did not resolve a region"


def test_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    for profile in (None, "missing"):
        with pytest.raises(StartupError, match="failed to load AWS credentials"):
            SigV4({}, region="eu-west-1", profile=profile)


def test_credentials_that_cannot_be_fetched(tmp_path: Path) -> None:
    role = "arn:aws:iam::123456789012:role/x"
    (tmp_path / "config").write_text(
        f"[profile p]\nregion = eu-west-1\nrole_arn = {role}\n"
        f"web_identity_token_file = {tmp_path / 'token'}\n"
    )
    signer = SigV4({}, profile="p")
    with pytest.raises(StartupError, match="failed to load AWS credentials"):
        asyncio.run(signer.ready(_TASKS))


def test_missing_profile_without_a_region() -> None:
    with pytest.raises(StartupError, match="failed to load AWS credentials"):
        SigV4({}, profile="missing")


def test_no_botocore(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "botocore"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "botocore", None)
    with pytest.raises(StartupError, match=r"pip install '\.\[aws\]'"):
        SigV4({}, region="eu-west-1")
