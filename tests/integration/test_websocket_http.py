"""The WebSocket listener on the wire: HTTP requests and the upgrade."""

from __future__ import annotations

import socket
import time

import pytest
from tests.support.client import (
    TEXT,
    Client,
    Server,
    frame_bytes,
    http,
    scaled,
    start_server,
    upgrade_request,
)
from tests.support.raw_links import try_send
from tests.support.server_internals import eventually, start_patched

_MIB = 1_048_576
_STATUS = b'{"id":9,"method":"environment/status"}'
_READY = b'{"id":9,"result":{"status":"ready"}}'


@pytest.mark.parametrize(
    ("request_line", "headers", "status", "body"),
    [
        ("GET /readyz", [], 200, b""),
        ("HEAD /readyz", [], 200, b""),
        ("GET /readyz?x=1", [], 200, b""),
        ("POST /readyz", [], 405, b""),
        ("GET /healthz", [], 404, b""),
        ("POST /healthz", [], 404, b""),
        ("POST /", [], 405, b"Request method must be `GET`"),
        ("GET /", [], 400, b"Connection header did not include 'upgrade'"),
        ("HEAD /", [], 405, b""),
        ("GET /", ["Connection: upgrade"], 400, b"`Upgrade` header did not include 'websocket'"),
        (
            "GET /",
            ["Connection: upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 12"],
            400,
            b"`Sec-WebSocket-Version` header did not include '13'",
        ),
        (
            "GET /",
            ["Connection: upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"],
            400,
            b"`Sec-WebSocket-Key` header missing",
        ),
        ("GET /readyz", ["Origin: http://127.0.0.1"], 403, b""),
        ("GET /nope", ["Origin: null"], 403, b""),
        ("POST /", ["Origin:"], 403, b""),
        ("GET /", ["no header at all"], 400, b""),
        ("GET", [], 400, b""),
    ],
)
def test_http_answers(
    server: Server, request_line: str, headers: list[str], status: int, body: bytes
) -> None:
    lines = [f"{request_line} HTTP/1.1", "Host: 127.0.0.1", *headers, "", ""]
    reply = server.http("\r\n".join(lines).encode())
    assert (reply.status, reply.body) == (status, body)
    if not request_line.startswith("HEAD"):
        assert reply.header("content-length") == str(len(body))
    if body:
        assert reply.header("content-type") == "text/plain; charset=utf-8"
    if request_line == "POST /readyz":
        assert reply.header("allow") == "GET,HEAD"


@pytest.mark.quick
def test_several_requests_on_one_connection(server: Server) -> None:
    with server.dial() as sock:
        sock.sendall(b"GET /readyz HTTP/1.1\r\n\r\n" * 3 + b"GET /x HTTP/1.1\r\n\r\n")
        received = b""
        while received.count(b"HTTP/1.1 ") < 4 or not received.endswith(b"\r\n\r\n"):
            received += sock.recv(65536)
        assert received.count(b"HTTP/1.1 200 OK") == 3
        sock.sendall(upgrade_request() + frame_bytes(TEXT, _STATUS))
        answer = b""
        while b"client must call initialize" not in answer:
            answer += sock.recv(65536)
        assert answer.startswith(b"HTTP/1.1 101 ")


def test_thousands_of_requests_at_once_are_no_burden(server: Server) -> None:
    """Enough for any recursion to show."""
    request = b"GET /readyz HTTP/1.1\r\n\r\n"
    with server.dial() as sock:
        sock.sendall(request * 5000)
        received = 0
        while received < 5000:
            received += sock.recv(_MIB).count(b"HTTP/1.1 200")
    assert server.http(request).status == 200


def test_a_peer_that_does_not_read_its_answers_is_hung_up_on() -> None:
    """Long before the time for its upgrade is over: only its full buffer ends it."""
    request = b"GET /readyz HTTP/1.1\r\n\r\n"
    constants = {
        "net.websocket.server.HANDSHAKE_SECONDS": 3600.0,
        "net.websocket.socket.CLOSE_SECONDS": 0.1,
    }
    with start_patched(constants) as server, socket.socket() as sock:
        # Otherwise the kernel keeps up to tcp_rmem for the client, often 32 MiB.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        eventually("hung up on", lambda: not try_send(sock, request * 1000), timeout=40)
        assert server.http(request).status == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "http://127.0.0.1", "null", ""])
def test_origin_is_refused_before_anything_else(server: Server, origin: str) -> None:
    reply = http(server.url, upgrade_request("/", [("Origin", origin)]))
    assert (reply.status, reply.body) == (403, b"")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:80", "localhost:7700", "[::1]:1"])
def test_own_hosts_are_accepted(server: Server, host: str) -> None:
    assert server.http(upgrade_request(host=host)).status == 101


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7700", "127.0.0.1.evil.example"])
def test_foreign_hosts_are_refused(server: Server, host: str) -> None:
    """A web page that rebinds its name to our address is its own origin, and may send none."""
    assert server.http(upgrade_request(host=host)).status == 403
    readyz = f"GET /readyz HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
    assert server.http(readyz).status == 403


def test_allowed_hosts_are_accepted() -> None:
    with start_server("ours", "--allow-host", "Box.Example", "--allow-host", "two") as server:
        for host in ("box.example", "BOX.example:7700", "two:1"):
            assert server.http(upgrade_request(host=host)).status == 101
        assert server.http(upgrade_request(host="three")).status == 403


@pytest.mark.parametrize("ended", [True, False])
def test_long_heads_are_refused(server: Server, ended: bool) -> None:
    """The answer arrives although the client is still sending, and sends no end."""
    head = b"GET / HTTP/1.1\r\nX: " + b"x" * 400_000 + (b"\r\n\r\n" if ended else b"")
    assert server.http(head).status == 431


def test_head_in_small_pieces(server: Server) -> None:
    with server.dial() as sock:
        for byte in upgrade_request():
            sock.send(bytes([byte]))
        assert sock.recv(1000).startswith(b"HTTP/1.1 101 ")


def test_no_extension_or_subprotocol_is_agreed_on(server: Server) -> None:
    headers = [
        ("Sec-WebSocket-Extensions", "permessage-deflate"),
        ("Sec-WebSocket-Protocol", "chat"),
    ]
    link = server.link(headers=headers)
    assert link.handshake.header("sec-websocket-extensions") is None
    assert link.handshake.header("sec-websocket-protocol") is None
    link.close()


@pytest.mark.measured
def test_delays_of_the_kernel_are_switched_off(client: Client) -> None:
    """Without TCP_NODELAY each exchange of two small messages waits for 40 ms."""
    began = time.monotonic()
    for _ in range(50):
        client.request("environment/status")
        client.call("environment/status")
    assert time.monotonic() - began < scaled(1)
