"""The registry of the relay service: who is let in, with which addresses, and for how long."""

from __future__ import annotations

import socket
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.relay_service import ThreadedRelayService
from tests.support.client import DEFAULT_TIMEOUT, HandshakeRefused, scaled
from tests.support.relay import post
from tests.support.relay_ends import (
    ENVIRONMENT_PATH,
    REASON_HEADER,
    Ends,
    code,
    connect,
    dial,
    key,
    register,
    validate,
)

pytestmark = pytest.mark.usefixtures("closed_links")


@pytest.mark.quick
def test_an_authorization_is_good_once_for_one_key_and_registration(ends: Ends) -> None:
    registration = ends.registered["executor_registration_id"]
    text = connect(ends.service)["harness_key_authorization"]
    assert not validate(ends.service, registration, text, fill=3)
    assert not validate(ends.service, "reg-other", text)
    assert not validate(ends.service, registration, text + "x")
    assert validate(ends.service, registration, text)
    assert not validate(ends.service, registration, text)


def test_an_authorization_and_an_address_expire() -> None:
    now = [1_000.0]
    with ThreadedRelayService(clock=lambda: now[0]) as service:
        ends = Ends(service)
        granted = connect(service)
        now[0] += 61
        registration = ends.registered["executor_registration_id"]
        assert not validate(service, registration, granted["harness_key_authorization"])
        with pytest.raises(HandshakeRefused) as refused:
            dial(granted["url"])
        assert refused.value.reply.header(REASON_HEADER) == "expired"


def test_connect_says_offline_until_the_executor_is_attached(
    service: ThreadedRelayService,
) -> None:
    body = {"harness_public_key": key()}
    offline = (409, "environment_offline")
    assert code(post(service, f"{ENVIRONMENT_PATH}/connect", body)) == offline
    registered = register(service)
    assert code(post(service, f"{ENVIRONMENT_PATH}/connect", body)) == offline
    link = dial(registered["url"])
    service.wait_for_executor("env-1")
    bundle = connect(service)
    assert bundle["executor_public_key"] == key(1)
    assert bundle["executor_registration_id"] == registered["executor_registration_id"]
    link.sock.close()
    service.until(lambda: service.service.executor("env-1") is None)
    assert code(post(service, f"{ENVIRONMENT_PATH}/connect", body)) == offline


def test_who_may_ask_for_what() -> None:
    settings: dict[str, Any] = {"authorizations": ["Bearer good"], "environments": ["env-1"]}
    with ThreadedRelayService(prefix="/api/v1", **settings) as service:
        body = {"harness_public_key": key()}

        def ask(path: str, authorization: str = "Bearer good") -> tuple[int, str]:
            return code(post(service, path, body, authorization))

        assert ask(f"{ENVIRONMENT_PATH}/connect") == (409, "environment_offline")
        assert ask(f"{ENVIRONMENT_PATH}/connect", "Bearer bad") == (401, "invalid_token")
        assert ask(f"{ENVIRONMENT_PATH}/connect", "") == (401, "invalid_token")
        assert ask("/cloud/environment/env-2/connect") == (404, "environment_not_found")
        assert ask("/cloud/environment/a%2Fb/connect") == (400, "invalid_environment_id")
        assert ask("/elsewhere") == (404, "not_found")
        assert ask("/cloud/executor/env-1/register") == (403, "plaintext_disabled")
        assert service.requests[0].path == "/api/v1/cloud/environment/env-1/connect"


def test_a_second_executor_waits_when_takeover_is_off() -> None:
    with ThreadedRelayService(takeover=False) as service:
        Ends(service)
        body = {"security_profile": "noise_hybrid_ik_v1", "executor_public_key": key(9)}
        reply = post(service, f"{ENVIRONMENT_PATH}/register", body)
        assert code(reply) == (503, "registration_conflict")
        assert register(service)["environment_id"] == "env-1"


def test_an_address_of_a_client_works_once(ends: Ends) -> None:
    url = connect(ends.service)["url"]
    dial(url)
    with pytest.raises(HandshakeRefused) as refused:
        dial(url)
    assert refused.value.status == 401


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("role=harness", "role=environment", "invalid_signature"),
        ("role=harness", "role=king", "invalid_role"),
        ("/env-1?", "/env-2?", "invalid_signature"),
        ("exp=", "exp=9", "invalid_signature"),
        ("exp=", "exp=x", "invalid_expiry"),
        ("sig=", "sig=0", "invalid_signature"),
        ("sig=", "signature=", "extra_query_param"),
        ("v=1&", "", "missing_version"),
        ("v=1&", "v=1&v=1&", "malformed_query"),
        ("/rendezvous/", "/elsewhere/", "unknown_route"),
    ],
)
def test_a_changed_address_is_refused(ends: Ends, old: str, new: str, reason: str) -> None:
    url = connect(ends.service)["url"]
    assert old in url
    with pytest.raises(HandshakeRefused) as refused:
        dial(url.replace(old, new))
    assert refused.value.reply.header(REASON_HEADER) == reason


def test_an_address_of_a_superseded_registration_is_refused(
    service: ThreadedRelayService,
) -> None:
    old = register(service)["url"]
    register(service)
    with pytest.raises(HandshakeRefused) as refused:
        dial(old)
    assert refused.value.status == 401
    reason = refused.value.reply.header(REASON_HEADER)
    assert reason == "unexpected_executor_registration_id"


def test_a_connection_carries_several_requests(service: ThreadedRelayService) -> None:
    request = (
        f"POST {ENVIRONMENT_PATH}/connect HTTP/1.1\r\nhost: a\r\nauthorization: b\r\n"
        "content-length: 2\r\n\r\n[]"
    ).encode()
    parts = urlsplit(service.url)
    with socket.create_connection((parts.hostname, parts.port)) as sock:
        sock.sendall(request * 3)
        sock.settimeout(scaled(DEFAULT_TIMEOUT))
        received = b""
        while received.count(b"environment_offline") < 3:
            received += sock.recv(65536)
    assert received.count(b"HTTP/1.1 409 Conflict") == 3
