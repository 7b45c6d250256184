"""The client's side of the handshake, without a socket; `test_client` has the rest."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode

import pytest

from exec_server.errors import ConnectFailed
from exec_server.net.http1 import HEAD_BYTES
from exec_server.net.websocket.upgrade import check_answer, new_key, upgrade_request

KEY = b"dGhlIHNhbXBsZSBub25jZQ=="  # of RFC 6455, 1.3
ACCEPT = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="


def test_keys_are_random() -> None:
    assert re.fullmatch(rb"[A-Za-z0-9+/]{22}==", new_key())
    assert new_key() != new_key()


def test_the_answer_of_the_specification_is_accepted() -> None:
    digest = hashlib.sha1(KEY + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
    assert b64encode(digest).decode() == ACCEPT
    lines = ["HTTP/1.1 101 Switching Protocols", "Upgrade: websocket", "Connection: Upgrade"]
    check_answer("\r\n".join([*lines, f"Sec-WebSocket-Accept: {ACCEPT}"]).encode(), KEY)
    with pytest.raises(ConnectFailed, match="key mismatch"):
        check_answer("\r\n".join([*lines, "Sec-WebSocket-Accept: x"]).encode(), KEY)
    with pytest.raises(ConnectFailed, match="too long"):
        check_answer(b"x" * (HEAD_BYTES + 1), KEY)


def test_headers_that_cannot_be_sent_are_refused() -> None:
    request = upgrade_request("/", "host", KEY, [("X", "é")])
    assert request.endswith(b"\r\nX: \xe9\r\n\r\n")
    with pytest.raises(ConnectFailed, match="cannot be sent"):
        upgrade_request("/", "host", KEY, [("X", "a\r\nb")])
