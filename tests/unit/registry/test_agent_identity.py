"""The agent's identity: a token made here, a key set and a task from a server on loopback."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from typing import Any, cast

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from jwt.algorithms import RSAAlgorithm
from tests.support.http_server import Answer, HttpServer, answer, hang_up, serving

from exec_server.errors import StartupError
from exec_server.registry import agent_identity
from exec_server.registry.agent_identity import AgentIdentity, key_set_url
from exec_server.registry.http import HttpClient

_TASKS = cast(Any, None)  # this credential has none

_ISSUER_KEY = rsa.generate_private_key(65537, 2048)
_KEY_SET = {"keys": [json.loads(RSAAlgorithm.to_jwk(_ISSUER_KEY.public_key())) | {"kid": "k1"}]}
# The key of the sealed box that the reference has opened.
_AGENT_KEY = Ed25519PrivateKey.from_private_bytes(
    bytes.fromhex("ac7d335e5b0c236d25598c99dfa63933921cc1d19fd4d7ecf20ef4b92ec17a9f")
)
_SEALED = "pz/feszVMgWCjgwQaEhOSTFE+DlQNoUJtaRd7T2G6kIVZHh/oW0nw/dAO6hX4Cx+s2XK7V/mTtaYicI="
_NOW = 1_700_000_000
_TIMESTAMP = "2023-11-14T22:13:20Z"


def _pkcs8(key: Any) -> str:
    return base64.b64encode(
        key.private_bytes(
            serialization.Encoding.DER,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    ).decode()


def _token(
    *, key: Any = _ISSUER_KEY, algorithm: str = "RS256", kid: str | None = "k1", **claims: Any
) -> str:
    now = int(time.time())
    everything = {
        "iss": "https://chatgpt.com/codex-backend/agent-identity",
        "aud": "codex-app-server",
        "iat": now,
        "exp": now + 600,
        "agent_runtime_id": "agent/1",
        "agent_private_key": _pkcs8(_AGENT_KEY),
        "account_id": "acc-9",
        "chatgpt_user_id": "user",
        "plan_type": "pro",
        "chatgpt_account_is_fedramp": False,
    } | claims
    kept = {name: value for name, value in everything.items() if value is not None}
    return jwt.encode(kept, key, algorithm, {"kid": kid} if kid else None)


def _introduce(token: str, *answers: Answer) -> tuple[list[tuple[str, str]] | str, HttpServer]:
    """The headers of a request, or the error; and what was asked for them."""

    async def run() -> tuple[list[tuple[str, str]] | str, HttpServer]:
        http = HttpClient()
        try:
            async with serving(*answers) as server:
                environ = {
                    "CODEX_AGENT_IDENTITY_JWKS_BASE_URL": server.url + "/keys/",
                    "CODEX_AGENT_IDENTITY_AUTHAPI_BASE_URL": server.url + "/auth/",
                }
                agent = AgentIdentity(token, http, environ, lambda: _NOW)
                try:
                    await agent.ready(_TASKS)
                except StartupError as error:
                    return str(error), server
                return await agent.headers("POST", "http://x", b""), server
        finally:
            await http.close()

    return asyncio.run(run())


def _keys() -> bytes:
    return answer(200, _KEY_SET)


def _verify(signature: str, text: str) -> None:
    _AGENT_KEY.public_key().verify(base64.b64decode(signature), text.encode())


def test_assertion() -> None:
    headers, server = _introduce(_token(), _keys(), answer(200, {"task_id": "task-1"}))
    assert [request.line for request in server.requests] == [
        "GET /keys/agent-identities/jwks HTTP/1.1",
        "POST /auth/v1/agent/agent%2F1/task/register HTTP/1.1",
    ]
    task = json.loads(server.requests[1].body)
    assert task["timestamp"] == _TIMESTAMP
    _verify(task["signature"], f"agent/1:{_TIMESTAMP}")

    assert isinstance(headers, list)
    (name, value), account = headers
    assert (name, account) == ("authorization", ("chatgpt-account-id", "acc-9"))
    scheme, _, text = value.partition(" ")
    assert scheme == "AgentAssertion"
    assert "=" not in text
    content = base64.urlsafe_b64decode(text + "===")
    assertion = json.loads(content)
    assert list(assertion) == ["agent_runtime_id", "signature", "task_id", "timestamp"]
    assert b" " not in content
    _verify(assertion["signature"], f"agent/1:task-1:{_TIMESTAMP}")


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ({"taskId": "task-2"}, "task-2"),
        ({"encrypted_task_id": _SEALED}, "task-sealed"),
        ({"encryptedTaskId": _SEALED}, "task-sealed"),
    ],
)
def test_spellings_of_the_task(task: dict[str, str], expected: str) -> None:
    headers, _ = _introduce(_token(), _keys(), answer(200, task))
    assert isinstance(headers, list)
    text = headers[0][1].partition(" ")[2]
    assert json.loads(base64.urlsafe_b64decode(text + "==="))["task_id"] == expected


def test_fedramp_account() -> None:
    token = _token(chatgpt_account_is_fedramp=True)
    headers, _ = _introduce(token, _keys(), answer(200, {"task_id": "t"}))
    assert headers[-1] == ("X-OpenAI-Fedramp", "true")


def test_clocks_may_differ_a_little() -> None:
    token = _token(exp=int(time.time()) - 30)
    headers, _ = _introduce(token, _keys(), answer(200, {"task_id": "t"}))
    assert isinstance(headers, list)


_UNAVAILABLE = "Agent Identity authentication is unavailable"


@pytest.mark.parametrize(
    "token",
    [
        "x",
        "a.b.c",
        _token(kid=None),
        _token(kid="k2"),
        _token(key="s" * 40, algorithm="HS256"),
        _token(key=rsa.generate_private_key(65537, 2048)),
        _token(exp=int(time.time()) - 1000),
        _token(aud="other"),
        _token(iss="other"),
        _token(agent_private_key="xx"),
        _token(agent_private_key=_pkcs8(_ISSUER_KEY)),
        *(
            _token(**cast(dict[str, Any], {name: None}))
            for name in ("iss", "aud", "iat", "exp", "agent_runtime_id", "agent_private_key")
        ),
        *(
            _token(**cast(dict[str, Any], {name: None}))
            for name in ("account_id", "chatgpt_user_id", "plan_type", "chatgpt_account_is_fedramp")
        ),
    ],
)
def test_tokens_that_are_refused(token: str) -> None:
    error, server = _introduce(token, _keys(), answer(200, {"task_id": "t"}))
    assert error == _UNAVAILABLE
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "keys",
    [
        answer(500),
        answer(302, b"", "location: /x"),
        answer(200, b"nope"),
        answer(200, b"[]"),
        answer(200, b"{}"),
        answer(200, b'{"keys": [5]}'),
        answer(200, b'{"keys": []}'),
        answer(200, b"\xff"),
        answer(200, b"[" * 200_000),
        hang_up,
    ],
)
def test_key_sets_that_are_none(keys: Answer) -> None:
    assert _introduce(_token(), keys)[0] == _UNAVAILABLE


@pytest.mark.parametrize(
    ("task", "requests"),
    [
        (answer(400), 1),
        (answer(401), 1),
        (answer(302, b"", "location: /x"), 1),
        (answer(200, b"{}"), 1),
        (answer(200, b"x"), 1),
        (answer(200, {"encrypted_task_id": "AAAA"}), 1),
        (answer(200, b'{"more": ' + b"[" * 200_000), 1),
        (answer(429), 3),
        (answer(503), 3),
        (hang_up, 3),
    ],
)
def test_task_that_is_refused(monkeypatch: pytest.MonkeyPatch, task: Answer, requests: int) -> None:
    monkeypatch.setattr(agent_identity, "RETRY_SECONDS", 0.0)
    error, server = _introduce(_token(), _keys(), task)
    assert error == _UNAVAILABLE
    # A connection that was kept and has died is replaced, which is a request more.
    posts = [request for request in server.requests if request.line.startswith("POST")]
    assert len(posts) == requests + (task is hang_up)


def test_task_after_a_busy_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_identity, "RETRY_SECONDS", 0.0)
    headers, server = _introduce(_token(), _keys(), answer(500), answer(200, {"task_id": "t"}))
    assert isinstance(headers, list)
    assert len(server.requests) == 3


def test_where_the_keys_are() -> None:
    assert (
        key_set_url("https://x/backend-api/") == "https://x/backend-api/wham/agent-identities/jwks"
    )
    assert key_set_url("https://x/codex") == "https://x/codex/agent-identities/jwks"


def test_the_log_has_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    token = _token(aud="other")
    _introduce(token, _keys())
    assert "InvalidAudienceError" in caplog.text
    assert token not in caplog.text
