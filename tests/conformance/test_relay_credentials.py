"""What executors prove themselves with: sign-ins, an agent's identity, credentials on stdin."""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from jwt.algorithms import RSAAlgorithm

from tests.relay_service import Endpoint, ThreadedRelayService
from tests.support.client import Server, run_command, scaled, server_command, server_environment
from tests.support.relay import ENVIRONMENT, RelayLink, StreamReset, exit_code, start_executor

_KEY = "sk-0123456789abcdef"
_UNAVAILABLE = "Agent Identity authentication is unavailable"


@pytest.fixture
def service() -> Iterator[ThreadedRelayService]:
    with ThreadedRelayService() as running:
        yield running


# ---- stored sign-ins -------------------------------------------------------------------


def _segment(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def _chatgpt(access_token: str) -> dict[str, Any]:
    account = {"chatgpt_account_id": "acc-9", "chatgpt_plan_type": "pro"}
    claims = {"email": "a@example.net", "https://api.openai.com/auth": account}
    tokens = {
        "id_token": f"{_segment({'alg': 'none'})}.{_segment(claims)}.{_segment({})}",
        "access_token": access_token,
        "refresh_token": "refresh",
        "account_id": "acc-9",
    }
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"OPENAI_API_KEY": None, "tokens": tokens, "last_refresh": now}


class _Stored(NamedTuple):
    """What is in the file, beside which variables, and the headers that come of it."""

    content: dict[str, Any]
    variables: dict[str, str]
    authorization: str
    account: str | None


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(_Stored(_chatgpt("access"), {}, "Bearer access", "acc-9"), id="tokens"),
        pytest.param(_Stored({"OPENAI_API_KEY": _KEY}, {}, f"Bearer {_KEY}", None), id="key"),
        pytest.param(
            _Stored(_chatgpt("access"), {"CODEX_API_KEY": _KEY}, f"Bearer {_KEY}", None), id="both"
        ),
    ],
)
def test_stored_sign_in(
    service: ThreadedRelayService, kind: str, folder: Path, row: _Stored
) -> None:
    (folder / "auth.json").write_text(json.dumps(row.content))
    env = {"CODEX_API_KEY": None, "CODEX_HOME": str(folder), **row.variables}
    with start_executor(service, kind=kind, env=env):
        RelayLink(service).close()
    for endpoint in (Endpoint.REGISTER, Endpoint.VALIDATE):
        (request,) = service.requests_to(endpoint)
        assert request.header("authorization") == row.authorization
        assert request.header("chatgpt-account-id") == row.account


# ---- an agent's identity ---------------------------------------------------------------


class _Issuer:
    """The key set and the tasks of an agent."""

    def __init__(self) -> None:
        self.key = rsa.generate_private_key(65537, 2048)
        self.agent = Ed25519PrivateKey.generate()
        self.requests: list[tuple[str, str, Any]] = []
        self.task: tuple[int, Any] = (200, {"task_id": "task-3"})
        self.url = ""

    def token(self, **claims: Any) -> str:
        now = int(time.time())
        private = self.agent.private_bytes(
            serialization.Encoding.DER,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        content = {
            "iss": "https://chatgpt.com/codex-backend/agent-identity",
            "aud": "codex-app-server",
            "iat": now,
            "exp": now + 600,
            "agent_runtime_id": "agent-1",
            "agent_private_key": base64.b64encode(private).decode(),
            "account_id": "acc-9",
            "chatgpt_user_id": "user",
            "email": "a@example.net",
            "plan_type": "pro",
            "chatgpt_account_is_fedramp": False,
        } | claims
        return jwt.encode(content, self.key, "RS256", {"kid": "k1"})

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        self.requests.append((method, path, json.loads(body) if body else None))
        if method == "GET":
            key = json.loads(RSAAlgorithm.to_jwk(self.key.public_key()))
            return 200, {"keys": [key | {"kid": "k1", "alg": "RS256", "use": "sig"}]}
        return self.task

    def checks(self, signature: str, text: str) -> None:
        """Raises unless the agent has signed the text."""
        self.agent.public_key().verify(base64.b64decode(signature), text.encode())


@pytest.fixture
def issuer() -> Iterator[_Issuer]:
    made = _Issuer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(b"")

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers["content-length"])))

        def _answer(self, body: bytes) -> None:
            status, content = made.answer(self.command, self.path, body)
            encoded = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(encoded)))
            self.end_headers()
            self.wfile.write(encoded)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        made.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield made
        finally:
            server.shutdown()
            thread.join()


def _agent_variables(issuer: _Issuer, token: str, keys: str = "/keys") -> dict[str, str]:
    return {
        "CODEX_ACCESS_TOKEN": token,
        "CODEX_AGENT_IDENTITY_JWKS_BASE_URL": issuer.url + keys,
        "CODEX_AGENT_IDENTITY_AUTHAPI_BASE_URL": issuer.url + "/auth",
    }


@pytest.mark.quick
@pytest.mark.parametrize(
    ("keys", "path"),
    [
        ("/keys", "/keys/agent-identities/jwks"),
        ("/backend-api/", "/backend-api/wham/agent-identities/jwks"),
    ],
)
def test_agent_identity(
    service: ThreadedRelayService, kind: str, issuer: _Issuer, keys: str, path: str
) -> None:
    # The flag beats the API key, which `start_executor` gives.
    env = _agent_variables(issuer, issuer.token(), keys)
    with start_executor(service, "--use-agent-identity-auth", kind=kind, env=env):
        RelayLink(service).close()
    (_, asked, _), (method, registered, task) = issuer.requests
    assert asked == path
    assert (method, registered) == ("POST", "/auth/v1/agent/agent-1/task/register")
    assert set(task) == {"timestamp", "signature"}
    issuer.checks(task["signature"], f"agent-1:{task['timestamp']}")
    for endpoint in (Endpoint.REGISTER, Endpoint.VALIDATE):
        (request,) = service.requests_to(endpoint)
        assert request.header("chatgpt-account-id") == "acc-9"
        scheme, _, text = (request.header("authorization") or "").partition(" ")
        assert scheme == "AgentAssertion"
        decoded = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        assertion = json.loads(decoded)
        assert list(assertion) == ["agent_runtime_id", "signature", "task_id", "timestamp"]
        assert json.dumps(assertion, separators=(",", ":")).encode() == decoded
        assert (assertion["agent_runtime_id"], assertion["task_id"]) == ("agent-1", "task-3")
        time.strptime(assertion["timestamp"], "%Y-%m-%dT%H:%M:%SZ")
        signed = f"agent-1:task-3:{assertion['timestamp']}"
        issuer.checks(assertion["signature"], signed)


@pytest.mark.parametrize(
    "claims",
    [{"exp": 1_700_000_000}, {"aud": "other"}, {"iss": "other"}, {"agent_private_key": "AAAA"}],
)
def test_agent_identity_that_is_refused(
    service: ThreadedRelayService, kind: str, issuer: _Issuer, claims: dict[str, Any]
) -> None:
    env = _agent_variables(issuer, issuer.token(**claims))
    flags = ("--remote", service.url, "--environment-id", ENVIRONMENT, "--use-agent-identity-auth")
    ended = run_command(kind, *flags, env=env)
    assert (ended.returncode, ended.stderr) == (1, f"Error: {_UNAVAILABLE}\n")
    assert all(method == "GET" for method, _, _ in issuer.requests)


def test_agent_whose_task_is_refused(
    service: ThreadedRelayService, kind: str, issuer: _Issuer
) -> None:
    issuer.task = (403, {"error": "no"})
    env = _agent_variables(issuer, issuer.token())
    flags = ("--remote", service.url, "--environment-id", ENVIRONMENT, "--use-agent-identity-auth")
    ended = run_command(kind, *flags, env=env)
    assert (ended.returncode, ended.stderr) == (1, f"Error: {_UNAVAILABLE}\n")
    assert len(issuer.requests) == 2


# ---- credentials on stdin --------------------------------------------------------------

_LATER = 4_102_444_800  # the year 2100
_FRAME = "invalid exec-server executor credential frame"


def _line(**members: Any) -> bytes:
    """A line; a member of None is left out."""
    content = {
        "version": 1,
        "environment_id": ENVIRONMENT,
        "token": "token-a",
        "expires_at": _LATER,
    } | members
    return json.dumps({n: v for n, v in content.items() if v is not None}).encode() + b"\n"


_LONG = 16_384 - len(_line(token=""))


@pytest.mark.parametrize(
    ("line", "text"),
    [
        pytest.param(b"", "exec-server executor credential pipe closed", id="nothing"),
        pytest.param(b"hello\n", _FRAME, id="not JSON"),
        pytest.param(b"\n" + _line(), _FRAME, id="blank line"),
        pytest.param(b"[]\n", _FRAME, id="array"),
        pytest.param(_line().rstrip(), _FRAME, id="no line end"),
        pytest.param(_line(version=2), _FRAME, id="version"),
        pytest.param(_line(version="1"), _FRAME, id="version of another type"),
        pytest.param(_line(token=None), _FRAME, id="member missing"),
        pytest.param(_line(more=1), _FRAME, id="member unknown"),
        pytest.param(_line(token=""), _FRAME, id="token empty"),
        pytest.param(_line(token="a b"), _FRAME, id="token with a blank"),
        pytest.param(_line(token="ü"), _FRAME, id="token not ASCII"),
        pytest.param(_line(expires_at=-1), _FRAME, id="time negative"),
        pytest.param(_line(expires_at=4e9), _FRAME, id="time with a fraction"),
        pytest.param(
            _line(expires_at=1_700_000_000),
            "exec-server executor credential is expired",
            id="expired",
        ),
        pytest.param(
            _line(environment_id="env-2"),
            "exec-server executor credential is for a different environment",
            id="another environment",
        ),
        pytest.param(
            _line(token="x" * (_LONG + 1)),
            "exec-server executor credential frame exceeds the size limit",
            id="too long",
        ),
    ],
)
def test_refused_credential(kind: str, line: bytes, text: str) -> None:
    flags = ("--remote", "http://127.0.0.1:9", "--environment-id", ENVIRONMENT)
    ended = _run_with_input(kind, line, *flags, "--executor-credential-stdin")
    assert (ended.returncode, ended.stderr.decode()) == (1, f"Error: {text}\n")


def _run_with_input(kind: str, data: bytes, *flags: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*server_command(kind), *flags],
        env=server_environment(kind),
        input=data,
        capture_output=True,
        timeout=scaled(20),
        check=False,
    )


def _give(executor: Server, line: bytes) -> None:
    assert executor.process.stdin is not None
    executor.process.stdin.write(line)
    executor.process.stdin.flush()


@pytest.fixture
def executor(service: ThreadedRelayService, kind: str) -> Iterator[Server]:
    """One that waits for its first credential."""
    with start_executor(
        service, "--executor-credential-stdin", kind=kind, stdin=subprocess.PIPE, attached=False
    ) as running:
        yield running


def test_credential_for_another_machine_needs_encryption(
    service: ThreadedRelayService, kind: str
) -> None:
    where = ("--remote", "http://registry.example", "--environment-id", ENVIRONMENT)
    flags = (*where, "--executor-credential-stdin")
    with start_executor(
        service, *flags, kind=kind, stdin=subprocess.PIPE, attached=False
    ) as executor:
        # Ours does not wait for a credential that it could not use.
        with contextlib.suppress(BrokenPipeError):
            _give(executor, _line())
        assert exit_code(executor) == 1
        assert executor.stderr() == (
            "Error: environment registry configuration error: remote transport requires https "
            "for non-loopback endpoints\n"
        )


@pytest.mark.parametrize("line", [_line(), _line()[:-1] + b"\r\n", _line(token="x" * _LONG)])
def test_end_of_the_pipe_ends_the_executor(
    service: ThreadedRelayService, executor: Server, line: bytes
) -> None:
    _give(executor, line)
    service.wait_for_executor(ENVIRONMENT)
    assert executor.process.stdin is not None
    executor.process.stdin.close()
    assert exit_code(executor) == 0
    assert executor.stderr() == ""


def _asked(service: ThreadedRelayService) -> list[str | None]:
    """The credentials with which clients were validated."""
    requests = service.requests_to(Endpoint.VALIDATE)
    return [request.header("authorization") for request in requests]


def test_the_newest_credential_counts(service: ThreadedRelayService, executor: Server) -> None:
    _give(executor, _line())
    service.wait_for_executor(ENVIRONMENT)
    (request,) = service.requests_to(Endpoint.REGISTER)
    assert request.header("authorization") == "Bearer token-a"
    RelayLink(service).close()
    _give(executor, _line(token="token-b"))
    # The line and the next client come by different ways.
    deadline = time.monotonic() + scaled(10)
    while _asked(service)[-1] != "Bearer token-b":
        assert time.monotonic() < deadline
        RelayLink(service).close()
    assert _asked(service)[0] == "Bearer token-a"


def test_an_invalid_line_ends_the_executor_at_any_time(
    service: ThreadedRelayService, executor: Server
) -> None:
    _give(executor, _line())
    service.wait_for_executor(ENVIRONMENT)
    _give(executor, b"hello\n")
    assert exit_code(executor) == 1
    assert executor.stderr() == f"Error: {_FRAME}\n"


def test_an_expired_credential_keeps_the_link_and_refuses_clients(
    service: ThreadedRelayService, executor: Server
) -> None:
    expiry = int(time.time()) + 3
    _give(executor, _line(expires_at=expiry))
    service.wait_for_executor(ENVIRONMENT)
    RelayLink(service).close()
    time.sleep(max(0.0, expiry - time.time()))
    with pytest.raises(StreamReset):
        RelayLink(service)
    # Without asking.
    assert len(_asked(service)) == 1
    _give(executor, _line(token="token-b"))
    served = False
    while not served:
        try:
            RelayLink(service).close()
            served = True
        except StreamReset:
            pass
    assert _asked(service)[-1] == "Bearer token-b"
    assert len(service.requests_to(Endpoint.EXECUTOR_SOCKET)) == 1


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        pytest.param(
            401,
            b"token-a is bad",
            "environment registry authentication error: environment registry authentication "
            "failed (401 Unauthorized): response body omitted",
            id="401",
        ),
        pytest.param(
            409,
            {"error": {"code": "token-a", "message": "token-a"}},
            "environment registry request failed (409 Conflict): environment registry executor "
            "registration failed",
            id="code",
        ),
        pytest.param(
            500,
            {"error": {"code": "registration_conflict", "message": "token-a"}},
            "environment registry request failed (500 Internal Server Error, "
            "registration_conflict): environment registry executor registration failed",
            id="known code",
        ),
        pytest.param(
            200,
            b"{}",
            "exec-server protocol error: invalid environment registry executor registration "
            "response",
            id="malformed",
        ),
        pytest.param(
            200,
            {
                "environment_id": ENVIRONMENT,
                "security_profile": "noise_hybrid_ik_v1",
                "executor_registration_id": "reg",
                "url": "ws://127.0.0.1:9/?token-a",
            },
            "exec-server protocol error: invalid environment registry executor registration "
            "response",
            id="echo",
        ),
    ],
)
def test_nothing_that_may_repeat_the_credential_is_shown(
    service: ThreadedRelayService, executor: Server, status: int, body: Any, text: str
) -> None:
    service.faults.http.answer(Endpoint.REGISTER, status, body)
    _give(executor, _line())
    assert exit_code(executor) == 1
    assert executor.stderr() == f"Error: {text}\n"


def test_nothing_that_came_instead_of_an_answer_is_shown(
    service: ThreadedRelayService, executor: Server
) -> None:
    service.faults.http.garbage(Endpoint.REGISTER)
    _give(executor, _line())
    assert exit_code(executor) == 1
    assert "this is no HTTP" not in executor.stderr()
