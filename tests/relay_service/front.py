"""The listening side: HTTP on h11 for the registry, handed over to picows on an upgrade.

There is no task: a request is answered by plain calls, and faults use timers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Protocol, cast

import h11
from picows import WSAutoPingStrategy

# ws_create_server makes one of these for each connection; the stubs leave it out.
from picows.picows import WSProtocol  # type: ignore[attr-defined]

from tests.relay_service.faults import GARBAGE, HttpFault, HttpFaultKind
from tests.relay_service.journal import Request
from tests.relay_service.registry import Answer, Endpoint
from tests.relay_service.sockets import Socket
from tests.relay_service.tickets import Rejected

# A key object and an authorization are far below; a larger body gets a 413.
BODY_BYTES = 64 * 1024
# Open connections of all kinds; further ones are dropped.
CONNECTIONS_KEPT = 8192
_REJECTION_HEADER = "x-codex-rendezvous-rejection-reason"
_LOGGER = logging.getLogger("relay_service")


class ConnectionHandler(Protocol):
    """The interface of the service for a connection."""

    def arrived(self, request: Request) -> None: ...
    def endpoint(self, request: Request) -> Endpoint | None: ...
    def fault(self, endpoint: Endpoint | None, *, upgrade: bool) -> HttpFault | None: ...
    def answer(self, request: Request) -> Answer: ...
    def accept(self, request: Request) -> Socket: ...


class Connections:
    """All open connections of a service, so that none outlives it."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._open: set[asyncio.Transport] = set()
        self._empty: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._open)

    def add(self, transport: asyncio.Transport) -> bool:
        """Whether there is room for it."""
        if len(self._open) >= CONNECTIONS_KEPT:
            transport.abort()
            return False
        self._open.add(transport)
        self._changed()
        return True

    def remove(self, transport: asyncio.Transport) -> None:
        self._open.discard(transport)
        self._changed()
        if not self._open and self._empty is not None and not self._empty.done():
            self._empty.set_result(None)

    async def end(self, grace: float) -> None:
        """Close all, wait a moment until unsent bytes are sent, then abort the rest."""
        for transport in list(self._open):
            transport.close()
        for seconds in (grace, grace):
            if not self._open:
                return
            self._empty = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._empty], timeout=seconds)
            for transport in list(self._open):
                transport.abort()


class _WebSocket(WSProtocol):  # type: ignore[misc]
    """A picows connection that leaves the list of open ones when it ends."""

    def __init__(self, connections: Connections, socket: Socket) -> None:
        super().__init__(
            None,  # host and port, of a client
            None,  # path, of a client
            False,  # this is the server's side
            lambda _request: socket,
            _LOGGER,
            True,  # disconnect on an exception
            None,  # the request is here already, there is nothing to wait for
            False,  # pings are sent by the rendezvous
            30,
            30,
            WSAutoPingStrategy.PING_WHEN_IDLE,
            False,  # pings are answered by the socket, unless a test stops that
            socket.largest_message,
            None,  # headers, of a client
            256 * 1024,  # the read buffer to begin with: one record and its frame
        )
        self._connections = connections
        self._wire: asyncio.Transport | None = None

    def connection_made(self, transport: Any) -> None:
        self._wire = transport
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._wire is not None:
            self._connections.remove(self._wire)

    def feed(self, data: bytes) -> None:
        """Take bytes that have been read already, as if they came from the socket."""
        rest = memoryview(data)
        while rest:
            room = self.get_buffer(-1)
            size = min(len(room), len(rest))
            room[:size] = rest[:size]
            rest = rest[size:]
            self.buffer_updated(size)


class Front(asyncio.Protocol):
    """One accepted connection, as long as it speaks HTTP."""

    def __init__(
        self, desk: ConnectionHandler, connections: Connections, clock: Callable[[], float]
    ) -> None:
        self._desk = desk
        self._connections = connections
        self._clock = clock
        self._http = h11.Connection(h11.SERVER)
        self._raw: bytearray | None = bytearray()
        self._head: h11.Request | None = None
        self._body = bytearray()
        self._deaf = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        wire = cast("asyncio.Transport", transport)
        if self._connections.add(wire):
            self._transport = wire

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._connections.remove(self._transport)
            self._transport = None

    # ---- reading ------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        # Until the first head is complete, the receiver of these bytes is unknown.
        if self._raw is not None:
            self._raw += data
        self._http.receive_data(data)
        self._proceed()

    def eof_received(self) -> bool:
        return False

    def _proceed(self) -> None:
        try:
            while self._transport is not None:
                event = self._http.next_event()
                if event is h11.NEED_DATA or event is h11.PAUSED:
                    return
                if not self._take(event):
                    return
        except h11.RemoteProtocolError as error:
            self._write_plain(error.error_status_hint, [])

    def _take(self, event: Any) -> bool:
        """Handle one event; whether to go on."""
        if isinstance(event, h11.Request):
            self._head, self._body = event, bytearray()
            raw, self._raw = self._raw, None
            if raw is not None and _is_upgrade(event):
                self._upgrade(bytes(raw))
                return False
        elif isinstance(event, h11.Data):
            self._body += event.data
            if len(self._body) > BODY_BYTES:
                self._write_plain(413, [])
                return False
        elif isinstance(event, h11.EndOfMessage):
            self._respond()
        elif isinstance(event, h11.ConnectionClosed):
            return False
        return True

    def _request(self) -> Request:
        assert self._head is not None
        headers = tuple(
            (name.decode(), value.decode("latin-1")) for name, value in self._head.headers
        )
        request = Request(
            self._head.method.decode(),
            self._head.target.decode("latin-1"),
            headers,
            bytes(self._body),
            self._clock(),
        )
        self._desk.arrived(request)
        return request

    # ---- answering ----------------------------------------------------------------------

    def _respond(self) -> None:
        request = self._request()
        endpoint = self._desk.endpoint(request)
        fault = self._desk.fault(endpoint, upgrade=False)
        if fault is None:
            self._write(self._encode(self._desk.answer(request)))
            self._next_request()
            return
        if fault.manner is HttpFaultKind.HANG:
            self._deaf = True
            return
        if fault.manner is HttpFaultKind.GARBAGE:
            self._write(GARBAGE)
            self._hang_up()
            return
        answer = fault.answer if fault.answer is not None else self._desk.answer(request)
        if fault.rewrite is not None and answer.status == 200:
            changed = fault.rewrite(dict(answer.body))
            answer = Answer(answer.status, changed, answer.headers)
        self._misbehave(self._encode(answer), len(answer.content()), fault)

    def _misbehave(self, data: bytes, body_size: int, fault: HttpFault) -> None:
        if fault.manner is HttpFaultKind.CUT:
            self._write(data[: len(data) - (body_size + 1) // 2])
            # Orderly, so that the half answer arrives: an abort could overtake it.
            self._hang_up()
        elif fault.manner is HttpFaultKind.DRIP:
            self._drip(data, fault)
        else:
            self._write(data)
            self._next_request()

    def _drip(self, data: bytes, fault: HttpFault) -> None:
        if self._transport is None:
            return
        self._write(data[: fault.piece])
        rest = data[fault.piece :]
        if rest:
            asyncio.get_running_loop().call_later(fault.pause, self._drip, rest, fault)
        else:
            self._next_request()

    def _encode(self, answer: Answer) -> bytes:
        content = answer.content()
        headers = [("content-length", str(len(content))), *answer.headers]
        if content and not any(name.lower() == "content-type" for name, _ in headers):
            headers.append(("content-type", "application/json"))
        response = h11.Response(
            status_code=answer.status, headers=headers, reason=_phrase(answer.status)
        )
        events = [response, h11.EndOfMessage()]
        if content and answer.status not in (204, 304):
            events.insert(1, h11.Data(data=content))
        return b"".join(self._http.send(event) or b"" for event in events)

    def _next_request(self) -> None:
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        else:
            self._hang_up()

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _write_plain(self, status: int, headers: list[tuple[str, str]]) -> None:
        """An answer without a body, and the end of the connection."""
        lines = [f"HTTP/1.1 {status} {_phrase(status).decode()}"]
        lines += [f"{name}: {value}" for name, value in headers]
        lines += ["content-length: 0", "connection: close", "", ""]
        self._write("\r\n".join(lines).encode("latin-1"))
        self._hang_up()

    def _hang_up(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # ---- upgrading ----------------------------------------------------------------------

    def _upgrade(self, raw: bytes) -> None:
        request = self._request()
        fault = self._desk.fault(self._desk.endpoint(request), upgrade=True)
        if fault is not None:
            self._refuse_by(fault)
            return
        try:
            socket = self._desk.accept(request)
        except Rejected as rejected:
            self._write_plain(rejected.status, [(_REJECTION_HEADER, rejected.reason)])
            return
        transport, self._transport = self._transport, None
        assert transport is not None
        protocol = _WebSocket(self._connections, socket)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        protocol.feed(raw)

    def _refuse_by(self, fault: HttpFault) -> None:
        if fault.manner is HttpFaultKind.HANG:
            self._deaf = True
            return
        if fault.manner is HttpFaultKind.CUT and self._transport is not None:
            self._transport.abort()
        elif fault.manner is HttpFaultKind.GARBAGE:
            self._write(GARBAGE)
            self._hang_up()
        elif fault.answer is not None:
            answer = fault.answer
            content = answer.content()
            lines = [f"HTTP/1.1 {answer.status} {_phrase(answer.status).decode()}"]
            lines += [f"{name}: {value}" for name, value in answer.headers]
            lines += [f"content-length: {len(content)}", "connection: close", "", ""]
            self._write("\r\n".join(lines).encode("latin-1") + content)
            self._hang_up()


def _is_upgrade(head: h11.Request) -> bool:
    return any(name == b"upgrade" and value.lower() == b"websocket" for name, value in head.headers)


def _phrase(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b"Unknown"
