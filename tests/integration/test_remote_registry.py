"""Registration of an executor: with which credential, what ends it, what it waits for."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from tests.relay_service import Endpoint, ThreadedRelayService
from tests.support.client import run_command, scaled
from tests.support.relay import ENVIRONMENT, is_served, run_executor, start_executor

REGISTER = Endpoint.REGISTER


# ---- what is sent -----------------------------------------------------------------------


@pytest.mark.quick
def test_each_process_has_a_key_of_its_own() -> None:
    with ThreadedRelayService() as service:
        for _ in range(2):
            with start_executor(service):
                pass
        first, second = (request.body for request in service.requests_to(REGISTER))
        assert first != second


def _sign_in(folder: Path) -> dict[str, str | None]:
    claims = base64.urlsafe_b64encode(b"{}").decode().rstrip("=")
    tokens = {"id_token": f"e30.{claims}.c2ln", "access_token": "access-1", "account_id": "acc-1"}
    content = {"auth_mode": "chatgpt", "tokens": {**tokens, "refresh_token": "refresh-1"}}
    (folder / "auth.json").write_text(json.dumps(content))
    return {"CODEX_HOME": str(folder), "CODEX_API_KEY": None}


_VARIABLES: dict[str, tuple[dict[str, str | None], str]] = {
    "CODEX_API_KEY": ({"CODEX_API_KEY": "key-1"}, "Bearer key-1"),
    "our own first": ({"EXEC_SERVER_API_KEY": "own", "CODEX_API_KEY": "key-1"}, "Bearer own"),
    "bearer token": (
        {"CODEX_API_KEY": None, "CODEX_EXEC_SERVER_REMOTE_BEARER_TOKEN": "token-1"},
        "Bearer token-1",
    ),
    "API key first": (
        {"CODEX_API_KEY": "key-1", "CODEX_EXEC_SERVER_REMOTE_BEARER_TOKEN": "token-1"},
        "Bearer key-1",
    ),
}


@pytest.mark.parametrize("name", _VARIABLES)
def test_where_the_credential_comes_from(name: str, tmp_path: Path) -> None:
    variables, expected = _VARIABLES[name]
    env = {"CODEX_HOME": str(tmp_path), **variables}
    with (
        ThreadedRelayService(authorizations=[expected]) as service,
        start_executor(service, env=env),
    ):
        assert service.requests[0].header("authorization") == expected


def test_a_stored_sign_in_is_read_anew(tmp_path: Path) -> None:
    with ThreadedRelayService() as service, start_executor(service, env=_sign_in(tmp_path)):
        request = service.requests[0]
        assert request.header("authorization") == "Bearer access-1"
        assert request.header("chatgpt-account-id") == "acc-1"
        state = (tmp_path / "auth.json").read_text()
        (tmp_path / "new").write_text(state.replace("access-1", "access-2"))
        (tmp_path / "new").rename(tmp_path / "auth.json")
        assert is_served(service)
        request = service.requests_to(Endpoint.VALIDATE)[0]
        assert request.header("authorization") == "Bearer access-2"


# ---- what ends it -----------------------------------------------------------------------


@pytest.mark.parametrize("manner", ["hang", "drip"])
def test_an_answer_that_takes_too_long_ends_the_executor(manner: str) -> None:
    constants = {"registry.http.REQUEST_SECONDS": scaled(0.5)}
    with ThreadedRelayService() as service:
        if manner == "hang":
            service.faults.http.hang(REGISTER)
        else:
            service.faults.http.drip(REGISTER, scaled(0.2))
        ended = run_executor(service, constants=constants)
        assert ended.returncode == 1
        text = "environment registry request failed: route-aware request timed out"
        assert ended.stderr == f"Error: {text}\n"


def test_long_and_strange_texts_are_shown_within_reason() -> None:
    with ThreadedRelayService() as service:
        text = f"\x1b[31m{service.token} " + "x" * 10_000
        service.faults.http.answer(REGISTER, 500, text.encode())
        ended = run_executor(service)
        assert ended.returncode == 1
        assert 4000 < len(ended.stderr) < 4300
        assert "\x1b" not in ended.stderr
        assert service.token not in ended.stderr


# ---- what it waits for ------------------------------------------------------------------


def test_a_busy_registry_is_asked_again() -> None:
    constants = {
        "registry.api._FIRST_DELAY_SECONDS": 0.01,
        "registry.api._LAST_DELAY_SECONDS": 0.02,
    }
    with ThreadedRelayService() as service:
        unavailable = "authentication_service_unavailable"
        later = [("retry-after", "3600")]
        service.faults.http.answer(REGISTER, 502, code=unavailable, headers=later, times=3)
        service.faults.http.answer(REGISTER, 503, code="registration_conflict", times=3)
        with start_executor(service, constants=constants) as executor:
            requests = service.requests_to(REGISTER)
            assert len(requests) == 7
            assert len({request.body for request in requests}) == 1
            assert executor.stderr() == ""
            assert is_served(service)


def test_an_executor_waits_until_another_one_leaves() -> None:
    constants = {
        "registry.api._FIRST_DELAY_SECONDS": 0.01,
        "registry.api._LAST_DELAY_SECONDS": 0.02,
    }
    with (
        ThreadedRelayService(takeover=False) as service,
        start_executor(service) as first,
        start_executor(service, constants=constants, attached=False) as second,
    ):
        service.until(lambda: len(service.service.requests_to(REGISTER)) >= 3)
        assert second.process.poll() is None
        first.stop()
        service.until(lambda: len(service.service.requests_to(Endpoint.EXECUTOR_SOCKET)) == 2)
        service.wait_for_executor(ENVIRONMENT)
        assert is_served(service)


# ---- the command line -------------------------------------------------------------------

_REMOTE = ("--remote", "http://127.0.0.1:9")
_FULL = (*_REMOTE, "--environment-id", "e")


@pytest.mark.parametrize(
    "flags",
    [
        ("--environment-id", "e"),
        ("forward", *_FULL),
        ("forward", "--connect", "ws://127.0.0.1:9"),
        (*_FULL, "stray"),
        (*_FULL, "--executor-id", "e"),
        (*_FULL, "--connect", "ws://127.0.0.1:9"),
        ("--relay-security", "plain"),
        ("--registry-auth", "api-key"),
        (*_FULL, "--relay-security", "rot13"),
        (*_FULL, "--ws-auth", "capability-token"),
        (*_FULL, "--remote-transport", "direct", "--aws-sigv4", "--relay-security", "plain"),
    ],
    ids=lambda flags: " ".join(flags).removeprefix(" ".join(_FULL)).strip(),
)
def test_flags_that_do_not_fit_together_are_a_usage_error(flags: tuple[str, ...]) -> None:
    ended = run_command("ours", *flags, env={"CODEX_API_KEY": "key"})
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("Error: ")
