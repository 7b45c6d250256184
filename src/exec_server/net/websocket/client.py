"""The WebSocket client: `connect` opens a ClientSocket, which delivers messages to its user.

The content of messages is the business of the user.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from socket import gaierror
from typing import Protocol, cast

from exec_server.errors import CertificateRejected, ConnectFailed, ProtocolError, os_error_text
from exec_server.net.dial import open_connection
from exec_server.net.http1 import HEAD_BYTES
from exec_server.net.outbox import Producer
from exec_server.net.websocket.frames import (
    MESSAGE_BYTES,
    SENT_FRAME_BYTES,
    Event,
    FrameReader,
    Opcode,
    masked_frame,
    masked_pieces,
)
from exec_server.net.websocket.socket import DIRECT_BYTES, Cause, FramedSocket, State
from exec_server.net.websocket.upgrade import check_answer, new_key, upgrade_request
from exec_server.protocol.urls import Url, parse_url

log = logging.getLogger(__name__)

# The first message in an iteration of the loop is written at once if it is short, because it may
# be the only one. Later ones in the same iteration are gathered, except messages so large that
# copying them takes longer than a system call.
LARGE_BYTES = 32_768
# Random bytes for masks, fetched at a time.
_MASK_POOL_BYTES = 4096

_SCHEMES = frozenset({"ws", "wss"})
# The reasons of OpenSSL for bytes of another protocol.
_NOT_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"})


class SocketUser(Producer, Protocol):
    """The user of a socket: gets its messages and the news about it."""

    def message_received(self, message: bytes, *, is_text: bool) -> None: ...

    def pong_received(self) -> None: ...

    def socket_lost(self, reason: str) -> None:
        """The socket has ended; called exactly once, from the event loop."""


async def connect(
    url: str | Url,
    make_user: Callable[[ClientSocket], SocketUser],
    *,
    headers: Sequence[tuple[str, str]] = (),
    tls: ssl.SSLContext | None = None,
    message_bytes: int = MESSAGE_BYTES,
) -> ClientSocket:
    """Open a WebSocket; raises ConnectFailed. The user is called only after this has returned.

    A text is a ws:// or wss:// URL; only a parsed Url may name a unix socket. There is no time
    limit: cancelling is safe at any time and leaves no socket behind.
    """
    try:
        where = parse_url(url, _SCHEMES) if isinstance(url, str) else url
    except ValueError as error:
        raise ConnectFailed(f"URL error: {error}") from None
    key = new_key()
    request = upgrade_request(where.target, where.authority, key, headers)
    factory = partial(ClientSocket, key, message_bytes)
    try:
        transport, opened = await open_connection(where, factory, tls=tls)
    except ssl.SSLCertVerificationError as error:
        raise CertificateRejected(_failure(error)) from error
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
        if error.reason in _NOT_TLS:
            return "TLS error: the server does not speak TLS at this port"
        return f"TLS error: {error.reason or 'handshake failed'}"
    if isinstance(error, gaierror):
        return f"IO error: failed to lookup address information: {error.strerror}"
    # Without the address, which Python puts into the text of a refused connection.
    text = os_error_text(OSError(error.errno, _strerror(error))) if error.errno else ""
    return f"IO error: {text or str(error) or 'connection ended'}"


def _strerror(error: OSError) -> str:
    # On Windows os.strerror knows no error of a socket, and the text of the error has no address.
    return str(error.strerror) if sys.platform == "win32" else os.strerror(error.errno or 0)


class ClientSocket(asyncio.Protocol):
    """One socket that we opened; usable from when `connect` returns it."""

    def __init__(self, key: bytes, message_bytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._key = key
        self._frames = FrameReader(from_client=False, message_bytes=message_bytes)
        self._head = b""  # the received part of the answer to our upgrade
        self._user: SocketUser = cast(SocketUser, None)  # from `begin` on
        self._lost_reason: str | None = None
        self._in_callback = False  # the user works on the only message received
        self._masks = b""
        self._masks_used = 0
        self.upgraded: asyncio.Future[None] = self._loop.create_future()
        self.closed: asyncio.Future[None] = self._loop.create_future()  # TCP has ended
        # Called for frames that bring nothing: control frames, and empty fragments.
        self.on_useless: Callable[[], None] = lambda: None

    @property
    def is_closing(self) -> bool:
        return self._lost_reason is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        is_plain = transport.get_extra_info("ssl_object") is None
        descriptor = transport.get_extra_info("socket").fileno() if is_plain else -1
        self._transport = cast(asyncio.Transport, transport)
        self._socket = FramedSocket(
            self, self._transport, descriptor, self._frames, self._encode_frame
        )
        self._inbox, self._outbox = self._socket.inbox, self._socket.outbox
        self._writer = self._socket.writer
        self._inbox.pause()  # until `begin`

    def data_received(self, data: bytes) -> None:
        if self._inbox.is_flowing:
            event = self._frames.whole_event(data)
            if event is not None:
                self._in_callback = True
                self._user.message_received(event.payload, is_text=event.opcode is Opcode.TEXT)
                self._in_callback = False
                return
        if self._socket.state is State.CONNECTING:
            self._answer_received(data)
        else:
            self._socket.feed(data)
            if self._frames.empty_fragments:
                self._frames.empty_fragments = 0
                self.on_useless()

    def bytes_received(self) -> None:
        """Parts of frames are no sign of life here: see SocketUser."""

    def eof_received(self) -> bool:
        self._end("connection ended without a close frame", Cause.EOF)
        return False  # the transport closes itself

    def connection_lost(self, exc: Exception | None) -> None:
        detail = _failure(exc) if isinstance(exc, OSError) else "connection ended"
        self._fail_upgrade(ConnectFailed(detail))
        self._socket.lost()
        self._notify_lost(detail)
        self.closed.set_result(None)

    def pause_writing(self) -> None:
        self._socket.pause_writing()

    def resume_writing(self) -> None:
        self._socket.resume_writing()

    def _answer_received(self, data: bytes) -> None:
        head, end, rest = (self._head + data).partition(b"\r\n\r\n")
        if not end and len(head) <= HEAD_BYTES:
            self._head = head
            return
        self._head = b""
        try:
            check_answer(head, self._key)
        except ConnectFailed as failure:
            self._socket.change(Cause.REFUSED)
            self._fail_upgrade(failure)
            return
        self._frames.feed(rest)
        self._socket.change(Cause.UPGRADED)
        if not self.upgraded.done():
            self.upgraded.set_result(None)

    def _fail_upgrade(self, failure: ConnectFailed) -> None:
        if not self.upgraded.done():
            self.upgraded.set_exception(failure)
            self.upgraded.exception()  # the waiting task may be cancelled before it asks

    def begin(self, user: SocketUser) -> None:
        """Deliver to this user, after the caller has returned."""
        self._user = self._outbox.producer = user
        if self._lost_reason is not None:
            self._loop.call_soon(user.socket_lost, self._lost_reason)
            return
        if self._outbox.is_full:
            self._loop.call_soon(self._outbox.pause_writing)
        self._inbox.resume()

    def event_received(self, event: Event) -> None:
        opcode = event.opcode
        if opcode is Opcode.CLOSE:
            # First the reason: closing a TLS transport may call `eof_received` at once.
            self._notify_lost(f"closed by the peer: {_close_text(event.payload)}")
            self._socket.answer_close(event.payload)
        elif opcode is Opcode.PING:
            self._socket.answer_ping(event.payload)
            self.on_useless()
        elif opcode is Opcode.PONG:
            self._user.pong_received()
            self.on_useless()
        elif opcode is not Opcode.CONTINUATION:
            self._user.message_received(event.payload, is_text=opcode is Opcode.TEXT)

    def protocol_failed(self, error: ProtocolError) -> None:
        log.info("the peer broke the WebSocket protocol: %s", error)
        self._notify_lost(f"protocol violation: {error}")

    def pause_reading(self) -> None:
        """Deliver no more messages until `resume_reading`."""
        self._inbox.pause()

    def resume_reading(self) -> None:
        """Deliver messages again, after the caller has returned."""
        self._inbox.resume()

    def send(self, message: bytes, *, is_text: bool) -> None:
        """Send a message after those sent before. Never waits; watch `unsent`."""
        self._outbox.send(message, self._write_text if is_text else self._write_binary)

    def send_binary(self, head: bytes, data: bytes) -> None:
        """Send one binary message after those sent before; long data is copied once, masked."""
        is_one_frame = len(head) + len(data) <= SENT_FRAME_BYTES
        if len(data) >= LARGE_BYTES and is_one_frame and self._outbox.is_idle:
            self._writer.gather(*masked_pieces(Opcode.BINARY, head, data, self._mask()))
            self._writer.flush()
        else:
            self._outbox.send(head + data, self._write_binary)

    async def send_parts(self, parts: AsyncIterator[bytes], *, is_text: bool) -> None:
        """Send one message in parts; see Outbox.send_parts."""
        await self._socket.send_parts(Opcode.TEXT if is_text else Opcode.BINARY, parts)

    def unsent(self) -> int:
        """Bytes that the peer has not taken yet."""
        return self._socket.unsent()

    def _write_text(self, message: bytes) -> None:
        self._write(Opcode.TEXT, message)

    def _write_binary(self, message: bytes) -> None:
        self._write(Opcode.BINARY, message)

    def _write(self, opcode: Opcode, message: bytes) -> None:
        if len(message) > SENT_FRAME_BYTES:
            self._socket.write_fragments(opcode, message)
            return
        writer = self._writer
        frame = self._encode_frame(opcode, message)
        if len(frame) >= LARGE_BYTES:
            writer.write_in_order(frame)
        elif len(frame) > DIRECT_BYTES:
            writer.gather(frame)
        elif self._in_callback and not writer.gathered:
            writer.write(frame)  # the answer, and there is no other to send along
        elif not writer.is_flush_scheduled:
            writer.schedule_flush()
            writer.write(frame)  # the first message of this iteration of the loop
        else:
            writer.gather(frame)

    def _encode_frame(self, opcode: Opcode, payload: bytes, final: bool = True) -> bytes:
        return masked_frame(opcode, payload, self._mask(), final=final)

    def _mask(self) -> bytes:
        start = self._masks_used
        if start == len(self._masks):
            self._masks = os.urandom(_MASK_POOL_BYTES)
            start = 0
        self._masks_used = start + 4
        return self._masks[start : start + 4]

    def ping(self) -> None:
        """Ask for a pong."""
        if not self.is_closing:
            self._socket.write_frame(Opcode.PING, b"")

    def close(self, code: int, reason: str) -> None:
        """End the connection with a close frame; `closed` is done when the peer has hung up."""
        if not self.is_closing:
            self._socket.start_closing(code, reason)
            self._notify_lost(f"closed: {code} {reason}".rstrip())

    def abort(self, why: str) -> None:
        """Drop the connection without a close frame."""
        self._end(why, Cause.ABORTED)
        self._transport.abort()

    def _end(self, reason: str, cause: Cause) -> None:
        self._socket.discard(cause)
        self._notify_lost(reason)

    def _notify_lost(self, reason: str) -> None:
        """Tell the user, after the caller has returned, that the socket has ended; once."""
        if self._lost_reason is None:
            self._lost_reason = reason
            self._writer.discard()
            if self._user is not None:
                self._loop.call_soon(self._user.socket_lost, reason)


def _close_text(payload: bytes) -> str:
    if len(payload) < 2:
        return "no code"
    code = int.from_bytes(payload[:2], "big")
    return f"{code} {payload[2:].decode(errors='replace')}".rstrip()
