"""The client's side of the WebSocket handshake (RFC 6455, 4.1) without a socket."""

from __future__ import annotations

import os
from binascii import b2a_base64
from collections.abc import Sequence

from exec_server.errors import ConnectFailed
from exec_server.net.http1 import (
    HEAD_BYTES,
    can_send,
    encode_head,
    parse_fields,
    parse_status,
    reason,
)

try:  # hashlib would load OpenSSL, which takes longer than the rest of a short command
    from _sha1 import sha1  # type: ignore[import-not-found]
except ImportError:  # an interpreter that is built without it
    from hashlib import sha1

_WEBSOCKET_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
# The first bytes of a TLS alert, with which servers answer a plain request.
_TLS_ALERT = b"\x15\x03"
_SWITCHING_PROTOCOLS = 101


def new_key() -> bytes:
    """A random value for Sec-WebSocket-Key."""
    return b2a_base64(os.urandom(16), newline=False)


def accept_value(key: bytes) -> str:
    """The value of Sec-WebSocket-Accept for this key."""
    return b2a_base64(sha1(key + _WEBSOCKET_GUID).digest(), newline=False).decode()


def upgrade_request(
    target: str, authority: str, key: bytes, headers: Sequence[tuple[str, str]]
) -> bytes:
    """The request that asks a server to speak the WebSocket protocol; raises ConnectFailed."""
    for name, value in headers:
        if not can_send(name, value):
            raise ConnectFailed(f"the value of the header {name!r} cannot be sent")
    own = [
        ("Host", authority),
        ("Connection", "Upgrade"),
        ("Upgrade", "websocket"),
        ("Sec-WebSocket-Version", "13"),
        ("Sec-WebSocket-Key", key.decode()),
    ]
    return encode_head(f"GET {target} HTTP/1.1", [*own, *headers])


def check_answer(head: bytes, key: bytes) -> None:
    """Raise ConnectFailed unless the server has accepted the upgrade without additions."""
    if len(head) > HEAD_BYTES:
        raise ConnectFailed("WebSocket protocol error: the head of the answer is too long")
    if head.startswith(_TLS_ALERT):
        raise ConnectFailed("WebSocket protocol error: the server speaks TLS: use wss://")
    status = parse_status(head)
    headers = parse_fields(head.decode("latin-1").split("\r\n")[1:])
    if status is None or not 100 <= status < 600 or headers is None:
        raise ConnectFailed("WebSocket protocol error: the answer is not HTTP")
    if status != _SWITCHING_PROTOCOLS:
        raise ConnectFailed(f"HTTP error: {_status_text(status)}", status, headers)
    flaw = _flaw(headers, key)
    if flaw is not None:
        raise ConnectFailed(f"WebSocket protocol error: {flaw}", status, headers)


def _flaw(headers: list[tuple[str, str]], key: bytes) -> str | None:
    """The first flaw in the headers of an upgrade, None if there is none."""

    def words(name: str) -> list[str]:
        values = ",".join(value for field, value in headers if field == name)
        return [word.strip() for word in values.split(",") if word.strip()]

    if [word.lower() for word in words("upgrade")] != ["websocket"]:
        return 'no "Upgrade: websocket" header'
    if "upgrade" not in (word.lower() for word in words("connection")):
        return 'no "Connection: upgrade" header'
    if words("sec-websocket-accept") != [accept_value(key)]:
        return 'key mismatch in "Sec-WebSocket-Accept" header'
    if words("sec-websocket-extensions") or words("sec-websocket-protocol"):
        return "the server chose an extension or a subprotocol that was not offered"
    return None


def _status_text(status: int) -> str:
    try:
        return f"{status} {reason(status)}"
    except ValueError:
        return f"{status} <unknown status code>"
