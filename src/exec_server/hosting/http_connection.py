"""HttpConnection: one accepted connection, for the one HTTP request that it may send.

Every request gets an answer: a client gives its session up when a connection ends without one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Final, Protocol, cast

import h11

from exec_server.hosting.http_messages import (
    BODY_BYTES,
    Networks,
    ServiceAnswer,
    ServiceRequest,
    peer_address,
)
from exec_server.hosting.rules import Refusal
from exec_server.net.http1 import PARSED_HEAD_BYTES, TLS_HANDSHAKE

# Open sockets of a node, upgraded or not. Beyond it the request of a new one is refused.
SOCKETS: Final = 8192
# Sockets beyond it whose request is read, so that each kind of peer gets the refusal after which it
# comes back. Beyond the sum a new one is answered 503 at once, and closed.
REFUSED_SOCKETS: Final = 640
# Descriptors for everything else: the database, listeners, TLS handshakes (256), closing links.
# Without a free descriptor the event loop closes connections without an answer, for which a client
# gives its session up; so the refusal has to come before that.
OTHER_DESCRIPTORS: Final = 640
WANTED_DESCRIPTORS: Final = SOCKETS + REFUSED_SOCKETS + OTHER_DESCRIPTORS
# Where descriptors are few, this part of them is for refused sockets, and as many for the rest, but
# not fewer than the event loop accepts at once (its backlog of 100) beside those that are open.
_PART: Final = 8
LEAST_OTHER_DESCRIPTORS: Final = 160

log = logging.getLogger(__name__)

# From accept to a complete request, and to the head of one that is refused for want of room.
REQUEST_SECONDS: Final = 10.0
REFUSED_SECONDS: Final = 2.0
# Each header line and each chunk costs h11 some microseconds, and may be a few bytes long: without
# these limits a stranger could keep the event loop for a second with one request.
HEAD_LINES: Final = 512
BODY_CHUNKS: Final = 256
# After an answer: how long the peer may take to hang up, and how much it may still send. Closing
# with unread bytes would reset the connection, and the reset could overtake the answer.
LINGER_SECONDS: Final = 2.0
LINGER_BYTES: Final = 1_048_576

# Runs a coroutine as a task of the service.
StartTask = Callable[[Coroutine[Any, Any, None]], object]


class SocketAdmission(Enum):
    """How to treat a new connection."""

    ACCEPT = auto()
    REJECT = auto()  # once its path is known
    REJECT_AT_ONCE = auto()  # before its request is read


@dataclass(frozen=True, slots=True)
class Capacity:
    """The limits of a node."""

    sockets: int = SOCKETS
    refused: int = REFUSED_SOCKETS

    def admission(self, used: int) -> SocketAdmission:
        """How to treat one more connection."""
        if used < self.sockets:
            return SocketAdmission.ACCEPT
        if used < self.sockets + self.refused:
            return SocketAdmission.REJECT
        return SocketAdmission.REJECT_AT_ONCE


def capacity_of(descriptors: int) -> Capacity:
    """The limits of a node that may have so many open descriptors."""
    refused = min(REFUSED_SOCKETS, descriptors // _PART)
    others = min(OTHER_DESCRIPTORS, max(LEAST_OTHER_DESCRIPTORS, descriptors // _PART))
    return Capacity(max(1, min(SOCKETS, descriptors - refused - others)), refused)


class TakeOver(Protocol):
    """An upgrade that was granted."""

    def open(self, transport: asyncio.Transport, request: ServiceRequest, first: bytes) -> None:
        """Take over the transport; `first` was received after the request."""
        ...

    def cancel(self) -> None:
        """The peer has left before its upgrade was granted."""
        ...


class RequestHandler(Protocol):
    """The service behind the connections of a listener."""

    trusted: Networks

    def admission(self) -> SocketAdmission:
        """How to treat one more connection."""
        ...

    def overloaded(self, path: str) -> ServiceAnswer:
        """The 503 response for `path` ('' before the path is known)."""
        ...

    async def answer(self, request: ServiceRequest) -> ServiceAnswer | TakeOver:
        """Raises nothing."""
        ...

    def refuse(self, refusal: Refusal, peer: str) -> ServiceAnswer:
        """The answer to a request of this peer that could not be read."""
        ...


class HttpConnection(asyncio.Protocol):
    """One accepted socket, up to the answer to its request."""

    __slots__ = (
        "_body",
        "_chunks",
        "_connections",
        "_handler",
        "_head",
        "_http",
        "_is_answered",
        "_is_refused",
        "_lingering",
        "_received",
        "_start_task",
        "_timer",
        "_transport",
    )

    def __init__(
        self, handler: RequestHandler, start_task: StartTask, connections: set[HttpConnection]
    ) -> None:
        self._handler = handler
        self._start_task = start_task
        self._connections = connections
        self._http: h11.Connection | None = h11.Connection(
            h11.SERVER, max_incomplete_event_size=PARSED_HEAD_BYTES
        )
        self._received = bytearray()
        self._head: h11.Request | None = None
        self._body = bytearray()
        self._chunks = 0
        self._is_answered = False
        self._is_refused = False  # for want of room, as soon as its path is known
        self._lingering = 0
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        raw = transport.get_extra_info("socket")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        admission = self._handler.admission()
        self._connections.add(self)
        if admission is SocketAdmission.REJECT_AT_ONCE:
            self._reject_at_once()
            return
        self._is_refused = admission is SocketAdmission.REJECT
        seconds = REFUSED_SECONDS if self._is_refused else REQUEST_SECONDS
        self._timer = asyncio.get_running_loop().call_later(seconds, self._give_up)

    def data_received(self, data: bytes) -> None:
        if self._http is None:
            self._lingering += len(data)
            if self._lingering > LINGER_BYTES and self._transport is not None:
                self._transport.abort()
            return
        if self._head is None:
            self._received += data
            if self._received.startswith(TLS_HANDSHAKE):
                self._refuse(400, "invalid_request", "this port has no TLS")
                return
            if _head_lines(self._received) > HEAD_LINES:
                self._refuse(431, "invalid_request", f"a head has at most {HEAD_LINES} lines")
                return
        try:
            self._http.receive_data(data)
            while self._http is not None and self._take(self._http.next_event()):
                pass
        except h11.RemoteProtocolError as error:
            # h11 hints at 501 for an unknown transfer encoding, but the fault is the peer's.
            status = error.error_status_hint if error.error_status_hint < 500 else 400
            self._refuse(status, "invalid_request", "the request is not HTTP/1.1")

    def _give_up(self) -> None:
        """The request is not complete in time. A client retries 408, but not a lost connection."""
        if self._is_refused:
            self._write(self._handler.overloaded("").encode(), 0)
        elif self._received and self._transport is not None:
            self._refuse(408, "request_timeout", f"a request may take {REQUEST_SECONDS:.0f} s")
        elif self._transport is not None:
            self._transport.abort()

    def eof_received(self) -> bool:
        return False  # while a request is answered nothing is read, so its end waits

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._forget()

    def _forget(self) -> None:
        self._connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def _take(self, event: object) -> bool:
        """Handle one event; whether to ask for the next one."""
        if isinstance(event, h11.Request):
            return self._take_head(event)
        elif isinstance(event, h11.Data):
            self._body += event.data
            self._chunks += event.chunk_start
            if len(self._body) > BODY_BYTES:
                self._refuse(413, "body_too_large", f"a body has at most {BODY_BYTES} bytes")
                return False
            if self._chunks > BODY_CHUNKS:
                self._refuse(413, "body_too_large", f"a body has at most {BODY_CHUNKS} chunks")
                return False
        elif isinstance(event, h11.EndOfMessage):
            self._dispatch()
            return False
        else:
            return False
        return True

    def _take_head(self, head: h11.Request) -> bool:
        assert self._http is not None
        del self._received[len(self._received) - len(self._http.trailing_data[0]) :]
        self._head = head
        if len(self._received) > PARSED_HEAD_BYTES:
            message = f"a request head has at most {PARSED_HEAD_BYTES} bytes"
            self._refuse(431, "invalid_request", message)
        elif self._is_refused:
            self._write(self._handler.overloaded(_path(head)).encode(), 0)
        return self._http is not None

    def _dispatch(self) -> None:
        assert self._http is not None
        assert self._head is not None
        assert self._transport is not None
        first = self._http.trailing_data[0]
        request = _request(self._head, bytes(self._body), bytes(self._received))
        forwarded = request.headers.get("x-forwarded-for", "")
        peer = peer_address(self._direct_peer(), forwarded, self._handler.trusted)
        request = replace(request, peer=peer)
        self._http, self._received, self._body = None, bytearray(), bytearray()
        if self._timer is not None:
            self._timer.cancel()
        self._transport.pause_reading()
        self._start_task(self._answer(request, first))

    def _direct_peer(self) -> str:
        peer = None if self._transport is None else self._transport.get_extra_info("peername")
        return str(peer[0]) if peer else "unknown"

    async def _answer(self, request: ServiceRequest, first: bytes) -> None:
        outcome = await self._handler.answer(request)
        transport = self._transport
        if transport is None or transport.is_closing():
            if not isinstance(outcome, ServiceAnswer):
                outcome.cancel()
            return
        if isinstance(outcome, ServiceAnswer):
            without_body = request.method == "HEAD"
            self._write(outcome.encode(), len(outcome.body) if without_body else 0)
        else:
            self._transport = None
            self._forget()
            outcome.open(transport, request, first)

    def _refuse(self, status: int, code: str, message: str) -> None:
        answer = self._handler.refuse(Refusal(status, code, message), self._direct_peer())
        self._write(answer.encode(), 0)

    def _reject_at_once(self) -> None:
        """Answer and close at once, so that the descriptor is free again."""
        assert self._transport is not None
        self._is_answered = True
        self._http = None
        self._transport.write(self._handler.overloaded("").encode())
        self._transport.close()

    def _write(self, answer: bytes, cut: int) -> None:
        """Write the answer without its last `cut` bytes, and wait until the peer hangs up."""
        transport = self._transport
        if transport is None or transport.is_closing() or self._is_answered:
            return
        self._is_answered = True
        self._http, self._received, self._body = None, bytearray(), bytearray()
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(LINGER_SECONDS, transport.abort)
        transport.write(answer[: len(answer) - cut])
        if transport.can_write_eof():
            transport.write_eof()
            transport.resume_reading()
        else:
            transport.close()


def _head_lines(received: bytearray) -> int:
    ends = [at for at in (received.find(b"\n\r\n"), received.find(b"\n\n")) if at >= 0]
    return received.count(b"\n", 0, min(ends, default=len(received)))


def _request(head: h11.Request, body: bytes, raw: bytes) -> ServiceRequest:
    headers: dict[str, str] = {}
    for name, value in head.headers:
        key = name.decode("latin-1")
        is_ambiguous = key == "authorization" and key in headers
        headers[key] = "" if is_ambiguous else headers.get(key, value.decode("latin-1"))
    _, _, query = head.target.decode("latin-1").partition("?")
    return ServiceRequest(head.method.decode("latin-1"), _path(head), query, headers, body, "", raw)


def _path(head: h11.Request) -> str:
    return head.target.decode("latin-1").partition("?")[0]
