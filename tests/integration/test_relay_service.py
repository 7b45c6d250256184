"""The relay service that tests and benchmarks use, with raw sockets as its two ends."""

from __future__ import annotations

import base64
import contextlib
import datetime
import ipaddress
import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from relay_service import (
    TEXT,
    TO_EXECUTOR,
    TO_HARNESS,
    Endpoint,
    Form,
    Kind,
    ThreadedRelayService,
    build,
    reset,
    reset_reason,
)
from wire import (
    CLOSE,
    CONTINUATION,
    PATIENCE,
    PING,
    PONG,
    Disconnected,
    Frame,
    HandshakeRefused,
    HttpReply,
    WebSocketLink,
    frame_bytes,
    http,
    reference_binary,
    scaled,
    server_environment,
)

SUITE = "Noise_hybridIK_X25519+MLKEM768_AESGCM_SHA256"
REASON_HEADER = "x-codex-rendezvous-rejection-reason"
ENVIRONMENT = "/cloud/environment/env-1"


def key(fill: int = 1) -> dict[str, str]:
    """A key object; the relay never computes with it."""
    return {
        "suite": SUITE,
        "x25519_public_key": base64.b64encode(bytes([fill]) * 32).decode(),
        "mlkem768_public_key": base64.b64encode(bytes([fill]) * 1184).decode(),
    }


def data(stream_id: str, seq: int, payload: bytes = b"ciphertext") -> bytes:
    """A data frame with few bytes in it, so that every length fits into one byte."""
    body = bytes([0x08, seq, 0x18, 1, 0x22, len(payload)]) + payload
    return build(stream_id.encode(), Kind.DATA, body)


def post(
    service: ThreadedRelayService, path: str, body: Any = None, authorization: str = "Bearer k"
) -> HttpReply:
    content = b"" if body is None else json.dumps(body).encode()
    prefix = urlsplit(service.url).path
    lines = [f"POST {prefix}{path} HTTP/1.1", "host: registry", f"content-length: {len(content)}"]
    if authorization:
        lines.append(f"authorization: {authorization}")
    head = "\r\n".join([*lines, "", ""]).encode()
    return http(service.url, head + content)


def granted(reply: HttpReply) -> Any:
    assert reply.status == 200, reply
    return json.loads(reply.body)


def code(reply: HttpReply) -> tuple[int, str]:
    return reply.status, json.loads(reply.body)["error"]["code"]


_links: list[WebSocketLink] = []


def dial(url: str) -> WebSocketLink:
    """Open a WebSocket, which the end of the test closes."""
    parts = urlsplit(url)
    _links.append(WebSocketLink(url, target=f"{parts.path}?{parts.query}"))
    return _links[-1]


@pytest.fixture(autouse=True)
def _close_links() -> Iterator[None]:
    yield
    while _links:
        _links.pop().sock.close()


def register(service: ThreadedRelayService, fill: int = 1) -> Any:
    body = {"security_profile": "noise_hybrid_ik_v1", "executor_public_key": key(fill)}
    return granted(post(service, f"{ENVIRONMENT}/register", body))


def connect(service: ThreadedRelayService, fill: int = 2) -> Any:
    body = {"harness_public_key": key(fill)}
    return granted(post(service, f"{ENVIRONMENT}/connect", body))


def validate(service: ThreadedRelayService, registration: str, text: str, fill: int = 2) -> bool:
    body = {
        "executor_registration_id": registration,
        "harness_public_key": key(fill),
        "harness_key_authorization": text,
    }
    return bool(granted(post(service, f"{ENVIRONMENT}/validate", body))["valid"])


def message(link: WebSocketLink) -> bytes:
    """The next message, which must be binary and in one frame."""
    frame = link.receive_frame(scaled(PATIENCE))
    assert (frame.opcode, frame.fin) == (0x2, True), frame
    return frame.payload


def ending(link: WebSocketLink) -> int | None:
    """The code with which the service ends this connection; None without a close frame."""
    try:
        while (frame := link.receive_frame(scaled(PATIENCE))).opcode != CLOSE:
            pass
    except Disconnected:
        return None
    return int.from_bytes(frame.payload[:2], "big")


def is_silent(link: WebSocketLink) -> bool:
    """Whether nothing has been sent before the answer to a ping, which follows in order."""
    link.send_frame(PING, b"anything?")
    return link.receive_frame(scaled(PATIENCE)) == Frame(PONG, b"anything?")


class Ends:
    """An attached executor, and clients."""

    def __init__(self, service: ThreadedRelayService) -> None:
        self.service = service
        self.registered = register(service)
        self.executor = dial(self.registered["url"])
        service.wait_for_executor("env-1")

    def client(self) -> WebSocketLink:
        return dial(connect(self.service)["url"])

    def stream(self, name: str) -> WebSocketLink:
        """A client that has opened a stream, of which the executor has heard."""
        client = self.client()
        first = build(name.encode(), Kind.RESUME)
        client.send_binary(first)
        assert message(self.executor) == first
        return client


@pytest.fixture
def service() -> Iterator[ThreadedRelayService]:
    with ThreadedRelayService() as running:
        yield running


@pytest.fixture
def ends(service: ThreadedRelayService) -> Ends:
    return Ends(service)


# ---- routing ----------------------------------------------------------------------------


def test_frames_reach_the_owner_of_their_stream_unchanged(ends: Ends) -> None:
    one, two = ends.stream("one"), ends.stream("two")
    # Known fields in an unusual order, fields that nobody knows, a version with a long varint.
    odd = b"\x12\x03two" + b"\xa2\x06\x02hi" + b"\x2a\x07\x18\x01\x22\x03abc" + b"\x08\x81\x00"
    for frame in (data("one", 0), odd, data("one", 1)):
        ends.executor.send_binary(frame)
    assert [message(one), message(one)] == [data("one", 0), data("one", 1)]
    assert message(two) == odd
    two.send_binary(odd)
    assert message(ends.executor) == odd


def test_fragments_of_a_frame_are_put_together(ends: Ends) -> None:
    one = ends.stream("one")
    frame = data("one", 0)
    one.send_fragments([frame[:3], frame[3:10], frame[10:]], opcode=0x2)
    assert message(ends.executor) == frame


def test_a_client_speaks_only_in_its_own_stream(ends: Ends) -> None:
    one, two = ends.stream("one"), ends.client()
    two.send_binary(data("one", 0))
    assert reset_reason(message(two)) == "stream_id_in_use"
    one.send_binary(data("other", 0))
    assert reset_reason(message(one)) == "stream_id_not_owned"
    assert is_silent(ends.executor)
    one.send_binary(data("one", 0))
    assert message(ends.executor) == data("one", 0)


def test_an_unreadable_frame_resets_both_ends(ends: Ends) -> None:
    one = ends.stream("one")
    one.send_binary(b"\xff\xff")
    assert message(one) == reset(b"one", "unreadable_frame")
    assert message(ends.executor) == reset(b"one", "unreadable_frame")


def test_each_side_hears_that_the_other_has_left(ends: Ends) -> None:
    one, two = ends.stream("one"), ends.stream("two")
    one.sock.close()
    assert message(ends.executor) == reset(b"one", "harness_disconnected")
    ends.executor.sock.close()
    assert message(two) == reset(b"two", "executor_disconnected")
    # The stream is dead for good, also when the executor comes back.
    again = dial(ends.registered["url"])
    ends.service.wait_for_executor("env-1")
    two.send_binary(data("two", 0))
    assert message(two) == reset(b"two", "executor_disconnected")
    assert is_silent(again)


def test_a_stream_that_was_reset_is_not_reset_again(ends: Ends) -> None:
    one = ends.stream("one")
    ends.executor.send_binary(reset(b"one", "noise_relay_protocol_error"))
    assert reset_reason(message(one)) == "noise_relay_protocol_error"
    one.sock.close()
    ends.service.until(lambda: not ends.service.service.harnesses("env-1"))
    assert is_silent(ends.executor)


def test_a_new_executor_socket_replaces_the_old_one(ends: Ends) -> None:
    one = ends.stream("one")
    again = dial(ends.registered["url"])
    assert ending(ends.executor) == 4001
    assert message(one) == reset(b"one", "executor_disconnected")
    two = ends.client()
    two.send_binary(data("two", 0))
    assert message(again) == data("two", 0)


def test_a_message_above_the_limit_ends_the_connection(ends: Ends) -> None:
    one = ends.stream("one")
    one.send_binary(build(b"one", Kind.DATA, bytes(262_144)))
    assert ending(one) == 1009
    assert message(ends.executor) == reset(b"one", "harness_disconnected")


def test_peers_are_pinged() -> None:
    with ThreadedRelayService(ping_seconds=0.01) as eager:
        ends = Ends(eager)
        assert ends.executor.receive_frame(scaled(PATIENCE)) == Frame(PING, b"")


# ---- registry ---------------------------------------------------------------------------


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
    assert code(post(service, f"{ENVIRONMENT}/connect", body)) == offline
    registered = register(service)
    assert code(post(service, f"{ENVIRONMENT}/connect", body)) == offline
    link = dial(registered["url"])
    service.wait_for_executor("env-1")
    bundle = connect(service)
    assert bundle["executor_public_key"] == key(1)
    assert bundle["executor_registration_id"] == registered["executor_registration_id"]
    link.sock.close()
    service.until(lambda: service.service.executor("env-1") is None)
    assert code(post(service, f"{ENVIRONMENT}/connect", body)) == offline


def test_who_may_ask_for_what() -> None:
    settings: dict[str, Any] = {"authorizations": ["Bearer good"], "environments": ["env-1"]}
    with ThreadedRelayService(prefix="/api/v1", **settings) as service:
        body = {"harness_public_key": key()}

        def ask(path: str, authorization: str = "Bearer good") -> tuple[int, str]:
            return code(post(service, path, body, authorization))

        assert ask(f"{ENVIRONMENT}/connect") == (409, "environment_offline")
        assert ask(f"{ENVIRONMENT}/connect", "Bearer bad") == (401, "invalid_token")
        assert ask(f"{ENVIRONMENT}/connect", "") == (401, "invalid_token")
        assert ask("/cloud/environment/env-2/connect") == (404, "environment_not_found")
        assert ask("/cloud/environment/a%2Fb/connect") == (400, "invalid_environment_id")
        assert ask("/elsewhere") == (404, "not_found")
        assert ask("/cloud/executor/env-1/register") == (403, "plaintext_disabled")
        assert service.requests[0].path == "/api/v1/cloud/environment/env-1/connect"


def test_a_second_executor_waits_when_takeover_is_off() -> None:
    with ThreadedRelayService(takeover=False) as service:
        Ends(service)
        body = {"security_profile": "noise_hybrid_ik_v1", "executor_public_key": key(9)}
        reply = post(service, f"{ENVIRONMENT}/register", body)
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
        f"POST {ENVIRONMENT}/connect HTTP/1.1\r\nhost: a\r\nauthorization: b\r\n"
        "content-length: 2\r\n\r\n[]"
    ).encode()
    parts = urlsplit(service.url)
    with socket.create_connection((parts.hostname, parts.port)) as sock:
        sock.sendall(request * 3)
        sock.settimeout(scaled(PATIENCE))
        received = b""
        while received.count(b"environment_offline") < 3:
            received += sock.recv(65536)
    assert received.count(b"HTTP/1.1 409 Conflict") == 3


# ---- faults of answers ------------------------------------------------------------------


def test_an_answer_can_be_replaced_a_number_of_times(service: ThreadedRelayService) -> None:
    fault = service.faults.http.answer(
        Endpoint.REGISTER, 503, code="registration_conflict", skip=1, times=2
    )
    statuses = []
    for _ in range(4):
        body = {"security_profile": "noise_hybrid_ik_v1", "executor_public_key": key()}
        statuses.append(post(service, f"{ENVIRONMENT}/register", body).status)
    assert statuses == [200, 503, 503, 200]
    assert fault.hits == 2


def test_an_answer_can_be_rewritten(service: ThreadedRelayService) -> None:
    service.faults.http.rewrite(Endpoint.REGISTER, lambda body: {**body, "url": "ws://x"})
    assert register(service)["url"] == "ws://x"
    assert register(service)["url"] != "ws://x"


def test_an_answer_can_be_cut_spoilt_or_slow(service: ThreadedRelayService) -> None:
    path, body = f"{ENVIRONMENT}/connect", {"harness_public_key": key()}
    service.faults.http.cut(Endpoint.CONNECT)
    with pytest.raises(Disconnected):
        post(service, path, body)
    service.faults.http.garbage(Endpoint.CONNECT)
    with pytest.raises((ValueError, IndexError)):
        post(service, path, body)
    service.faults.http.drip(Endpoint.CONNECT, 0.0, piece=3)
    assert code(post(service, path, body)) == (409, "environment_offline")


def test_a_hanging_request_is_taken_but_not_answered(service: ThreadedRelayService) -> None:
    fault = service.faults.http.hang(Endpoint.VALIDATE)
    parts = urlsplit(service.url)
    head = f"POST {ENVIRONMENT}/validate HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n"
    with socket.create_connection((parts.hostname, parts.port)) as sock:
        sock.sendall(head.encode())
        service.until(lambda: fault.hits)
        # Another connection is served meanwhile, so the first one would have been answered.
        assert post(service, f"{ENVIRONMENT}/validate", {}).status == 400
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.recv(1)


def test_an_upgrade_can_be_refused_with_a_reason(service: ThreadedRelayService) -> None:
    url = register(service)["url"]
    service.faults.http.reject(Endpoint.EXECUTOR_SOCKET, 503, "pod_draining")
    with pytest.raises(HandshakeRefused) as refused:
        dial(url)
    assert refused.value.status == 503
    assert refused.value.reply.header(REASON_HEADER) == "pod_draining"
    dial(url).sock.close()
    assert len(service.requests_to(Endpoint.EXECUTOR_SOCKET)) == 2


def test_the_service_can_stop_listening_for_a_while(service: ThreadedRelayService) -> None:
    service.deafen()
    with pytest.raises(ConnectionRefusedError):
        register(service)
    service.listen()
    assert register(service)["environment_id"] == "env-1"


# ---- faults of frames and sockets -------------------------------------------------------


def test_frames_can_be_dropped_doubled_and_swapped(ends: Ends) -> None:
    one = ends.stream("one")
    frames = ends.service.faults.frames
    dropped = frames.drop(direction=TO_HARNESS, kind=Kind.DATA, stream_id="one", skip=1)
    doubled = frames.duplicate(where=lambda frame: frame == data("one", 2))
    swapped = frames.swap(direction=TO_HARNESS, skip=3)
    for seq in range(6):
        ends.executor.send_binary(data("one", seq))
    sequence = [message(one) for _ in range(6)]
    assert sequence == [data("one", seq) for seq in (0, 2, 2, 4, 3, 5)]
    assert [fault.hits for fault in (dropped, doubled, swapped)] == [1, 1, 1]


def test_frames_can_be_corrupted_where_wanted(ends: Ends) -> None:
    one = ends.stream("one")
    frames = ends.service.faults.frames
    sent = data("one", 0)
    head = len(sent) - len(b"ciphertext")
    frames.corrupt_payload()
    frames.corrupt_header(skip=1)
    frames.truncate(keep=5, skip=2)
    received = []
    for _ in range(3):
        one.send_binary(sent)
        received.append(message(ends.executor))
    assert received[0][:head] == sent[:head]
    assert received[1][head:] == sent[head:]
    assert received[2] == sent[:5]
    for changed in received[:2]:
        differences = [(a ^ b).bit_count() for a, b in zip(changed, sent, strict=True)]
        assert sum(differences) == 1


def test_a_delayed_frame_keeps_its_place(ends: Ends) -> None:
    one = ends.stream("one")
    ends.service.faults.frames.delay(0.05, direction=TO_HARNESS)
    for seq in range(3):
        ends.executor.send_binary(data("one", seq))
    assert [message(one) for _ in range(3)] == [data("one", seq) for seq in range(3)]


def test_anything_can_be_sent_to_either_side(ends: Ends) -> None:
    one = ends.stream("one")
    ends.service.executor("env-1").send(b"\xffgarbage")
    assert message(ends.executor) == b"\xffgarbage"
    ends.service.harness("one").send(b"text", TEXT)
    assert one.receive_frame(scaled(PATIENCE)) == Frame(0x1, b"text")


def test_a_socket_can_be_aborted_or_closed(ends: Ends) -> None:
    one, two = ends.stream("one"), ends.stream("two")
    ends.service.harness("one").abort()
    assert ending(one) is None
    assert message(ends.executor) == reset(b"one", "harness_disconnected")
    ends.service.harness("two").close(4321, "because")
    assert ending(two) == 4321


def test_a_frozen_socket_stays_open_and_silent(ends: Ends) -> None:
    one = ends.stream("one")
    frozen = ends.service.executor("env-1")
    frozen.freeze()
    ends.executor.send_frame(PING, b"1")
    one.send_binary(data("one", 0))
    ends.service.until(lambda: len(ends.service.service.frames) == 2)
    # What was sent meanwhile is lost; the ping is read and answered after the thaw.
    frozen.thaw()
    assert ends.executor.receive_frame(scaled(PATIENCE)) == Frame(PONG, b"1")


def test_pings_can_be_swallowed(ends: Ends) -> None:
    one = ends.stream("one")
    ends.service.executor("env-1").swallow_pings()
    ends.executor.send_frame(PING, b"1")
    ends.executor.send_binary(data("one", 0))
    assert message(one) == data("one", 0)
    one.send_binary(data("one", 1))
    assert message(ends.executor) == data("one", 1)


def test_a_stalled_client_holds_up_the_executor_and_nothing_is_lost() -> None:
    with ThreadedRelayService(record=False) as service:
        ends = Ends(service)
        one = ends.stream("one")
        service.harness("one").stall()
        body = bytes([0x18, 1]) + bytes(60_000)
        frame = frame_bytes(0x2, build(b"one", Kind.DATA, body))
        sock, sent = ends.executor.sock, 0
        # Held up once the service does not read any more: far below what is offered.
        sock.setblocking(False)
        while service.executor("env-1").is_read:
            assert sent < 64 * 1024 * 1024
            with contextlib.suppress(BlockingIOError):
                sent += sock.send(frame[sent % len(frame) :])
        service.harness("one").release()
        for _ in range(sent // len(frame)):
            assert message(one) == build(b"one", Kind.DATA, body)


def test_traffic_is_recorded_as_it_arrived(ends: Ends) -> None:
    one = ends.stream("one")
    ends.service.faults.frames.drop(direction=TO_EXECUTOR)
    one.send_binary(data("one", 0))
    ends.service.until(lambda: len(ends.service.service.frames) == 2)
    last = ends.service.frames[-1]
    assert (last.direction, last.environment_id, last.stream_id, last.kind, last.data) == (
        TO_EXECUTOR,
        "env-1",
        "one",
        Kind.DATA,
        data("one", 0),
    )


# ---- other forms ------------------------------------------------------------------------


def test_a_plain_client_is_joined_to_its_executor() -> None:
    with ThreadedRelayService(plaintext=True) as service:
        answer = granted(post(service, "/cloud/executor/env-1/register"))
        assert answer["executor_id"] == "env-1"
        executor = dial(answer["url"])
        service.wait_for_executor("env-1")
        url = granted(post(service, f"{ENVIRONMENT}/connect"))["url"]
        assert "role=harness" not in url
        client = dial(url)
        client.send_text("question")
        assert executor.receive_frame(scaled(PATIENCE)) == Frame(0x1, b"question")
        executor.send_fragments([b"an", b"swer"], opcode=0x2)
        assert client.receive_frame(scaled(PATIENCE)) == Frame(0x2, b"an", fin=False)
        assert client.receive_frame(scaled(PATIENCE)) == Frame(CONTINUATION, b"swer")
        with pytest.raises(HandshakeRefused):
            dial(url)
        client.sock.close()
        assert ending(executor) == 1001


def test_plain_relay_frames_are_routed_by_stream() -> None:
    with ThreadedRelayService(plaintext=True, executor_form=Form.RELAY) as service:
        executor = dial(granted(post(service, f"{ENVIRONMENT}/register"))["url"])
        service.wait_for_executor("env-1")
        url = service.plain_url("env-1")
        assert "role=harness" in url
        clients = [dial(url), dial(url)]
        for number, client in enumerate(clients):
            client.send_binary(data(f"s{number}", 0))
            assert message(executor) == data(f"s{number}", 0)


def test_a_direct_executor_is_joined_to_its_client(service: ThreadedRelayService) -> None:
    body = {"transport": "direct_jsonrpc_v1"}
    answer = granted(
        post(service, f"{ENVIRONMENT}/direct/register", body, "AWS4-HMAC-SHA256 Credential=x")
    )
    assert answer["transport"] == "direct_jsonrpc_v1"
    executor = dial(answer["url"])
    service.wait_for_executor("env-1")
    client = dial(service.plain_url("env-1"))
    big = b"x" * (3 * 1024 * 1024)
    client.send_text(big)
    assert executor.receive_frame(scaled(PATIENCE)) == Frame(0x1, big)
    executor.sock.close()
    assert ending(client) == 1001


# ---- the service as a whole -------------------------------------------------------------


def _certificate(directory: Path) -> Path:
    """A self-signed certificate for the loopback address, with its key."""
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "relay service")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(private, hashes.SHA256())
    )
    path = directory / "both.pem"
    secret = private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path.write_bytes(secret + certificate.public_bytes(serialization.Encoding.PEM))
    return path


def _over_tls(port: int, trust: ssl.SSLContext, request: bytes, expected: bytes) -> bytes:
    raw = socket.create_connection(("127.0.0.1", port))
    with trust.wrap_socket(raw, server_hostname="127.0.0.1") as sock:
        sock.settimeout(scaled(PATIENCE))
        sock.sendall(request)
        received = b""
        while expected not in received:
            piece = sock.recv(65536)
            assert piece, received
            received += piece
        return received


def test_everything_works_over_tls(tmp_path: Path) -> None:
    path = _certificate(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(path)
    trust = ssl.create_default_context(cafile=path)
    with ThreadedRelayService(tls=tls) as service:
        port = urlsplit(service.url).port
        assert port is not None
        body = {"security_profile": "noise_hybrid_ik_v1", "executor_public_key": key()}
        content = json.dumps(body).encode()
        head = (
            f"POST {ENVIRONMENT}/register HTTP/1.1\r\nhost: a\r\nauthorization: b\r\n"
            f"content-length: {len(content)}\r\n\r\n"
        ).encode()
        answer = _over_tls(port, trust, head + content, b'"}')
        url = json.loads(answer.partition(b"\r\n\r\n")[2])["url"]
        assert url.startswith("wss://127.0.0.1:")
        parts = urlsplit(url)
        upgrade = (
            f"GET {parts.path}?{parts.query} HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\n"
            "upgrade: websocket\r\nsec-websocket-version: 13\r\n"
            f"sec-websocket-key: {base64.b64encode(bytes(16)).decode()}\r\n\r\n"
        ).encode()
        # A frame right behind the request must not get lost on the way to the other parser.
        ping = frame_bytes(PING, b"hello")
        received = _over_tls(port, trust, upgrade + ping, b"\x8a\x05hello")
        assert received.startswith(b"HTTP/1.1 101 ")


def test_an_ended_service_leaves_nothing_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with ThreadedRelayService() as service:
        ends = Ends(service)
        one = ends.stream("one")
        idle = socket.create_connection(("127.0.0.1", urlsplit(service.url).port or 0))
        # Also those of the requests before have ended by then.
        service.until(lambda: service.service.connections == 3)
        ends.executor.send_frame(PING, b"")
    assert ending(one) == 1001
    for sock in (idle, one.sock, ends.executor.sock):
        sock.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_the_program_serves_until_its_input_ends() -> None:
    tests = str(Path(__file__).resolve().parent.parent)
    process = subprocess.Popen(
        [sys.executable, "-m", "relay_service", "--plaintext"],
        env={**os.environ, "PYTHONPATH": tests},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        assert process.stdin is not None
        url = json.loads(process.stdout.readline())["url"]
        request = b"POST /cloud/executor/e/register HTTP/1.1\r\nhost: a\r\nauthorization: b\r\n\r\n"
        assert http(url, request).status == 200
        process.stdin.close()
        assert process.wait(scaled(PATIENCE)) == 0


@pytest.mark.reference
@pytest.mark.skipif(reference_binary() is None, reason="there is no reference binary")
def test_the_reference_executor_attaches(service: ThreadedRelayService) -> None:
    command = [str(reference_binary()), "exec-server", "--remote", service.url]
    process = subprocess.Popen(
        [*command, "--environment-id", "env-1"],
        env=server_environment("reference", {"CODEX_API_KEY": service.token}),
        stdin=subprocess.DEVNULL,
    )
    try:
        attached = service.wait_for_executor("env-1")
        assert [request.header("authorization") for request in service.requests] == [
            f"Bearer {service.token}",
            None,
        ]
        # A stream without a handshake is answered by the executor itself.
        client = dial(connect(service)["url"])
        client.send_binary(data("one", 0))
        assert reset_reason(message(client)) == "noise_relay_protocol_error"
        client.sock.close()
        attached.abort()
        service.wait_for_executor("env-1")
    finally:
        process.terminate()
        assert process.wait(scaled(PATIENCE)) == 0
