"""An HTTP/1.1 client on h11: responses are streamed, connections reused, redirects returned.

Nothing is added to a request: no User-Agent, no cookies, no compression.

Hand-written because WebSockets need the connections of `dial` as well. httpcore would add a second
network stack on anyio, and takes 4.6 times as long for a request (`python -m bench.alternatives`).
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import cast

import h11

from exec_server.errors import CertificateRejected, ConnectFailed, ExecServerError, os_error_text
from exec_server.net.client_tls import roots_for_http, tls_context
from exec_server.net.dial import open_connection, proxy_for
from exec_server.net.http1 import PARSED_HEAD_BYTES
from exec_server.protocol.urls import Url, parse_url

# Buffered bytes of a body at which reading pauses: enough for a fast link. One read may go beyond.
READ_AHEAD_BYTES = 262_144
# Idle connections that are kept: as many as one client uses, except in bursts. Further ones are
# closed after their response.
IDLE_CONNECTIONS = 8
# An older connection is not reused: a middlebox may have dropped it silently, and the request
# would wait until its timeout.
IDLE_SECONDS = 60.0
# The same for a request that must not be sent twice: servers keep connections longer than this,
# so none is closed at the moment of its reuse.
FRESH_SECONDS = 1.0

_SCHEMES = frozenset({"http", "https"})
# Methods whose requests have a Content-Length even without a body (RFC 9110, 8.6).
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class HttpFailed(ExecServerError):
    """No whole response arrived; `causes` begins with the outermost cause, as `args` does."""

    def __init__(self, text: str, *causes: str) -> None:
        super().__init__(text, *causes)
        self.text = text
        self.causes = causes

    def __str__(self) -> str:
        return self.text


class CertificateFailed(HttpFailed):
    """The certificate of the server is not trusted; a retry would not help."""


class StreamedResponse:
    """The head of a response, and its body as a stream; must be closed."""

    def __init__(
        self, connection: _Connection, head: _Head, release: Callable[[_Connection], None]
    ) -> None:
        self.status = head.status_code
        self.reason = head.reason.decode("latin-1")
        self.headers = [(name.decode(), value.decode("latin-1")) for name, value in head.headers]
        self._connection: _Connection | None = connection
        self._release = release

    async def read(self) -> bytes:
        """Return the next bytes of the body, none at its end; raises HttpFailed."""
        if self._connection is None:
            return b""
        try:
            chunk = await self._connection.read()
        except BaseException:
            self._connection.close()
            raise
        if not chunk:
            self.close()
        return chunk

    def close(self) -> None:
        """Release the connection, which is kept if the response is complete."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._release(connection)


class Client:
    """Makes requests, any number at a time; must be closed."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._idle: list[_Connection] = []  # in the order of their last use
        self._closed = False

    async def open(
        self,
        method: str,
        url: str,
        headers: Sequence[tuple[str, str]],
        body: bytes = b"",
        *,
        repeatable: bool = False,
    ) -> StreamedResponse:
        """Send a request and wait for the response head; raises HttpFailed.

        A `repeatable` request is sent again if the server closed an idle connection meanwhile.
        """
        try:
            parsed = parse_url(url, _SCHEMES)
        except ValueError as error:
            raise HttpFailed(f"builder error for url ({url})", str(error)) from None
        error_text = f"error sending request for url ({url})"
        request = _encoded(method, parsed, headers, body, error_text)
        connection = self._take_idle(parsed, IDLE_SECONDS if repeatable else FRESH_SECONDS)
        if connection is not None:
            try:
                return await self._exchange(connection, request, body, error_text)
            except HttpFailed:
                # After the first byte of a response, the server has not just closed it.
                if connection.has_received or not repeatable:
                    raise
        connection = await self._open(parsed, error_text)
        return await self._exchange(connection, request, body, error_text)

    async def close(self) -> None:
        """Close idle connections; pending requests end with their callers."""
        self._closed = True
        connections, self._idle = self._idle, []
        for connection in connections:
            connection.close()
            await connection.lost

    async def _exchange(
        self, connection: _Connection, request: h11.Request, body: bytes, error_text: str
    ) -> StreamedResponse:
        try:
            head = await connection.request(request, body, error_text)
            return StreamedResponse(connection, head, self._release)
        except BaseException:
            connection.close()
            raise

    def _release(self, connection: _Connection) -> None:
        if self._closed or not connection.prepare_reuse():
            connection.close()
            return
        self._idle.append(connection)
        if len(self._idle) > IDLE_CONNECTIONS:
            self._idle.pop(0).close()

    def _take_idle(self, url: Url, age: float) -> _Connection | None:
        now = time.monotonic()
        for connection in list(self._idle):
            if connection.last_used < now - IDLE_SECONDS or connection.is_closing():
                self._idle.remove(connection)
                connection.close()
        for index in range(len(self._idle) - 1, -1, -1):
            connection = self._idle[index]
            if connection.url[:3] == url[:3] and connection.last_used >= now - age:
                return self._idle.pop(index)
        return None

    async def _open(self, url: Url, error_text: str) -> _Connection:
        try:
            if url.secure and self._tls is None:
                # In a thread: loading the root certificates of the system takes long.
                self._tls = await asyncio.to_thread(tls_context, roots_for_http(os.environ))
            _, connection = await open_connection(url, lambda: _Connection(url), tls=self._tls)
        except ConnectFailed as error:
            kind = CertificateFailed if isinstance(error, CertificateRejected) else HttpFailed
            raise kind(error_text, "client error (Connect)", str(error)) from None
        except OSError as error:
            is_rejected = isinstance(error, ssl.SSLCertVerificationError)
            kind = CertificateFailed if is_rejected else HttpFailed
            raise kind(error_text, "client error (Connect)", *_causes(error)) from None
        return connection


_Head = h11.Response | h11.InformationalResponse  # the latter only to switch protocols


class _Connection(asyncio.Protocol):
    """One connection, with one exchange at a time."""

    def __init__(self, url: Url) -> None:
        self.url = url
        self.has_received = False  # bytes since the last request
        self.last_used = 0.0
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=PARSED_HEAD_BYTES)
        self._error_text = ""
        self._is_awaiting = False
        self._head: _Head | None = None
        self._chunks: list[bytes] = []  # of the body, not read yet
        self._buffered_bytes = 0
        self._is_complete = False
        self._failure: HttpFailed | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def request(self, request: h11.Request, body: bytes, error_text: str) -> _Head:
        """Send a request and wait for the head of its response; raises HttpFailed."""
        self.has_received, self._error_text, self._head = False, error_text, None
        if self.is_closing():
            raise HttpFailed(error_text, "client error (SendRequest)", "connection closed")
        self._is_awaiting = True
        try:
            events = (request, h11.Data(body), h11.EndOfMessage())
            parts = [self._http.send(event) for event in events]
        except h11.LocalProtocolError:
            raise HttpFailed(error_text, "the body length differs from its headers") from None
        for part in filter(None, parts):
            self._transport.write(part)
        while self._head is None:
            await self._wait()
        return self._head

    async def read(self) -> bytes:
        """Return the next bytes of the body, none at its end; raises HttpFailed."""
        while not self._chunks and not self._is_complete:
            await self._wait()
        chunk = b"".join(self._chunks)
        self._chunks.clear()
        self._buffered_bytes = 0
        if not self.is_closing():
            self._transport.resume_reading()
        return chunk

    def prepare_reuse(self) -> bool:
        """Make the connection ready for another request; returns False if that is impossible."""
        if not self._is_complete or self.is_closing() or self._http.trailing_data[0]:
            return False
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        self._is_awaiting = self._is_complete = False
        self._chunks.clear()
        self._buffered_bytes = 0
        self._transport.resume_reading()
        self.last_used = time.monotonic()
        return True

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        """Drop the connection without waiting for unsent data."""
        self._transport.abort()

    async def _wait(self) -> None:
        """Wait for the next event; raises HttpFailed after a failure."""
        if self._failure is not None:
            raise self._failure
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.has_received = True
        if not self._is_awaiting or self._is_complete:
            self.close()  # unexpected data must not become the response to the next request
            return
        self._http.receive_data(data)
        self._advance()

    def eof_received(self) -> None:
        if self._is_awaiting and not self._is_complete:
            self._http.receive_data(b"")
            self._advance()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(os_error_text(error) if isinstance(error, OSError) else "connection closed")
        if not self.lost.done():
            self.lost.set_result(None)

    def _advance(self) -> None:
        try:
            while not self._is_complete:
                event = self._http.next_event()
                if isinstance(event, h11.Data):
                    self._chunks.append(bytes(event.data))
                    self._buffered_bytes += len(event.data)
                elif isinstance(event, h11.Response):
                    self._head = event
                elif isinstance(event, h11.InformationalResponse):
                    if event.status_code == 101:
                        self._head = event
                elif event is h11.NEED_DATA:
                    break
                else:
                    # The end of the body, or a switch of protocols, after which there is none.
                    self._is_complete = True
        except h11.RemoteProtocolError:
            ended = self._http.trailing_data[1]
            # The text of h11 would show the response, which may repeat a secret.
            self._fail("connection closed before message completed" if ended else "invalid HTTP")
        if self._buffered_bytes > READ_AHEAD_BYTES and not self.is_closing():
            self._transport.pause_reading()
        self._wake()

    def _fail(self, cause: str) -> None:
        if self._failure is not None or self._is_complete:
            return
        if self._head is not None:
            reading = ("error reading a body from connection", cause)
            self._failure = HttpFailed("error decoding response body", *reading)
        else:
            self._failure = HttpFailed(self._error_text, "client error (SendRequest)", cause)
        self._wake()


def _encoded(
    method: str, url: Url, headers: Sequence[tuple[str, str]], body: bytes, error_text: str
) -> h11.Request:
    fields = list(headers)
    named = {name.lower() for name, _ in headers}
    if "host" not in named:
        fields.insert(0, ("host", url.authority))
    has_length = "content-length" in named or "transfer-encoding" in named
    if not has_length and (body or method in _WITH_BODY):
        fields.append(("content-length", str(len(body))))
    target = f"{url.host}:{url.port}" if method == "CONNECT" else url.target
    try:
        proxy = proxy_for(url)
    except ConnectFailed as error:
        raise HttpFailed(error_text, "client error (Connect)", str(error)) from None
    if proxy is not None and not url.secure:
        # A proxy gets the whole URL, unless there is a tunnel through it.
        target = f"http://{url.authority}{url.target}"
        if proxy.authorization is not None:
            fields.append(("proxy-authorization", proxy.authorization))
    try:
        encoded = [(name.encode(), value.encode()) for name, value in fields]
        return h11.Request(method=method, target=target, headers=encoded)
    except h11.LocalProtocolError:
        # The text of h11 would show the value, which may be a secret.
        raise HttpFailed(error_text, "a header has an invalid value") from None


def _causes(error: OSError) -> tuple[str, ...]:
    if isinstance(error, socket.gaierror):
        return "dns error", f"failed to lookup address information: {error.strerror}"
    if isinstance(error, ssl.SSLError):
        return (str(error),)
    if error.errno is not None:
        error = OSError(error.errno, os.strerror(error.errno))  # uvloop has other texts
    return "tcp connect error", os_error_text(error)
