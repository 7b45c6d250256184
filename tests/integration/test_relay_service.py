"""The relay service that tests and benchmarks use: routing, older forms, its life as a whole."""

from __future__ import annotations

import base64
import json
import os
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.relay_service import (
    TO_EXECUTOR,
    Form,
    Kind,
    ThreadedRelayService,
    build,
    reset,
    reset_reason,
)
from tests.support.client import (
    CONTINUATION,
    DEFAULT_TIMEOUT,
    PING,
    Frame,
    HandshakeRefused,
    frame_bytes,
    http,
    reference_binary,
    scaled,
    server_environment,
)
from tests.support.raw_servers import make_certificate
from tests.support.relay import post
from tests.support.relay_ends import (
    ENVIRONMENT_PATH,
    Ends,
    connect,
    data,
    dial,
    ending,
    granted,
    is_silent,
    key,
    message,
)

pytestmark = pytest.mark.usefixtures("closed_links")


# ---- routing --------------------------------------------------------------------------


@pytest.mark.quick
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
        assert ends.executor.receive_frame(scaled(DEFAULT_TIMEOUT)) == Frame(PING, b"")


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


# ---- other forms ----------------------------------------------------------------------


def test_a_plain_client_is_joined_to_its_executor() -> None:
    with ThreadedRelayService(plaintext=True) as service:
        answer = granted(post(service, "/cloud/executor/env-1/register"))
        assert answer["executor_id"] == "env-1"
        executor = dial(answer["url"])
        service.wait_for_executor("env-1")
        url = granted(post(service, f"{ENVIRONMENT_PATH}/connect"))["url"]
        assert "role=harness" not in url
        client = dial(url)
        client.send_text("question")
        assert executor.receive_frame(scaled(DEFAULT_TIMEOUT)) == Frame(0x1, b"question")
        executor.send_fragments([b"an", b"swer"], opcode=0x2)
        assert client.receive_frame(scaled(DEFAULT_TIMEOUT)) == Frame(0x2, b"an", fin=False)
        assert client.receive_frame(scaled(DEFAULT_TIMEOUT)) == Frame(CONTINUATION, b"swer")
        with pytest.raises(HandshakeRefused):
            dial(url)
        client.sock.close()
        assert ending(executor) == 1001


def test_plain_relay_frames_are_routed_by_stream() -> None:
    with ThreadedRelayService(plaintext=True, executor_form=Form.RELAY) as service:
        executor = dial(granted(post(service, f"{ENVIRONMENT_PATH}/register"))["url"])
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
        post(service, f"{ENVIRONMENT_PATH}/direct/register", body, "AWS4-HMAC-SHA256 Credential=x")
    )
    assert answer["transport"] == "direct_jsonrpc_v1"
    executor = dial(answer["url"])
    service.wait_for_executor("env-1")
    client = dial(service.plain_url("env-1"))
    big = b"x" * (3 * 1024 * 1024)
    client.send_text(big)
    assert executor.receive_frame(scaled(DEFAULT_TIMEOUT)) == Frame(0x1, big)
    executor.sock.close()
    assert ending(client) == 1001


# ---- the service as a whole -----------------------------------------------------------


def _over_tls(port: int, trust: ssl.SSLContext, request: bytes, expected: bytes) -> bytes:
    raw = socket.create_connection(("127.0.0.1", port))
    with trust.wrap_socket(raw, server_hostname="127.0.0.1") as sock:
        sock.settimeout(scaled(DEFAULT_TIMEOUT))
        sock.sendall(request)
        received = b""
        while expected not in received:
            piece = sock.recv(65536)
            assert piece, received
            received += piece
        return received


def test_everything_works_over_tls(tmp_path: Path) -> None:
    roots, tls = make_certificate(tmp_path, "127.0.0.1")
    trust = ssl.create_default_context(cafile=roots)
    with ThreadedRelayService(tls=tls) as service:
        port = urlsplit(service.url).port
        assert port is not None
        body = {"security_profile": "noise_hybrid_ik_v1", "executor_public_key": key()}
        content = json.dumps(body).encode()
        head = (
            f"POST {ENVIRONMENT_PATH}/register HTTP/1.1\r\nhost: a\r\nauthorization: b\r\n"
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
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.relay_service", "--plaintext"],
        cwd=Path(__file__).resolve().parents[2],
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
        assert process.wait(scaled(DEFAULT_TIMEOUT)) == 0


@pytest.mark.reference
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
        assert process.wait(scaled(DEFAULT_TIMEOUT)) == 0
