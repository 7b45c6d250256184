"""The direct transport: a plain connection to a service that checks AWS signatures."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from tests.relay_service import Endpoint, Request, ThreadedRelayService
from tests.support.client import TEXT, Client
from tests.support.relay import ENVIRONMENT, dial, run_executor, start_executor, wait_attached
from tests.support.server_internals import eventually

DIRECT = ("--remote-transport", "direct", "--aws-sigv4", "--aws-region", "eu-test-1")
KEY_ID, SECRET, TOKEN = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "session-token"
AWS: Mapping[str, str | None] = {
    "AWS_ACCESS_KEY_ID": KEY_ID,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_EC2_METADATA_DISABLED": "true",
    "HOME": "/nonexistent",
    "CODEX_API_KEY": None,
}
READY = {"status": "ready"}
# Waits between attempts, on paper only.
QUICK_RETRIES = """
import exec_server.server.remote as remote
remote.retry_delay = lambda attempt, uniform: 0.01
"""


# ---- signatures -------------------------------------------------------------------------


def _signature(request: Request, service: str, region: str, secret: str = SECRET) -> str:
    """The signature that a request should carry, from the published rules."""
    signed = _authorization(request)["SignedHeaders"].split(";")
    path, _, query = request.target.partition("?")
    pairs = sorted(part.partition("=")[::2] for part in query.split("&") if part)
    canonical = "\n".join(
        [
            request.method,
            quote(path, safe="/-_.~%"),
            "&".join(f"{name}={value}" for name, value in pairs),
            *(f"{name}:{request.header(name)}" for name in signed),
            "",
            ";".join(signed),
            hashlib.sha256(request.body).hexdigest(),
        ]
    )
    stamp = request.header("x-amz-date") or ""
    scope = f"{stamp[:8]}/{region}/{service}/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, digest])
    key = f"AWS4{secret}".encode()
    for part in (stamp[:8], region, service, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def _authorization(request: Request) -> dict[str, str]:
    kind, _, rest = (request.header("authorization") or "").partition(" ")
    assert kind == "AWS4-HMAC-SHA256"
    return dict(part.strip().split("=", 1) for part in rest.split(","))


def _check(request: Request, headers: str, service: str = "execute-api") -> None:
    found = _authorization(request)
    date = (request.header("x-amz-date") or "")[:8]
    assert found["Credential"] == f"{KEY_ID}/{date}/eu-test-1/{service}/aws4_request"
    assert found["SignedHeaders"] == headers
    assert found["Signature"] == _signature(request, service, "eu-test-1")


@pytest.fixture
def service() -> Iterator[ThreadedRelayService]:
    with ThreadedRelayService() as running:
        yield running


@pytest.mark.quick
def test_registration_and_upgrade_are_signed(service: ThreadedRelayService) -> None:
    with start_executor(service, *DIRECT, env={**AWS, "CODEX_API_KEY": "ignored"}):
        register, upgrade = service.requests
        assert register.target == f"/cloud/environment/{ENVIRONMENT}/direct/register"
        assert json.loads(register.body) == {"transport": "direct_jsonrpc_v1"}
        assert register.header("content-type") == "application/json"
        _check(register, "content-type;host;x-amz-date")
        assert upgrade.method == "GET"
        _check(upgrade, "host;x-amz-date")
        assert register.header("host") == urlsplit(service.url).netloc


def test_session_credentials_and_another_service(service: ThreadedRelayService) -> None:
    env = {**AWS, "AWS_SESSION_TOKEN": TOKEN}
    flags = (*DIRECT, "--aws-service", "other-service")
    with start_executor(service, *flags, env=env):
        assert {request.method for request in service.requests} == {"GET", "POST"}
        for request in service.requests:
            headers = "host;x-amz-date;x-amz-security-token"
            if request.method == "POST":
                headers = f"content-type;{headers}"
            assert request.header("x-amz-security-token") == TOKEN
            _check(request, headers, "other-service")


def test_credentials_and_region_of_a_profile(service: ThreadedRelayService, tmp_path: Any) -> None:
    (tmp_path / "credentials").write_text(
        f"[build]\naws_access_key_id = {KEY_ID}\naws_secret_access_key = {SECRET}\n"
    )
    (tmp_path / "config").write_text("[profile build]\nregion = eu-test-1\n")
    env = {
        **AWS,
        "AWS_ACCESS_KEY_ID": None,
        "AWS_SECRET_ACCESS_KEY": None,
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
    }
    flags = ("--remote-transport", "direct", "--aws-sigv4", "--aws-profile", "build")
    with start_executor(service, *flags, env=env):
        _check(service.requests[0], "content-type;host;x-amz-date")


def test_without_credentials_there_is_no_request(service: ThreadedRelayService) -> None:
    env = {**AWS, "AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}
    ended = run_executor(service, *DIRECT, env=env)
    assert ended.returncode == 1
    assert "failed to load AWS credentials" in ended.stderr
    assert service.requests == []


# ---- the connection ---------------------------------------------------------------------


def _client(service: ThreadedRelayService) -> Client:
    return Client(dial(service.plain_url(ENVIRONMENT)))


def test_a_client_is_served(service: ThreadedRelayService) -> None:
    with start_executor(service, *DIRECT, env=AWS), _client(service) as client:
        client.initialize()
        assert client.run(["echo", "hello"]).stdout == b"hello\n"
        client.websocket.send_binary(b'{"id": 50, "method": "environment/status"}')
        assert client.result(50) == READY
        assert {frame.opcode for frame in client.websocket.frames} == {TEXT}
        # A mistake is answered, as on a connection of one's own.
        client.link.send_text(b"hello")
        eventually("it is answered", lambda: client.receive() and client.malformed)
        assert client.call("environment/status") == READY


def test_large_messages_pass_both_ways(service: ThreadedRelayService, tmp_path: Any) -> None:
    with start_executor(service, *DIRECT, env=AWS), _client(service) as client:
        client.initialize()
        content = os.urandom(1_048_576) * 12
        params = {"path": f"file://{tmp_path}/f", "dataBase64": base64.b64encode(content).decode()}
        assert client.call("fs/writeFile", params, timeout=20) == {}
        answer = client.call("fs/readFile", {"path": f"file://{tmp_path}/f"}, timeout=20)
        assert base64.b64decode(answer["dataBase64"]) == content


def test_a_lost_connection_is_opened_again_and_the_session_goes_on(
    service: ThreadedRelayService,
) -> None:
    with start_executor(service, *DIRECT, env=AWS, preparation=QUICK_RETRIES) as executor:
        with _client(service) as client:
            client.initialize()
            client.start(["cat"], process_id="cat", pipeStdin=True)
        # Its connection was ours: it ends with it, and another one is opened.
        service.until(lambda: len(service.service.requests_to(Endpoint.EXECUTOR_SOCKET)) == 2)
        wait_attached(service, executor)
        with _client(service) as again:
            again.initialize(client.session_id)
            assert again.write("cat", b"hello", "w") == "accepted"
            assert again.notice("process/output", "cat")["chunk"] == "aGVsbG8="
        upgrades = service.requests_to(Endpoint.EXECUTOR_SOCKET)
        assert len({upgrade.target for upgrade in upgrades}) == 1
        for upgrade in upgrades:
            _check(upgrade, "host;x-amz-date")
        assert len(service.requests_to(Endpoint.DIRECT_REGISTER)) == 1


@pytest.mark.parametrize("fault", ["503", "hang"])
def test_a_connection_that_fails_is_tried_again(service: ThreadedRelayService, fault: str) -> None:
    http = service.faults.http
    if fault == "503":
        http.reject(Endpoint.EXECUTOR_SOCKET, 503, times=3)
    else:
        getattr(http, fault)(Endpoint.EXECUTOR_SOCKET, times=3)
    constants = {"server.remote.OPEN_SECONDS": 0.2} if fault == "hang" else {}
    options: dict[str, Any] = {"preparation": QUICK_RETRIES, "constants": constants}
    with start_executor(service, *DIRECT, env=AWS, **options):
        upgrades = service.requests_to(Endpoint.EXECUTOR_SOCKET)
        assert len(upgrades) == 4
        assert len(service.requests_to(Endpoint.DIRECT_REGISTER)) == 1
