"""The WebSocket client: an upgrade that we ask for, then messages both ways as plain calls.

It knows nothing of what the messages mean. `connect` opens one; its user is told what happens.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import ssl
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from http import HTTPStatus
from socket import gaierror
from typing import Protocol, cast

from exec_server.errors import ConnectFailed, ProtocolError, os_error_text
from exec_server.transports.dial import Url, open_connection, parse_url
from exec_server.transports.framed_socket import (
    CLOSE_SECONDS,
    DIRECT_BYTES,
    FramedSocket,
    Producer,
)
from exec_server.transports.frames import (
    MESSAGE_BYTES,
    Event,
    FrameReader,
    Opcode,
    close_answer,
    close_payload,
    masked_frame,
)

log = logging.getLogger(__name__)

# Of the answer to our upgrade: more than any server or proxy sends.
HEAD_BYTES = 16_384
# The first message of a turn of the loop is written at once if it is short: somebody may wait
# for it. Those that follow in the same turn are gathered; but not messages so large that copying
# them takes longer than a call.
LARGE_BYTES = 32_768
# Random bytes for masks are fetched so many at a time.
_MASK_POOL_BYTES = 4096

_SCHEMES = frozenset({"ws", "wss"})
_WEBSOCKET_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_STATUS_LINE = re.compile(r"HTTP/1\.[01] ([1-5]\d\d)(?: .*)?")
_HEADER_LINE = re.compile(r"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):(.*)")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")


class SocketUser(Producer, Protocol):
    """Who is told what happens on a socket."""

    def message_received(self, message: bytes, *, is_text: bool) -> None: ...

    def pong_received(self) -> None: ...

    def socket_lost(self, reason: str) -> None:
        """No more will come; called exactly once, whatever the reason, and never from a call."""
        ...


async def connect(
    url: str,
    make_user: Callable[[ClientSocket], SocketUser],
    *,
    headers: Sequence[tuple[str, str]] = (),
    tls: ssl.SSLContext | None = None,
    message_bytes: int = MESSAGE_BYTES,
) -> ClientSocket:
    """Open a WebSocket; raises ConnectFailed. The user hears nothing before this has returned.

    There is no time limit: cancelling is safe at any time and leaves no socket behind.
    """
    try:
        where = parse_url(url, _SCHEMES)
    except ValueError as error:
        raise ConnectFailed(f"URL error: {error}") from None
    key = b64encode(os.urandom(16))
    request = _upgrade_request(where, key, headers)
    factory = partial(ClientSocket, key, message_bytes)
    try:
        transport, opened = await open_connection(where, factory, tls=tls)
    except OSError as error:
        raise ConnectFailed(_failure(error)) from error
    try:
        transport.write(request)
        await opened.upgraded
        opened.begin(make_user(opened))
    except BaseException:
        transport.abort()
        raise
    return opened


def _failure(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS error: certificate verify failed: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS error: {error.reason or 'handshake failed'}"
    if isinstance(error, gaierror):
        return f"IO error: failed to lookup address information: {error.strerror}"
    # Python puts the address into the text of a refused connection; it is known already.
    text = os_error_text(OSError(error.errno, os.strerror(error.errno))) if error.errno else ""
    return f"IO error: {text or str(error) or 'connection ended'}"


class ClientSocket(FramedSocket):
    """One socket that we opened; usable from when `connect` returns it."""

    def __init__(self, key: bytes, message_bytes: int) -> None:
        super().__init__()
        self._key = key
        self._message_bytes = message_bytes
        self._head = b""  # the answer to our upgrade, as far as it has come
        self._user: SocketUser = cast(SocketUser, None)  # from `begin` on
        self._close_timer: asyncio.TimerHandle | None = None
        self._lost: str | None = None  # why, once the user has no more to expect
        self._receiving = False
        self._alone = False  # one message has come, and its user is at work on it
        self._turning = False  # a message was sent in this turn of the loop
        self._masks = b""
        self._masks_used = 0
        self.upgraded: asyncio.Future[None] = self._loop.create_future()
        self.gone: asyncio.Future[None] = self._loop.create_future()  # TCP has ended

    @property
    def is_closing(self) -> bool:
        return self._closing

    # ---- the transport ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if transport.get_extra_info("ssl_object") is None:
            self._descriptor = transport.get_extra_info("socket").fileno()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if self._frames is None:
            self._take_answer(data)
            return
        event = self._frames.whole_event(data) if self._receiving else None
        if event is not None and not self._closing:
            self._alone = True
            self._user.message_received(event.payload, is_text=event.opcode is Opcode.TEXT)
            self._alone = False
            return
        self._feed(data)

    def eof_received(self) -> bool:
        self._end("connection ended without a close frame")
        self._limit_closing()
        return False  # the transport closes itself

    def connection_lost(self, exc: Exception | None) -> None:
        detail = _failure(exc) if isinstance(exc, OSError) else "connection ended"
        self._refuse(ConnectFailed(detail))
        if self._close_timer is not None:
            self._close_timer.cancel()
        self._end(detail)
        self.gone.set_result(None)

    def _end(self, reason: str) -> None:
        """Nothing more is sent or delivered; the user is told in a moment."""
        self._closing = True
        if self._lost is None:
            self._lost = reason
            self._gathered.clear()
            self._gathered_bytes = 0
            self._behind_parts.clear()
            self._behind_parts_bytes = 0
            self._wake_writer()
            if self._user is not None:
                self._loop.call_soon(self._user.socket_lost, reason)

    def abort(self, why: str) -> None:
        """Drop the connection without a close frame."""
        self._deaf = True
        self._end(why)
        self._transport.abort()

    # ---- the upgrade ------------------------------------------------------------------

    def _take_answer(self, data: bytes) -> None:
        head, end, rest = (self._head + data).partition(b"\r\n\r\n")
        if not end and len(head) <= HEAD_BYTES:
            self._head = head
            return
        # Nothing may be delivered before `begin`, and nothing at all after a refusal.
        self._transport.pause_reading()
        self._head = b""
        self._frames = FrameReader(from_client=False, message_bytes=self._message_bytes)
        self._frames.feed(rest)
        try:
            _check_answer(head, self._key)
        except ConnectFailed as failure:
            self._deaf = True
            self._refuse(failure)
        else:
            if not self.upgraded.done():
                self.upgraded.set_result(None)

    def _refuse(self, failure: ConnectFailed) -> None:
        if not self.upgraded.done():
            self.upgraded.set_exception(failure)
            self.upgraded.exception()  # whoever waited may be cancelled before asking for it

    def begin(self, user: SocketUser) -> None:
        """Deliver to this user, after the caller has returned."""
        self._user = self._producer = user
        if self._lost is not None:
            self._loop.call_soon(user.socket_lost, self._lost)
            return
        if self._slow:
            self._loop.call_soon(self._tell_slow)
        self.hold(receiving=True)

    # ---- receiving --------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        opcode = event.opcode
        if opcode is Opcode.CLOSE:
            self._take_close(event.payload)
        elif self._closing:
            return
        elif opcode is Opcode.PING:
            self._answer_ping(event.payload)
        elif opcode is Opcode.PONG:
            self._user.pong_received()
        else:
            self._user.message_received(event.payload, is_text=opcode is Opcode.TEXT)

    def _take_close(self, payload: bytes) -> None:
        if not self._closing:
            self._write_frame(Opcode.CLOSE, close_answer(payload))
            self._end(f"closed by the peer: {_close_text(payload)}")
            self._limit_closing()
        self._deaf = True
        self._transport.close()

    def _violated(self, error: ProtocolError) -> None:
        log.info("the peer broke the rules of WebSockets: %s", error)
        self._say_goodbye(error.close_code, error.reason, f"protocol violation: {error}")

    # ---- sending ----------------------------------------------------------------------

    def send(self, message: bytes, *, is_text: bool) -> None:
        """Send a message after those sent before. Never waits; watch `unsent`."""
        self._send_message(Opcode.TEXT if is_text else Opcode.BINARY, message)

    async def send_parts(self, parts: AsyncIterator[bytes], *, is_text: bool) -> None:
        """Send one message as it is made; see `_send_in_parts`."""
        await self._send_in_parts(Opcode.TEXT if is_text else Opcode.BINARY, parts)

    def _send(self, opcode: Opcode, message: bytes) -> None:
        frame = self._frame(opcode, message)
        if len(frame) >= LARGE_BYTES:
            self._flush()
            self._write(frame)
        elif self._alone and not self._gathered and len(frame) <= DIRECT_BYTES:
            self._write(frame)  # the answer, and there is no other to send along
        elif not self._turning:
            self._turning = True
            self._loop.call_soon(self._end_turn)
            if len(frame) <= DIRECT_BYTES:
                self._write(frame)
            else:
                self._gather(frame)
        else:
            self._gather(frame)

    def _end_turn(self) -> None:
        self._turning = False
        self._flush()

    def _frame(self, opcode: Opcode, payload: bytes, *, final: bool = True) -> bytes:
        return masked_frame(opcode, payload, self._mask(), final=final)

    def _mask(self) -> bytes:
        start = self._masks_used
        if start == len(self._masks):
            self._masks = os.urandom(_MASK_POOL_BYTES)
            start = 0
        self._masks_used = start + 4
        return self._masks[start : start + 4]

    # ---- liveness and the end ---------------------------------------------------------

    def ping(self) -> None:
        """Ask for a pong."""
        if not self._closing:
            self._write_frame(Opcode.PING, b"")

    def close(self, code: int, reason: str) -> None:
        """End the connection, telling the peer why; `gone` is done when it has hung up."""
        self._say_goodbye(code, reason, f"closed: {code} {reason}".rstrip())

    def _say_goodbye(self, code: int, reason: str, why: str) -> None:
        if self._closing:
            return
        self._write_frame(Opcode.CLOSE, close_payload(code, reason))
        self._end(why)
        # What the peer still sends is read and dropped until it hangs up: closing a socket
        # with unread bytes resets it, and the reset could overtake our close frame.
        self._update_reading()
        self._loop.call_soon(self._continue)
        self._limit_closing()

    def _limit_closing(self) -> None:
        if self._close_timer is None:
            self._close_timer = self._loop.call_later(CLOSE_SECONDS, self._transport.abort)


def _close_text(payload: bytes) -> str:
    if len(payload) < 2:
        return "no code"
    code = int.from_bytes(payload[:2], "big")
    return f"{code} {payload[2:].decode(errors='replace')}".rstrip()


def _upgrade_request(url: Url, key: bytes, headers: Sequence[tuple[str, str]]) -> bytes:
    lines = [
        f"GET {url.target} HTTP/1.1",
        f"Host: {url.authority}",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Key: {key.decode()}",
    ]
    for name, value in headers:
        line = f"{name}: {value}"
        if not _HEADER_LINE.fullmatch(line) or not _HEADER_VALUE.fullmatch(value):
            raise ConnectFailed(f"the value of the header {name!r} cannot be sent")
        lines.append(line)
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _check_answer(head: bytes, key: bytes) -> None:
    """Raise ConnectFailed unless the server has upgraded, and to nothing but what we asked for."""
    if len(head) > HEAD_BYTES:
        raise ConnectFailed("WebSocket protocol error: the head of the answer is too long")
    first, *lines = head.decode("latin-1").split("\r\n")
    status_line = _STATUS_LINE.fullmatch(first)
    matches = [_HEADER_LINE.fullmatch(line) for line in lines]
    if status_line is None or None in matches:
        raise ConnectFailed("WebSocket protocol error: the answer is not HTTP")
    status = int(status_line[1])
    headers = [(found[1].lower(), found[2].strip(" \t")) for found in matches if found]
    if status != HTTPStatus.SWITCHING_PROTOCOLS:
        raise ConnectFailed(f"HTTP error: {_status_text(status)}", status, headers)
    flaw = _flaw(headers, key)
    if flaw is not None:
        raise ConnectFailed(f"WebSocket protocol error: {flaw}", status, headers)


def _flaw(headers: list[tuple[str, str]], key: bytes) -> str | None:
    """What is wrong with the headers of an upgrade."""

    def words(name: str) -> list[str]:
        values = ",".join(value for key, value in headers if key == name)
        return [word.strip() for word in values.split(",") if word.strip()]

    accept = b64encode(hashlib.sha1(key + _WEBSOCKET_GUID, usedforsecurity=False).digest())
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
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"{status} <unknown status code>"
