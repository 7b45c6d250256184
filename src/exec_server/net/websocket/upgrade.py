"""The client's side of the WebSocket handshake (RFC 6455, 4.1) without a socket.

Light to import: the commands that run without an event loop use it too.
"""

from __future__ import annotations

import os
import re
from binascii import b2a_base64
from collections.abc import Sequence

from exec_server.errors import ConnectFailed

try:  # hashlib would load OpenSSL, which takes longer than the rest of a short command
    from _sha1 import sha1  # type: ignore[import-not-found]
except ImportError:  # an interpreter that is built without it
    from hashlib import sha1

# Of the answer to our upgrade request: more than any server or proxy sends.
HEAD_BYTES = 16_384

# The first bytes of a TLS alert, with which servers answer a plain request.
_TLS_ALERT = b"\x15\x03"
_WEBSOCKET_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_SWITCHING_PROTOCOLS = 101
# Compiled at the first use.
_STATUS_LINE = r"HTTP/1\.[01] ([1-5]\d\d)(?: .*)?"
_HEADER_LINE = r"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):(.*)"
_HEADER_VALUE = r"[\t\x20-\x7e\x80-\xff]*"


def new_key() -> bytes:
    """A random value for Sec-WebSocket-Key."""
    return b2a_base64(os.urandom(16), newline=False)


def upgrade_request(
    target: str, authority: str, key: bytes, headers: Sequence[tuple[str, str]]
) -> bytes:
    """The request that asks a server to speak the WebSocket protocol; raises ConnectFailed."""
    lines = [
        f"GET {target} HTTP/1.1",
        f"Host: {authority}",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Key: {key.decode()}",
    ]
    for name, value in headers:
        line = f"{name}: {value}"
        if not re.fullmatch(_HEADER_LINE, line) or not re.fullmatch(_HEADER_VALUE, value):
            raise ConnectFailed(f"the value of the header {name!r} cannot be sent")
        lines.append(line)
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def check_answer(head: bytes, key: bytes) -> None:
    """Raise ConnectFailed unless the server has accepted the upgrade without additions."""
    if len(head) > HEAD_BYTES:
        raise ConnectFailed("WebSocket protocol error: the head of the answer is too long")
    if head.startswith(_TLS_ALERT):
        raise ConnectFailed("WebSocket protocol error: the server speaks TLS: use wss://")
    first, *lines = head.decode("latin-1").split("\r\n")
    status_line = re.fullmatch(_STATUS_LINE, first)
    matches = [re.fullmatch(_HEADER_LINE, line) for line in lines]
    if status_line is None or None in matches:
        raise ConnectFailed("WebSocket protocol error: the answer is not HTTP")
    status = int(status_line[1])
    headers = [(found[1].lower(), found[2].strip(" \t")) for found in matches if found]
    if status != _SWITCHING_PROTOCOLS:
        raise ConnectFailed(f"HTTP error: {_status_text(status)}", status, headers)
    flaw = _flaw(headers, key)
    if flaw is not None:
        raise ConnectFailed(f"WebSocket protocol error: {flaw}", status, headers)


def _flaw(headers: list[tuple[str, str]], key: bytes) -> str | None:
    """The first flaw in the headers of an upgrade, None if there is none."""

    def words(name: str) -> list[str]:
        values = ",".join(value for key, value in headers if key == name)
        return [word.strip() for word in values.split(",") if word.strip()]

    accept = b2a_base64(sha1(key + _WEBSOCKET_GUID).digest(), newline=False)
    if [word.lower() for word in words("upgrade")] != ["websocket"]:
        return 'no "Upgrade: websocket" header'
    if "upgrade" not in (word.lower() for word in words("connection")):
        return 'no "Connection: upgrade" header'
    if words("sec-websocket-accept") != [accept.decode()]:
        return 'key mismatch in "Sec-WebSocket-Accept" header'
    if words("sec-websocket-extensions") or words("sec-websocket-protocol"):
        return "the server chose an extension or a subprotocol that was not offered"
    return None


def _status_text(status: int) -> str:
    from http import HTTPStatus  # slow to import, and needed for an error only

    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"{status} <unknown status code>"
