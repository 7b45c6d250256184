"""Requests to the registry: every refusal as it is written, also with twelve at once."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.client import HttpReply, http
from tests.support.registry import (
    ENVIRONMENT,
    Node,
    RawExecutor,
    at_once,
    bundle,
    free_port,
    start_node,
)
from tests.support.relay import key_object
from tests.support.server_internals import eventually

from exec_server.relay.noise import Identity

PROFILE = "noise_hybrid_ik_v1"
VERBS = ["register", "connect", "validate"]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("data")) as running:
        yield running


def body_of(verb: str, **changes: Any) -> dict[str, Any]:
    key = key_object(Identity.generate().public)
    bodies: dict[str, dict[str, Any]] = {
        "register": {"security_profile": PROFILE, "executor_public_key": key},
        "connect": {"harness_public_key": key},
        "validate": {
            "executor_registration_id": "reg-x",
            "harness_public_key": key,
            "harness_key_authorization": "x",
        },
    }
    return {**bodies[verb], **changes}


def code(reply: HttpReply) -> tuple[int, str]:
    """Status and code of a refusal, whose form is checked."""
    answer = json.loads(reply.body)
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"code", "message"}
    assert reply.header("connection") == "close"
    return reply.status, answer["error"]["code"]


@pytest.mark.parametrize("verb", VERBS)
def test_a_token_that_is_not_valid_is_always_refused_alike(node: Node, verb: str) -> None:
    expired = node.site.token("executor:*", "connect:*", expires="1")
    revoked = node.site.create_token("executor:*", "connect:*")
    node.site.admin("token", "revoke", revoked["id"])
    body = body_of(verb)
    eventually("expiry", lambda: node.ask(verb, body, expired, "none").status == 401)
    replies = [node.ask(verb, body, token) for token in (None, "", "x", expired, revoked["token"])]
    replies.append(node.ask(verb, b"garbage", "x", "an%20id"))
    path = f"/cloud/environment/{ENVIRONMENT}/{verb}"
    basic = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Basic eDp5\r\ncontent-length: 0"
    replies.append(node.request(basic))
    assert {code(reply) for reply in replies} == {(401, "invalid_token")}
    assert len({reply.body for reply in replies}) == 1


@pytest.mark.parametrize("verb", VERBS)
def test_the_scope_decides_before_anything_is_looked_up(node: Node, verb: str) -> None:
    other = node.site.token("connect:other" if verb == "connect" else "executor:other")
    wrong = node.site.token("executor:*" if verb == "connect" else "connect:*")
    node.register()
    for token in (other, wrong):
        for name in (ENVIRONMENT, "never-registered", "an%20id"):
            assert code(node.ask(verb, b"garbage", token, name)) == (403, "forbidden")


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", ["an%20id", "%2e%2e%2f", "x" * 129, "%ff", "%00"])
def test_ids_have_few_characters(node: Node, verb: str, name: str) -> None:
    token = node.site.client_token if verb == "connect" else node.site.executor_token
    refused = code(node.ask(verb, body_of(verb), token, name))
    assert refused == (400, "invalid_environment_id")


@pytest.mark.parametrize("verb", VERBS)
def test_bodies_are_checked(node: Node, verb: str) -> None:
    token = node.site.client_token if verb == "connect" else node.site.executor_token
    assert code(node.ask(verb, b" " * 65_537, token)) == (413, "body_too_large")
    assert code(node.ask(verb, b"{", token)) == (400, "invalid_body")
    assert code(node.ask(verb, [], token)) == (400, "invalid_body")
    member = "executor_public_key" if verb == "register" else "harness_public_key"
    key = {**key_object(Identity.generate().public), "more": 1}
    assert code(node.ask(verb, body_of(verb, **{member: key}), token)) == (
        400,
        "invalid_public_key",
    )
    chunked = f"POST /cloud/environment/{ENVIRONMENT}/{verb} HTTP/1.1\r\nhost: x\r\n"
    chunked += f"authorization: Bearer {token}\r\ntransfer-encoding: chunked"
    assert code(node.request(chunked, b"1\r\n{\r\n0\r\n\r\n")) == (400, "invalid_body")


def test_plaintext_and_direct_forms_are_not_served(node: Node) -> None:
    token = node.site.executor_token
    assert code(node.ask("register", b"", token)) == (403, "plaintext_disabled")
    assert code(node.post("/cloud/executor/x/register", b"", token)) == (403, "plaintext_disabled")
    for path in ("/cloud/environment/x/direct/register", "/cloud/environment/x", "/", "/x?y"):
        assert code(node.post(path, {}, token)) == (404, "not_found")
    assert code(node.get("/cloud/environment/x/connect")) == (405, "method_not_allowed")


def test_an_environment_is_known_or_offline_in_its_own_tenant(node: Node) -> None:
    stranger = node.site.token("connect:*", "executor:*", tenant="stranger")
    node.register(name="mine")
    body = body_of("connect")
    assert code(node.ask("connect", body, node.site.client_token, "mine")) == (
        409,
        "environment_offline",
    )
    for name in ("mine", "never"):
        assert code(node.ask("connect", body, stranger, name)) == (404, "environment_not_found")
    # The same id in another tenant is another environment.
    node.register(stranger, "mine")
    with RawExecutor(node, "mine", stranger):
        assert node.ask("connect", body, stranger, "mine").status == 200
        assert node.ask("connect", body, node.site.client_token, "mine").status == 409


def test_an_authorization_is_good_for_one_validation_of_one_key(node: Node) -> None:
    with RawExecutor(node, "auth") as executor:
        client, other = Identity.generate(), Identity.generate()
        granted = node.connect(client, name="auth")
        right = {
            "executor_registration_id": executor.registration_id,
            "harness_public_key": key_object(client.public),
            "harness_key_authorization": granted.authorization,
        }
        stranger = node.site.token("executor:*", tenant="stranger")
        node.register(stranger, "auth")

        def ask(token: str | None = None, name: str = "auth", **changes: Any) -> bool:
            reply = node.ask(
                "validate", {**right, **changes}, token or node.site.executor_token, name
            )
            assert reply.status == 200
            return bool(json.loads(reply.body)["valid"])

        # A wrong try does not consume.
        assert not ask(harness_public_key=key_object(other.public))
        assert not ask(executor_registration_id="reg-other")
        assert not ask(harness_key_authorization="x")
        assert not ask(name="other")
        assert not ask(stranger)
        assert sorted(at_once(12, ask)) == [False] * 11 + [True]
        assert not ask()


def test_an_authorization_ends_with_its_registration(node: Node) -> None:
    client = Identity.generate()
    with RawExecutor(node, "again") as executor:
        granted = node.connect(client, name="again")
        newer = node.register(name="again")
        assert executor.closed() == 4001
    for registration in (granted.registration_id, newer["executor_registration_id"]):
        body = {
            "executor_registration_id": registration,
            "harness_public_key": key_object(client.public),
            "harness_key_authorization": granted.authorization,
        }
        reply = node.ask("validate", body, node.site.executor_token, "again")
        assert json.loads(reply.body) == {"valid": False}


def test_handshakes_of_a_token_with_an_executor_are_counted(node: Node) -> None:
    token = node.site.create_token("connect:*", "executor:*", tenant="rated")
    text, body = str(token["token"]), body_of("connect")
    with RawExecutor(node, "many", text), RawExecutor(node, "few", text):
        # A shell loop of commands is not stopped.
        for _ in range(30):
            reply = eventually("a place", lambda: node.ask("connect", body, text, "many"))
            assert reply.status == 200 or reply.header("retry-after") == "1"
        limit = node.site.admin("tenant", "limit", "rated", "--handshakes-per-second", "1")
        assert limit["handshakes_per_second"] == 1
        replies = at_once(6, lambda: node.ask("connect", body, text, "many"))
        refused = next(reply for reply in replies if reply.status != 200)
        assert code(refused) == (429, "too_many_requests")
        assert b"limit handshakes_per_second: " in refused.body
        assert refused.header("retry-after") == "1"
        assert bundle(node.ask("connect", body, text, "few"))
    line = f"reason=handshakes_per_second token={token['id']} tenant=rated environment=many"
    assert line in node.server.stderr()
    assert node.metric('refusals_total{endpoint="connect",reason="handshakes_per_second"}') > 0


def test_limits_of_a_tenant(node: Node) -> None:
    token = node.site.token("executor:*", "connect:*", tenant="small")
    node.site.admin("tenant", "limit", "small", "--environments", "1", "--sockets", "1")
    node.register(token, "one")
    assert code(node.ask("register", body_of("register"), token, "two")) == (
        503,
        "registration_conflict",
    )
    with RawExecutor(node, "one", token):
        assert code(node.ask("connect", body_of("connect"), token, "one")) == (
            429,
            "too_many_requests",
        )


def test_takeover_may_be_refused(tmp_path: Path) -> None:
    with start_node(tmp_path, "--takeover", "refuse") as node:
        node.register()
        node.register()  # offline: no conflict
        with RawExecutor(node, ENVIRONMENT) as executor:
            body = body_of("register")
            assert code(node.ask("register", body, node.site.executor_token)) == (
                503,
                "registration_conflict",
            )
            again = body_of("register", executor_public_key=executor.key)
            assert node.ask("register", again, node.site.executor_token).status == 200


def test_health_and_metrics(node: Node) -> None:
    for path in ("/livez", "/readyz"):
        assert node.get(path).status == 200
    assert node.request("HEAD /livez HTTP/1.1\r\nhost: x").body == b""
    text = node.get("/metrics").body.decode()
    for name in ("executors", "clients", "streams", "passed_on", "queued_bytes"):
        assert f"# TYPE exec_server_registry_{name} gauge" in text
    assert ENVIRONMENT not in text
    assert "stranger" not in text
    before = node.metric('requests_total{endpoint="livez",code="200"}')
    node.get("/livez")
    assert node.metric('requests_total{endpoint="livez",code="200"}') == before + 1


def test_metrics_may_have_a_port_of_their_own(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with start_node(tmp_path, "--metrics-listen", address) as node:
        assert node.get("/metrics").status == 404
        request = b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n"
        assert http(f"http://{address}", request % b"/metrics").status == 200
        assert http(f"http://{address}", request % b"/readyz").status == 404


def test_a_database_that_cannot_be_used_makes_peers_come_back(tmp_path: Path) -> None:
    with start_node(tmp_path) as node:
        token = node.site.executor_token
        holder = sqlite3.connect(tmp_path / "registry.db", isolation_level=None)
        holder.execute("BEGIN EXCLUSIVE")
        try:
            replies = at_once(1, lambda: node.ask("register", body_of("register"), token))
            assert code(replies[0]) == (502, "authentication_service_unavailable")
            eventually("no database", lambda: node.get("/readyz").status == 503, 20)
        finally:
            holder.execute("ROLLBACK")
            holder.close()
        eventually("the database is back", lambda: node.get("/readyz").status == 200, 20)
        assert node.ask("register", body_of("register"), token).status == 200
