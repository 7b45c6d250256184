"""The HTTP side of the listener: endpoints, upgrade errors, Origin and Host."""

from __future__ import annotations

import socket

import pytest

from tests.support.client import (
    TEXT,
    HandshakeRefused,
    HttpReply,
    Server,
    frame_bytes,
    scaled,
    upgrade_request,
)

pytestmark = pytest.mark.quick

_TEXT = "text/plain; charset=utf-8"


def _request(line: str, *headers: str) -> bytes:
    return "\r\n".join([f"{line} HTTP/1.1", "Host: 127.0.0.1", *headers, "", ""]).encode()


_UPGRADE = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: AAECAwQFBgcICQoLDA0ODw==",
)


def _without(name: str) -> tuple[str, ...]:
    return tuple(header for header in _UPGRADE if not header.startswith(name + ":"))


def _check(reply: HttpReply, status: int, body: str) -> None:
    assert (reply.status, reply.body.decode()) == (status, body)
    assert reply.header("content-length") == str(len(body))
    assert reply.header("content-type") == (_TEXT if body else None)


_REPLIES = [
    ("ready", _request("GET /readyz"), 200, ""),
    ("ready-query", _request("GET /readyz?x=1"), 200, ""),
    ("ready-post", _request("POST /readyz", "Content-Length: 0"), 405, ""),
    ("ready-delete", _request("DELETE /readyz"), 405, ""),
    ("ready-slash", _request("GET /readyz/"), 404, ""),
    ("health", _request("GET /healthz"), 404, ""),
    ("other-path", _request("GET /anything"), 404, ""),
    ("other-path-post", _request("POST /anything", "Content-Length: 0"), 404, ""),
    ("other-path-upgrade", _request("GET /ws", *_UPGRADE), 404, ""),
    ("ready-origin", _request("GET /readyz", "Origin: http://127.0.0.1"), 403, ""),
    ("other-path-origin", _request("GET /anything", "origin: x"), 403, ""),
    ("upgrade-origin", _request("GET /", "Origin: null", *_UPGRADE), 403, ""),
    ("upgrade-empty-origin", _request("GET /", "Origin:", *_UPGRADE), 403, ""),
    ("root", _request("GET /"), 400, "Connection header did not include 'upgrade'"),
    ("root-post", _request("POST /", "Content-Length: 0"), 405, "Request method must be `GET`"),
    ("root-put", _request("PUT /", *_UPGRADE), 405, "Request method must be `GET`"),
    (
        "no-connection",
        _request("GET /", *_without("Connection")),
        400,
        "Connection header did not include 'upgrade'",
    ),
    (
        "wrong-connection",
        _request("GET /", "Connection: keep-alive", *_without("Connection")),
        400,
        "Connection header did not include 'upgrade'",
    ),
    (
        "no-upgrade",
        _request("GET /", *_without("Upgrade")),
        400,
        "`Upgrade` header did not include 'websocket'",
    ),
    (
        "wrong-upgrade",
        _request("GET /", "Upgrade: h2c", *_without("Upgrade")),
        400,
        "`Upgrade` header did not include 'websocket'",
    ),
    (
        "no-version",
        _request("GET /", *_without("Sec-WebSocket-Version")),
        400,
        "`Sec-WebSocket-Version` header did not include '13'",
    ),
    (
        "wrong-version",
        _request("GET /", "Sec-WebSocket-Version: 8", *_without("Sec-WebSocket-Version")),
        400,
        "`Sec-WebSocket-Version` header did not include '13'",
    ),
    (
        "no-key",
        _request("GET /", *_without("Sec-WebSocket-Key")),
        400,
        "`Sec-WebSocket-Key` header missing",
    ),
]


@pytest.mark.parametrize(
    ("request_bytes", "status", "body"), [pytest.param(*row[1:], id=row[0]) for row in _REPLIES]
)
def test_reply(server: Server, request_bytes: bytes, status: int, body: str) -> None:
    _check(server.http(request_bytes), status, body)


def test_head_of_readyz(server: Server) -> None:
    reply = server.http(_request("HEAD /readyz"))
    assert (reply.status, reply.header("content-length")) == (200, "0")


def test_405_of_readyz_says_what_is_allowed(server: Server) -> None:
    assert server.http(_request("PUT /readyz")).header("allow") == "GET,HEAD"


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param(_UPGRADE, id="plain"),
        pytest.param(("CONNECTION: keep-alive, Upgrade", *_without("Connection")), id="list"),
        pytest.param(("upgrade: WebSocket", *_without("Upgrade")), id="case"),
        pytest.param((*_UPGRADE, "Sec-WebSocket-Extensions: permessage-deflate"), id="extension"),
        pytest.param((*_UPGRADE, "Sec-WebSocket-Protocol: chat, superchat"), id="protocol"),
        pytest.param((*_UPGRADE, "Authorization: Bearer unasked"), id="unasked-token"),
    ],
)
def test_upgrade_is_accepted_without_extras(server: Server, headers: tuple[str, ...]) -> None:
    reply = server.http(_request("GET /?any=query", *headers))
    assert reply.status == 101
    assert reply.header("sec-websocket-accept") == "Bz3qJYTGdOe8gUSpLosEdiLKDrk="
    assert (reply.header("upgrade") or "").lower() == "websocket"
    assert (reply.header("connection") or "").lower() == "upgrade"
    assert reply.header("sec-websocket-extensions") is None
    assert reply.header("sec-websocket-protocol") is None


def _dial(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("ws://").rsplit(":", 1)
    return socket.create_connection((host, int(port)), scaled(5))


def test_request_in_small_pieces(server: Server) -> None:
    with _dial(server) as sock:
        for byte in upgrade_request():
            sock.sendall(bytes([byte]))
        assert sock.recv(100).startswith(b"HTTP/1.1 101 ")


def test_keep_alive_serves_a_second_request(server: Server) -> None:
    with _dial(server) as sock:
        for _ in range(2):
            sock.sendall(_request("GET /readyz"))
            reply = b""
            while b"\r\n\r\n" not in reply:
                reply += sock.recv(1000)
            assert reply.startswith(b"HTTP/1.1 200 ")


def test_message_right_behind_the_upgrade(server: Server) -> None:
    with _dial(server) as sock:
        message = b'{"id":1,"method":"no/such"}'
        sock.sendall(upgrade_request() + frame_bytes(TEXT, message))
        received = b""
        while not received.endswith(b"}"):
            received += sock.recv(10000)
        assert b"exec-server stub does not implement `no/such` yet" in received


def test_foreign_host_is_refused(server: Server, kind: str) -> None:
    if kind == "reference":
        pytest.skip("by choice only ours refuses it: a web page could rebind its DNS name to us")
    reply = server.http(upgrade_request(host="attacker.example"))
    assert 400 <= reply.status < 500


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST:80", "[::1]:1"])
def test_loopback_host_is_accepted(server: Server, host: str) -> None:
    assert server.http(upgrade_request(host=host)).status == 101


def test_refused_handshake_is_seen_by_the_client(server: Server) -> None:
    with pytest.raises(HandshakeRefused) as refusal:
        server.link(target="/nope")
    assert refusal.value.status == 404
