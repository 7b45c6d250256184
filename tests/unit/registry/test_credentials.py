"""Which credential is chosen, and what it says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from exec_server.errors import StartupError
from exec_server.host.interpreter import SECRET_NAMES
from exec_server.registry.agent_identity import AgentIdentity
from exec_server.registry.credentials import (
    ApiKey,
    AuthOptions,
    Bearer,
    ClientToken,
    choose_credential,
)
from exec_server.registry.destination import Credential, Destinations, check_destination
from exec_server.registry.http import HttpClient
from exec_server.registry.sign_in import StoredSignIn
from exec_server.registry.sigv4 import SigV4
from exec_server.registry.stdin_credential import StdinCredential

_TASKS = cast(Any, None)  # this credential has none


def _choose(environ: dict[str, str], **options: bool | str) -> Credential:
    chosen = AuthOptions(**options)  # type: ignore[arg-type]
    environ = {"HOME": "/nonexistent"} | environ
    return choose_credential(chosen, environ, environment_id="env-1", http=HttpClient())


def _refusal(environ: dict[str, str], **options: bool) -> str:
    with pytest.raises(StartupError) as refused:
        _choose(environ, **options)
    return str(refused.value)


def _headers(credential: Credential) -> list[tuple[str, str]]:
    asyncio.run(credential.ready(_TASKS))
    return asyncio.run(credential.headers("POST", "http://localhost", b""))


_ALL = {
    "EXEC_SERVER_API_KEY": "ours",
    "CODEX_API_KEY": "theirs",
    "CODEX_EXEC_SERVER_REMOTE_BEARER_TOKEN": "bearer",
    "CODEX_ACCESS_TOKEN": "agent",
    "AWS_REGION": "eu-west-1",
}


def _without(*names: str) -> dict[str, str]:
    return {name: value for name, value in _ALL.items() if name not in names}


def test_flags_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert isinstance(_choose(_ALL, use_agent_identity_auth=True), AgentIdentity)
    assert isinstance(_choose(_ALL, aws_sigv4=True), SigV4)


@pytest.mark.parametrize(
    ("flag", "destinations"),
    [
        ("--executor-credential-stdin", Destinations.ENCRYPTED),
        ("--registration-bearer-stdin", Destinations.ENCRYPTED),
        ("--chatgpt-token-stdin", Destinations.HTTPS),
    ],
)
def test_stdin_comes_first(flag: str, destinations: Destinations) -> None:
    credential = _choose(_ALL, stdin_flag=flag)
    assert isinstance(credential, StdinCredential)
    assert credential.destinations is destinations
    assert credential.hides_responses


def test_order_of_the_variables(tmp_path: Path) -> None:
    (tmp_path / "auth.json").write_text('{"OPENAI_API_KEY": "stored"}')
    environ = _ALL | {"CODEX_HOME": str(tmp_path)}
    found = []
    for name in list(_ALL)[:3]:
        credential = _choose(environ)
        found.append((type(credential), _headers(credential)[0][1]))
        del environ[name]
    stored = _choose(environ)
    found.append((type(stored), _headers(stored)[0][1]))
    assert found == [
        (ApiKey, "Bearer ours"),
        (ApiKey, "Bearer theirs"),
        (Bearer, "Bearer bearer"),
        (StoredSignIn, "Bearer stored"),
    ]


@pytest.mark.parametrize("environ", [{}, {"CODEX_API_KEY": " "}, {"OPENAI_API_KEY": "x"}])
def test_nothing_to_show(environ: dict[str, str]) -> None:
    assert _refusal(environ) == (
        "remote exec-server registration requires ChatGPT authentication or API key "
        "authentication; run `codex login` or set CODEX_API_KEY"
    )


def test_blanks_around_a_key_are_dropped() -> None:
    assert _headers(_choose({"CODEX_API_KEY": " k\n"})) == [("authorization", "Bearer k")]


def test_a_key_that_no_header_can_carry_is_not_shown() -> None:
    refusal = _refusal({"CODEX_API_KEY": "s3cret\nx"})
    assert refusal == "CODEX_API_KEY contains blanks or control characters"


@pytest.mark.parametrize("environ", [{}, {"CODEX_ACCESS_TOKEN": " "}])
def test_agent_without_a_token(environ: dict[str, str]) -> None:
    assert _refusal(environ, use_agent_identity_auth=True) == (
        "CODEX_ACCESS_TOKEN is required when --use-agent-identity-auth is set"
    )


def test_historical_token() -> None:
    name = "CODEX_EXEC_SERVER_REMOTE_BEARER_TOKEN"
    text = (
        "executor registry authentication error: executor registry bearer token environment "
        f"variable `{name}` is "
    )
    without = _without(name)
    assert _refusal(without, needs_bearer_token=True) == text + "not set"
    assert _refusal(without | {name: " "}, needs_bearer_token=True) == text + "empty"
    assert isinstance(_choose(_ALL, needs_bearer_token=True), Bearer)


def test_destinations() -> None:
    foreign = "https://registry.example"
    with pytest.raises(StartupError, match="--registry-auth api-key"):
        check_destination(ApiKey("k"), foreign)
    check_destination(ApiKey("k"), foreign, allow_any_https=True)
    check_destination(Bearer("k"), foreign)
    with pytest.raises(StartupError, match="requires https"):
        check_destination(Bearer("k"), "http://registry.example")
    check_destination(ClientToken("k"), "http://registry.example")


def test_a_refresh_token_is_not_sent_unencrypted() -> None:
    name = "CODEX_REFRESH_TOKEN_URL_OVERRIDE"
    text = f"{name} must be an https URL, or http on this machine"
    assert _refusal({name: "http://auth.example/token"}) == text
    assert _refusal({name: "zzz"}) == text


def test_harness_token() -> None:
    assert _headers(ClientToken("t")) == [("authorization", "Bearer t")]
    assert _headers(ClientToken("t", "acc")) == [
        ("authorization", "Bearer t"),
        ("chatgpt-account-id", "acc"),
    ]


def test_secrets_are_not_shown() -> None:
    for credential in (ApiKey("s3cret"), Bearer("s3cret"), ClientToken("s3cret", "s3cret")):
        assert "s3cret" not in repr(credential)


def test_secret_names() -> None:
    assert set(_without("AWS_REGION")) < SECRET_NAMES
    assert {"AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"} < SECRET_NAMES
