"""Remote mode without encryption: only when asked for, and never without a warning."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.relay_service import Endpoint, Form, ThreadedRelayService
from tests.support.client import TEXT, Client, b64, uri
from tests.support.relay import (
    ENVIRONMENT,
    QUICK_BACKOFF,
    RESET_REASON,
    PlainLink,
    RelayLink,
    dial,
    exit_code,
    post,
    run_executor,
    start_executor,
    wait_attached,
)

from exec_server.relay.frames import Frame, Kind, encode

READY = {"status": "ready"}
BEARER = "CODEX_EXEC_SERVER_REMOTE_BEARER_TOKEN"
WARNING = (
    "Warning: --relay-security {} is not encrypted: the operator of the relay can read and change "
    "everything, and run commands here\n"
)
TEXT_FORM = ("--relay-security", "text")
PLAIN_FORM = ("--relay-security", "plain")
REGISTERED = f"codex exec-server remote {{0}} registered with {{0}}_id {ENVIRONMENT}\n"


def _executor_id(service: ThreadedRelayService) -> tuple[str, ...]:
    return ("--remote", service.url, "--executor-id", ENVIRONMENT)


@pytest.fixture
def service() -> Iterator[ThreadedRelayService]:
    with ThreadedRelayService(plaintext=True) as running:
        yield running


# ---- messages as text -------------------------------------------------------------------


@pytest.mark.quick
def test_the_oldest_command_line_works(service: ThreadedRelayService) -> None:
    env = {BEARER: "token-1", "CODEX_API_KEY": "not used"}
    with start_executor(service, *_executor_id(service), "--name", "old", env=env) as executor:
        request = service.requests[0]
        assert request.target == f"/cloud/executor/{ENVIRONMENT}/register"
        assert request.header("authorization") == "Bearer token-1"
        assert request.body == b""
        with Client(dial(service.plain_url(ENVIRONMENT))) as client:
            client.initialize()
            assert client.run(["echo", "hello"]).stdout == b"hello\n"
            client.websocket.send_binary(b'{"id": 50, "method": "environment/status"}')
            assert client.result(50) == READY
            assert {frame.opcode for frame in client.websocket.frames} == {TEXT}
            client.link.send_text(b"no JSON")
            while not client.malformed:
                client.receive()
            assert client.call("environment/status") == READY
        assert executor.stderr() == WARNING.format("text") + REGISTERED.format("executor")


@pytest.mark.parametrize(("token", "state"), [(None, "is not set"), ("", "is empty")])
def test_the_oldest_command_line_needs_its_token(
    service: ThreadedRelayService, token: str | None, state: str
) -> None:
    ended = run_executor(service, *_executor_id(service), env={BEARER: token})
    assert ended.returncode == 1
    assert ended.stderr.endswith(
        "Error: executor registry authentication error: executor registry bearer token "
        f"environment variable `{BEARER}` {state}\n"
    )
    assert service.requests == []


def test_registration_is_repeated_before_every_attempt(service: ThreadedRelayService) -> None:
    where, env = _executor_id(service), {BEARER: "token-1"}
    with start_executor(service, *where, env=env, preparation=QUICK_BACKOFF) as executor:
        with Client(dial(service.plain_url(ENVIRONMENT))) as client:
            client.initialize()
            client.start(["cat"], process_id="cat", pipeStdin=True)
        service.until(lambda: len(service.service.requests_to(Endpoint.EXECUTOR_SOCKET)) == 2)
        wait_attached(service, executor)
        assert len(service.requests_to(Endpoint.REGISTER)) == 2
        with Client(dial(service.plain_url(ENVIRONMENT))) as again:
            again.initialize(client.session_id)
            assert again.write("cat", b"hello", "w") == "accepted"


def test_errors_are_worded_for_the_older_name(service: ThreadedRelayService) -> None:
    service.faults.http.answer(Endpoint.REGISTER, 401, code="invalid_token")
    ended = run_executor(service, *_executor_id(service), env={BEARER: "token-1"})
    assert ended.returncode == 1
    assert ended.stderr.endswith(
        "Error: executor registry authentication error: executor registry authentication failed "
        "(401 Unauthorized): invalid token\n"
    )
    assert "token-1" not in ended.stderr


def test_the_text_form_can_be_asked_for_by_its_name(service: ThreadedRelayService) -> None:
    with (
        start_executor(service, *TEXT_FORM) as executor,
        Client(dial(service.plain_url(ENVIRONMENT))) as client,
    ):
        client.initialize()
        assert client.call("environment/status") == READY
        assert executor.stderr() == WARNING.format("text") + REGISTERED.format("executor")


# ---- bare messages in relay frames ------------------------------------------------------


@pytest.fixture
def plain() -> Iterator[ThreadedRelayService]:
    with (
        ThreadedRelayService(plaintext=True, executor_form=Form.RELAY) as service,
        start_executor(service, *PLAIN_FORM) as executor,
    ):
        yield service
        assert executor.stderr() == WARNING.format("plain") + REGISTERED.format("environment")


def _status(number: int) -> bytes:
    return json.dumps({"id": number, "method": "environment/status"}).encode()


def test_streams_begin_with_their_first_message(plain: ThreadedRelayService) -> None:
    request = plain.requests[0]
    assert request.target == f"/cloud/environment/{ENVIRONMENT}/register"
    assert request.body == b""
    clients = [Client(PlainLink(plain)) for _ in range(5)]
    for number, client in enumerate(clients):
        client.initialize()
        client.start(["echo", str(number)], process_id="p")
    for number, client in enumerate(clients):
        assert client.collect("p").stdout == f"{number}\n".encode()
        client.close()


def test_numbers_are_not_looked_at_and_segments_put_together(plain: ThreadedRelayService) -> None:
    with PlainLink(plain) as link:
        client = Client(link)
        client.initialize()
        link.send_kind(Kind.DATA, _status(50), seq=4_000_000_000)
        assert client.result(50) == READY
        link.send_kind(Kind.DATA, _status(51), seq=0)
        assert client.result(51) == READY
        message = _status(52)
        for index, piece in enumerate((message[:10], message[10:11], message[11:])):
            link.send_kind(Kind.DATA, piece, seq=9, segment_index=index, segment_count=3)
        assert client.result(52) == READY


def test_bad_frames_are_dropped_and_bad_messages_end_the_stream(
    plain: ThreadedRelayService,
) -> None:
    with PlainLink(plain) as link, PlainLink(plain) as other:
        client, neighbour = Client(link), Client(other)
        client.initialize()
        neighbour.initialize()
        executor = plain.executor(ENVIRONMENT)
        for frame in (b"", b"\xff garbage", encode(Frame(link.stream_id, Kind.RESET))):
            executor.send(frame)
        for kind in (Kind.RESUME, Kind.ACK, Kind.HEARTBEAT):
            link.send_kind(kind)
        link.send_kind(Kind.HANDSHAKE, b"not in this form")
        assert client.call("environment/status") == READY
        link.send_kind(Kind.DATA, b"x", segment_index=1, segment_count=2)
        assert link.wait_reset() == RESET_REASON
        assert neighbour.call("environment/status") == READY


def test_a_session_goes_on_in_another_stream(plain: ThreadedRelayService) -> None:
    with PlainLink(plain) as link:
        client = Client(link)
        client.initialize()
        client.start(["cat"], process_id="cat", pipeStdin=True)
        link.send_kind(Kind.RESET, reason="enough")
        assert link.drain() == []
        with PlainLink(plain) as second:
            again = Client(second)
            again.initialize(client.session_id)
            assert again.write("cat", b"hello", "w") == "accepted"


def test_large_messages_pass_both_ways(plain: ThreadedRelayService, tmp_path: Path) -> None:
    content = os.urandom(1_048_576) * 8
    with Client(PlainLink(plain)) as client:
        client.initialize()
        path = uri(tmp_path / "file")
        params = {"path": path, "dataBase64": b64(content)}
        assert client.call("fs/writeFile", params, timeout=20) == {}
        answer = client.call("fs/readFile", {"path": path}, timeout=20)
        assert base64.b64decode(answer["dataBase64"]) == content


def test_at_most_128_streams_are_served(plain: ThreadedRelayService) -> None:
    links = [PlainLink(plain) for _ in range(128)]
    clients = [Client(link) for link in links]
    asked = [client.request("environment/status") for client in clients]
    for client, request in zip(clients, asked, strict=True):
        assert "error" in client.answer(request)  # it is not initialized, but it is there
    with PlainLink(plain) as one_more:
        one_more.send_text(_status(1))
        assert one_more.wait_reset() == RESET_REASON
    for link in links:
        link.close()


# ---- never by accident ------------------------------------------------------------------


def test_a_registry_may_not_talk_an_executor_out_of_encryption() -> None:
    with ThreadedRelayService(plaintext=True) as service:
        service.faults.http.rewrite(
            Endpoint.REGISTER,
            lambda answer: {"environment_id": answer["environment_id"], "url": answer["url"]},
        )
        ended = run_executor(service)
        assert ended.returncode == 1
        assert service.requests_to(Endpoint.EXECUTOR_SOCKET) == []


def test_an_encrypting_executor_does_not_take_plain_messages() -> None:
    with (
        ThreadedRelayService() as service,
        start_executor(service) as executor,
        RelayLink(service, handshake=False) as link,
    ):
        link.send_kind(Kind.DATA, _status(1))
        assert link.wait_reset() == RESET_REASON
        assert executor.stderr() == ""


@pytest.mark.parametrize("flags", [TEXT_FORM, PLAIN_FORM])
def test_a_registry_that_wants_encryption_refuses(flags: tuple[str, ...]) -> None:
    with (
        ThreadedRelayService() as service,
        start_executor(service, *flags, attached=False) as executor,
    ):
        assert exit_code(executor) == 1
        assert "(403 Forbidden): this registry serves encrypted streams only" in executor.stderr()


def test_clients_that_encrypt_are_told_that_there_is_no_key(plain: ThreadedRelayService) -> None:
    body: dict[str, object] = {"harness_public_key": {}}
    assert post(plain, f"/cloud/environment/{ENVIRONMENT}/connect", body).status in (400, 409)
