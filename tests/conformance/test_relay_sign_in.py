"""The stored sign-in of an executor while it runs: newer tokens, other users, refreshes.

By choice ours exits when another account or user signs in; the reference drops its link for good.
"""

from __future__ import annotations

import base64
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from exec_server.errors import RelayError
from tests.conformance.test_transcripts import TRANSCRIPTS
from tests.relay_service import Endpoint, ThreadedRelayService
from tests.support.client import Disconnected, Server, reference_version, run_command
from tests.support.relay import (
    ENVIRONMENT,
    RelayLink,
    StreamReset,
    exit_code,
    remote_flags,
    start_executor,
)
from tests.support.server_internals import eventually

_CAPTURE = TRANSCRIPTS.parent / "captures" / "0.169" / "remote_signin_changes.jsonl"
_REJECTED = "the registry has rejected the executor's credential"


@pytest.fixture(autouse=True)
def known_to_the_reference(kind: str) -> None:
    if kind == "reference" and reference_version() < (0, 169):
        pytest.skip("older references read the file once")


@pytest.fixture
def service() -> Iterator[ThreadedRelayService]:
    with ThreadedRelayService() as running:
        yield running


# ---- the file ------------------------------------------------------------------------------


def _jwt(account_id: str = "acc-1", user_id: str = "u-1", **claims: Any) -> str:
    account = {
        "chatgpt_account_id": account_id,
        "chatgpt_user_id": user_id,
        "chatgpt_plan_type": "pro",
    }
    content = {"https://api.openai.com/auth": account, **claims}
    encoded = base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")
    return f"e30.{encoded}.e30"


def _access(name: str, left: float = 3600) -> str:
    """An access token that expires in so many seconds."""
    return _jwt(name=name, exp=int(time.time() + left))


def _sign_in(
    access: str, *, account_id: str = "acc-1", user_id: str = "u-1", **members: Any
) -> dict[str, Any]:
    tokens = {
        "id_token": _jwt(account_id, user_id, email="a@example.net"),
        "access_token": access,
        "refresh_token": "refresh-1",
        "account_id": account_id,
    }
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"OPENAI_API_KEY": None, "tokens": tokens, "last_refresh": now, **members}


class _File:
    """The sign-in file of an executor."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "auth.json"

    def write(self, content: Any) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(content if isinstance(content, str) else json.dumps(content))
        os.replace(new, self.path)

    def read(self) -> Any:
        return json.loads(self.path.read_text())


@pytest.fixture
def file(folder: Path) -> _File:
    return _File(folder)


# ---- the issuer of the tokens --------------------------------------------------------------


class _Issuer:
    """Where tokens are refreshed."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.answer: tuple[int, Any] = (500, {})
        self.asked = threading.Event()
        self.released = threading.Event()  # clear while the answer is delayed
        self.released.set()
        self.url = ""


@pytest.fixture
def issuer() -> Iterator[_Issuer]:
    made = _Issuer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/oauth/token"
            assert self.headers["content-type"] == "application/json"
            made.requests.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            made.asked.set()
            made.released.wait(20)
            status, content = made.answer
            encoded = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(encoded)))
            self.end_headers()
            self.wfile.write(encoded)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        made.url = f"http://127.0.0.1:{server.server_port}/oauth/token"
        try:
            yield made
        finally:
            made.released.set()
            server.shutdown()
            thread.join()


def _request(reason: str, token: str = "refresh-1") -> dict[str, str]:
    return {
        "client_id": "app_EMoamEEZ73f0CkXaXp7hrann",
        "grant_type": "refresh_token",
        "refresh_reason": reason,
        "refresh_token": token,
    }


def _variables(file: _File, issuer: _Issuer) -> dict[str, str | None]:
    return {
        "CODEX_API_KEY": None,
        "CODEX_HOME": str(file.path.parent),
        "CODEX_REFRESH_TOKEN_URL_OVERRIDE": issuer.url,
    }


@pytest.fixture
def executor(
    service: ThreadedRelayService, kind: str, file: _File, issuer: _Issuer
) -> Iterator[Server]:
    """One that has registered with the access token `first`."""
    file.write(_sign_in("first"))
    with start_executor(service, kind=kind, env=_variables(file, issuer)) as running:
        yield running


def _tokens(service: ThreadedRelayService, endpoint: Endpoint) -> list[str]:
    headers = [request.header("authorization") for request in service.requests_to(endpoint)]
    return [(header or "").removeprefix("Bearer ") for header in headers]


def _outcome(service: ThreadedRelayService) -> str:
    """What comes of a handshake."""
    try:
        RelayLink(service).close()
    except StreamReset as reset:
        return reset.reason
    except (Disconnected, RelayError) as error:
        return str(error)
    return "served"


# ---- changes of the file -------------------------------------------------------------------


def test_newer_tokens_of_the_same_user_are_used(
    service: ThreadedRelayService, executor: Server, file: _File
) -> None:
    for access in ("second", "third"):
        file.write(_sign_in(access))
        assert _outcome(service) == "served"
    assert _tokens(service, Endpoint.REGISTER) == ["first"]
    assert _tokens(service, Endpoint.VALIDATE) == ["second", "third"]


def _without_user() -> dict[str, Any]:
    content = _sign_in("x")
    content["tokens"]["id_token"] = "e30.e30.e30"
    return content


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(
            _sign_in("x", account_id="acc-2", user_id="u-2"),
            "is of another account now",
            id="other account",
        ),
        pytest.param(_sign_in("x", user_id="u-2"), "is of another user now", id="other user"),
        pytest.param(_without_user(), "is of another user now", id="no user"),
        pytest.param({"OPENAI_API_KEY": "sk-x"}, "holds an API key now", id="API key"),
        pytest.param({}, "holds no sign-in any more", id="nothing"),
        pytest.param(None, "was removed", id="removed"),
    ],
)
def test_another_sign_in_ends_the_link(
    service: ThreadedRelayService,
    kind: str,
    executor: Server,
    file: _File,
    *,
    content: Any,
    reason: str,
) -> None:
    if content is None:
        file.path.unlink()
    else:
        file.write(content)
    assert _outcome(service) != "served"
    eventually("the link ends", lambda: service.executor(ENVIRONMENT) is None, 20)
    assert service.requests_to(Endpoint.VALIDATE) == []
    if kind == "reference":
        assert executor.process.poll() is None
        return
    assert exit_code(executor) == 1
    refusal, end = executor.stderr().splitlines()
    text = (
        "environment registry authentication error: the sign-in of this executor, "
        f"{file.path}, {reason}; start the server again to register anew"
    )
    assert refusal.endswith(f" client refused: {text}")
    assert end == f"Error: {text}"


@pytest.mark.parametrize("content", ["", '{"tokens": {"id_tok'])
def test_a_file_in_the_middle_of_a_write_refuses_one_client(
    service: ThreadedRelayService, executor: Server, file: _File, content: str
) -> None:
    file.path.write_text(content)
    assert _outcome(service) != "served"
    assert service.requests_to(Endpoint.VALIDATE) == []
    file.write(_sign_in("second"))
    assert _outcome(service) == "served"
    assert _tokens(service, Endpoint.VALIDATE) == ["second"]
    assert len(service.requests_to(Endpoint.EXECUTOR_SOCKET)) == 1


# ---- refresh -------------------------------------------------------------------------------


@pytest.mark.parametrize(("left", "refreshes"), [(-100, True), (240, True), (400, False)])
def test_a_token_that_expires_soon_is_refreshed(
    service: ThreadedRelayService,
    kind: str,
    file: _File,
    issuer: _Issuer,
    *,
    left: float,
    refreshes: bool,
) -> None:
    old, new = _access("old", left), _access("new")
    file.write(_sign_in(old))
    file.path.chmod(0o644)
    issuer.answer = (
        200,
        {"id_token": _jwt(email="b@c"), "access_token": new, "refresh_token": "refresh-2"},
    )
    with start_executor(service, kind=kind, env=_variables(file, issuer)):
        assert _outcome(service) == "served"
    assert issuer.requests == [_request("proactive_expiry")] * refreshes
    for endpoint in (Endpoint.REGISTER, Endpoint.VALIDATE):
        assert _tokens(service, endpoint) == [new if refreshes else old]
    if refreshes:
        stored = file.read()
        assert stored["tokens"] == {**issuer.answer[1], "account_id": "acc-1"}
        assert stored["OPENAI_API_KEY"] is None
        time.strptime(stored["last_refresh"].partition(".")[0], "%Y-%m-%dT%H:%M:%S")
        assert stored["last_refresh"].endswith("Z")
        assert stat.S_IMODE(file.path.stat().st_mode) == 0o600


def test_a_token_that_expires_while_the_executor_runs(
    service: ThreadedRelayService, executor: Server, file: _File, issuer: _Issuer
) -> None:
    new = _access("new")
    issuer.answer = (200, {"access_token": new})
    file.write(_sign_in(_access("old", 5)))
    assert _outcome(service) == "served"
    assert _tokens(service, Endpoint.VALIDATE) == [new]
    assert file.read()["tokens"]["refresh_token"] == "refresh-1"


def test_a_server_that_ends_during_a_refresh_stores_the_new_tokens(
    service: ThreadedRelayService, kind: str, file: _File, issuer: _Issuer
) -> None:
    if kind == "reference":
        pytest.skip("not known of the reference")
    file.write(_sign_in(_access("first")))
    issuer.answer = (200, {"access_token": _access("new"), "refresh_token": "refresh-2"})
    with start_executor(service, kind=kind, env=_variables(file, issuer)) as executor:
        issuer.released.clear()
        file.write(_sign_in(_access("old", 100)))
        assert _outcome(service) == "served"  # with the old token, which is still valid
        assert issuer.asked.wait(20)
        executor.process.terminate()
        eventually("the link ends", lambda: service.executor(ENVIRONMENT) is None, 20)
        issuer.released.set()
        exit_code(executor)
    assert file.read()["tokens"]["refresh_token"] == "refresh-2"
    assert issuer.requests == [_request("proactive_expiry")]


def test_a_token_rejected_at_the_start_is_refreshed_once_and_sent_again(
    service: ThreadedRelayService, kind: str, file: _File, issuer: _Issuer
) -> None:
    file.write(_sign_in("old"))
    issuer.answer = (200, {"access_token": "new", "refresh_token": "refresh-2"})
    service.faults.http.answer(Endpoint.REGISTER, 401)
    with start_executor(service, kind=kind, env=_variables(file, issuer)):
        assert _tokens(service, Endpoint.REGISTER) == ["old", "new"]
        assert issuer.requests == [_request("forced")]
        assert file.read()["tokens"]["refresh_token"] == "refresh-2"


def test_a_rejected_token_is_refreshed_once_and_sent_again(
    service: ThreadedRelayService, executor: Server, issuer: _Issuer
) -> None:
    issuer.answer = (200, {"access_token": "newest"})
    service.faults.http.answer(Endpoint.VALIDATE, 401)
    assert _outcome(service) == "served"
    assert _tokens(service, Endpoint.VALIDATE) == ["first", "newest"]
    assert issuer.requests == [_request("forced")]


def test_a_refreshed_token_that_is_rejected_too(
    service: ThreadedRelayService, kind: str, executor: Server, issuer: _Issuer
) -> None:
    issuer.answer = (200, {"access_token": "last"})
    service.faults.http.answer(Endpoint.VALIDATE, 401, times=None)
    assert _outcome(service) == _REJECTED
    assert _tokens(service, Endpoint.VALIDATE) == ["first", "last"]
    assert issuer.requests == [_request("forced")]
    assert _outcome(service) == _REJECTED
    assert len(issuer.requests) == (2 if kind == "reference" else 1)


@pytest.mark.parametrize(
    ("answer", "asks_again"),
    [
        pytest.param((500, {}), True, id="500"),
        pytest.param((400, {"error": "x"}), True, id="400"),
        pytest.param((200, []), True, id="no object"),
        pytest.param((200, {}), True, id="nothing new"),
        pytest.param((401, {"error": {"code": "refresh_token_expired"}}), False, id="expired"),
    ],
)
def test_a_failed_refresh_leads_to_a_rejection(
    service: ThreadedRelayService,
    kind: str,
    executor: Server,
    issuer: _Issuer,
    *,
    answer: tuple[int, Any],
    asks_again: bool,
) -> None:
    issuer.answer = answer
    service.faults.http.answer(Endpoint.VALIDATE, 401, times=None)
    for _ in range(2):
        assert _outcome(service) == _REJECTED
    # Without a new token the request is not sent again.
    assert _tokens(service, Endpoint.VALIDATE) == ["first"] * 2
    # By choice ours pauses after an attempt.
    asks_again = asks_again and kind == "reference"
    assert issuer.requests == [_request("forced")] * (2 if asks_again else 1)
    assert executor.process.poll() is None


def test_a_failed_refresh_at_the_start(
    service: ThreadedRelayService, kind: str, file: _File, issuer: _Issuer
) -> None:
    old = _access("old", -5)
    file.write(_sign_in(old))
    with start_executor(service, kind=kind, env=_variables(file, issuer)):
        assert _tokens(service, Endpoint.REGISTER) == [old]
    service.faults.http.answer(Endpoint.REGISTER, 401, b"no", times=None)
    ended = run_command(kind, *remote_flags(service), env=_variables(file, issuer))
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (  # the reference warns about its home directory first
        "Error: environment registry authentication error: environment registry authentication "
        "failed (401 Unauthorized): no"
    )


# ---- recorded ------------------------------------------------------------------------------


@pytest.mark.skipif(not _CAPTURE.is_file(), reason=f"no capture {_CAPTURE}")
def test_recorded_changes(
    service: ThreadedRelayService, kind: str, file: _File, issuer: _Issuer
) -> None:
    """The recorded notes are acted on, and the requests of the executor are the recorded ones."""
    entries = [json.loads(line) for line in _CAPTURE.read_text().splitlines()]
    recorded = [entry for entry in entries if entry["dir"] == "executor>registry"]
    changes: dict[str, Callable[[], None]] = {
        "newer token of the same": lambda: file.write(_sign_in("TOKEN(newer)")),
        "another account": lambda: file.write(
            _sign_in("TOKEN(other)", account_id="acc-2", user_id="u-2")
        ),
    }
    file.write(_sign_in("TOKEN(first)"))
    with start_executor(service, kind=kind, env=_variables(file, issuer)) as executor:
        for entry in entries:
            if entry["kind"] == "note":
                for text, change in changes.items():
                    if text in entry["note"]:
                        change()
            elif entry["dir"] == "harness>executor":
                outcome = _outcome(service)
        assert outcome != "served"  # the last one
        eventually("the link ends", lambda: service.executor(ENVIRONMENT) is None, 20)
        if kind == "ours":
            assert exit_code(executor) == 1
    sent = [r for r in service.requests if r.path.endswith(("/register", "/validate"))]
    assert [f"{r.method} {r.path}" for r in sent] == [entry["request"] for entry in recorded]
    for request, entry in zip(sent, recorded, strict=True):
        for name in ("authorization", "chatgpt-account-id", "content-type"):
            assert request.header(name) == entry["headers"][name]
