"""Executors that cannot register: exit codes and the texts for the user."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.relay_service import Endpoint, ThreadedRelayService
from tests.support.client import run_command
from tests.support.relay import ENVIRONMENT

_KEY = "sk-0123456789abcdef"
_GOOD = {
    "environment_id": ENVIRONMENT,
    "security_profile": "noise_hybrid_ik_v1",
    "executor_registration_id": "reg",
    "url": "ws://127.0.0.1:9/",
}
_PROTOCOL_ERROR = "exec-server protocol error: environment registry returned"
_REQUEST_FAILED = "environment registry request failed"
_DENIED = "environment registry authentication error: environment registry authentication failed"
_MALFORMED = "failed to serialize or deserialize exec-server JSON: "
_NO_CREDENTIAL = (
    "remote exec-server registration requires ChatGPT authentication or API key authentication; "
    "run `codex login` or set CODEX_API_KEY"
)
_RESTRICTED = (
    "remote exec-server API-key authentication is restricted to HTTPS openai.com and openai.org "
    "hosts and subdomains or loopback hosts"
)
_UNAVAILABLE = "Agent Identity authentication is unavailable"


@pytest.fixture(scope="module")
def shared() -> Iterator[ThreadedRelayService]:
    """A registry for executors that never get far."""
    with ThreadedRelayService() as running:
        yield running


# ---- refusals --------------------------------------------------------------------------

# Status, body, and what follows on "Error: "; of texts that end in "…" only the beginning is
# the same for both, because the rest is worded by a parser.
_ANSWERS: list[tuple[int, Any, str]] = [
    (400, b"", f"{_REQUEST_FAILED} (400 Bad Request): empty or malformed error body"),
    (401, b"", f"{_DENIED} (401 Unauthorized): empty error body"),
    (
        401,
        {"error": {"code": "c", "message": "no such key"}},
        f"{_DENIED} (401 Unauthorized): no such key",
    ),
    (403, b"  go away \n", f"{_DENIED} (403 Forbidden): go away"),
    (404, {"detail": 1}, f'{_REQUEST_FAILED} (404 Not Found): {{"detail": 1}}'),
    (
        409,
        {"error": {"code": "taken", "message": "in use"}},
        f"{_REQUEST_FAILED} (409 Conflict, taken): in use",
    ),
    (
        409,
        {"error": {"code": "taken"}},
        f'{_REQUEST_FAILED} (409 Conflict, taken): {{"error": {{"code": "taken"}}}}',
    ),
    (429, b"", f"{_REQUEST_FAILED} (429 Too Many Requests): empty or malformed error body"),
    (500, b"x" * 5000, f"{_REQUEST_FAILED} (500 Internal Server Error): {'x' * 4096}"),
    (
        502,
        {"error": {"code": "registration_conflict", "message": "m"}},
        f"{_REQUEST_FAILED} (502 Bad Gateway, registration_conflict): m",
    ),
    (
        503,
        {"error": {"code": "authentication_service_unavailable", "message": "m"}},
        f"{_REQUEST_FAILED} (503 Service Unavailable, authentication_service_unavailable): m",
    ),
    (302, b"", f"{_REQUEST_FAILED} (302 Found): empty or malformed error body"),
    (599, b"", f"{_REQUEST_FAILED} (599 <unknown status code>): empty or malformed error body"),
    (204, b"", f"{_MALFORMED}…"),
    (200, b"hello", f"{_MALFORMED}…"),
    (200, [], f"{_MALFORMED}…"),
    (200, {n: v for n, v in _GOOD.items() if n != "url"}, f"{_MALFORMED}…"),
    (200, _GOOD | {"executor_registration_id": None}, f"{_MALFORMED}…"),
    (200, _GOOD | {"environment_id": "env-2"}, f"{_PROTOCOL_ERROR} a different environment id"),
    (
        200,
        _GOOD | {"security_profile": "none"},
        f"{_PROTOCOL_ERROR} unsupported security profile `none`",
    ),
]


def _is_error(printed: str, text: str) -> bool:
    if text.endswith("…"):
        return printed.startswith(f"Error: {text[:-1]}")
    return printed == f"Error: {text}\n"


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [pytest.param(*row, id=f"{row[0]}-{number}") for number, row in enumerate(_ANSWERS)],
)
def test_refused_registration(
    shared: ThreadedRelayService, kind: str, status: int, body: Any, text: str
) -> None:
    before = len(shared.requests)
    headers = [("location", shared.url)] if status == 302 else []
    shared.faults.http.answer(Endpoint.REGISTER, status, body, headers=headers)
    flags = ("--remote", shared.url, "--environment-id", ENVIRONMENT)
    ended = run_command(kind, *flags, env={"CODEX_API_KEY": _KEY})
    assert (ended.returncode, ended.stdout) == (1, "")
    assert _is_error(ended.stderr, text), ended.stderr
    # Asked once, and no redirection followed.
    assert len(shared.requests) == before + 1


@pytest.mark.quick
def test_no_registry_there(kind: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{holder.getsockname()[1]}"
        flags = ("--remote", url, "--environment-id", ENVIRONMENT)
        ended = run_command(kind, *flags, env={"CODEX_API_KEY": _KEY})
    what = f"error sending request for url ({url}/cloud/environment/env-1/register)"
    assert (ended.returncode, ended.stderr) == (
        1,
        f"Error: environment registry request failed: {what}\n\nCaused by:\n    0: {what}\n"
        "    1: client error (Connect)\n    2: tcp connect error\n"
        "    3: Connection refused (os error 111)\n",
    )


@pytest.mark.parametrize("fault", ["garbage", "cut"])
def test_answer_that_is_none(shared: ThreadedRelayService, kind: str, fault: str) -> None:
    getattr(shared.faults.http, fault)(Endpoint.REGISTER)
    flags = ("--remote", shared.url, "--environment-id", ENVIRONMENT)
    ended = run_command(kind, *flags, env={"CODEX_API_KEY": _KEY})
    what = {
        "garbage": f"error sending request for url ({shared.url}/cloud/environment/env-1/register)",
        "cut": "error decoding response body",
    }[fault]
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"Error: {_REQUEST_FAILED}: {what}\n\nCaused by:\n    0: {what}")
    assert "this is no HTTP" not in ended.stderr


@pytest.mark.parametrize("tail", ["/v1/agents/api", "/v1/agents/api?team=a&x=%2F", "/v1/a%20pi/"])
def test_a_remote_url_is_kept_unchanged(shared: ThreadedRelayService, kind: str, tail: str) -> None:
    """What the Agents API calls `remote_url`: only a last slash is left out."""
    flags = ("--remote", f"{shared.url}{tail}", "--environment-id", "ccarenv_1")
    run_command(kind, *flags, env={"CODEX_API_KEY": _KEY})
    request = shared.requests[-1]
    assert request.target == f"{tail.rstrip('/')}/cloud/environment/ccarenv_1/register"
    assert request.header("authorization") == f"Bearer {_KEY}"


class _Configuration(NamedTuple):
    """Arguments, in which {} stands for a registry, and what comes of them."""

    flags: list[str]
    variables: dict[str, str]
    code: int
    text: str


_CONFIGURATIONS = [
    _Configuration(["--remote", "{}"], {}, 1, _NO_CREDENTIAL),
    _Configuration(["--remote", "{}"], {"CODEX_API_KEY": " "}, 1, _NO_CREDENTIAL),
    _Configuration(["--remote", "{}"], {"OPENAI_API_KEY": _KEY}, 1, _NO_CREDENTIAL),
    _Configuration(["--remote", "http://api.openai.com"], {"CODEX_API_KEY": _KEY}, 1, _RESTRICTED),
    _Configuration(
        ["--remote", "http://127.0.0.1.nip.io"], {"CODEX_API_KEY": _KEY}, 1, _RESTRICTED
    ),
    # Ours adds how to allow it.
    _Configuration(
        ["--remote", "https://registry.example"], {"CODEX_API_KEY": _KEY}, 1, f"{_RESTRICTED}…"
    ),
    _Configuration(
        ["--remote", "https://notopenai.com"], {"CODEX_API_KEY": _KEY}, 1, f"{_RESTRICTED}…"
    ),
    _Configuration(
        ["--remote", ""],
        {"CODEX_API_KEY": _KEY},
        1,
        "invalid remote exec-server registration URL: relative URL without a base",
    ),
    _Configuration(
        ["--remote", "{}", "--environment-id", "  "],
        {"CODEX_API_KEY": _KEY},
        1,
        "environment registry configuration error: environment id is required for remote "
        "exec-server registration",
    ),
    _Configuration(
        ["--remote", "{}", "--use-agent-identity-auth"],
        {"CODEX_API_KEY": _KEY},
        1,
        "CODEX_ACCESS_TOKEN is required when --use-agent-identity-auth is set",
    ),
    _Configuration(
        ["--remote", "{}", "--use-agent-identity-auth"],
        {"CODEX_ACCESS_TOKEN": "x", "CODEX_AGENT_IDENTITY_JWKS_BASE_URL": "http://127.0.0.1:9"},
        1,
        _UNAVAILABLE,
    ),
    _Configuration(
        ["--remote", "{}", "--aws-sigv4"], {}, 1, "--aws-sigv4 requires --remote-transport direct"
    ),
    _Configuration(["--remote", "{}", "--remote-transport", "direct"], {}, 2, "…"),
    _Configuration(["--remote", "{}", "--remote-transport", "pigeon"], {}, 2, "…"),
    _Configuration(["--remote", "{}", "--listen", "stdio"], {}, 2, "…"),
    _Configuration(
        ["--remote", "{}", "--use-agent-identity-auth", "--executor-credential-stdin"], {}, 2, "…"
    ),
    _Configuration(
        [
            *("--remote", "{}", "--remote-transport", "direct"),
            *("--aws-sigv4", "--executor-credential-stdin"),
        ],
        {},
        2,
        "…",
    ),
]


@pytest.mark.parametrize("row", _CONFIGURATIONS, ids=lambda row: " ".join(row.flags) or "none")
def test_refused_configuration(
    shared: ThreadedRelayService, kind: str, row: _Configuration
) -> None:
    before = len(shared.requests)
    words = [shared.url if word == "{}" else word for word in row.flags]
    if "--environment-id" not in words:
        words += ["--environment-id", ENVIRONMENT]
    ended = run_command(kind, *words, env=row.variables)
    assert (ended.returncode, ended.stdout) == (row.code, "")
    # Usage errors are worded by the argument parser; the others are the executor's own.
    assert row.code == 2 or _is_error(ended.stderr, row.text), ended.stderr
    assert len(shared.requests) == before


def test_an_id_is_needed(kind: str) -> None:
    ended = run_command(kind, "--remote", "http://127.0.0.1:9", env={"CODEX_API_KEY": _KEY})
    assert ended.returncode == 2
    assert "--environment-id" in ended.stderr
