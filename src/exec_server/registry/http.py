"""A small HTTP/1.1 client for short exchanges: connections are kept, redirects not followed.

It sends what it is told to and nothing more: no User-Agent, no cookies, no compression.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Sequence
from typing import NamedTuple, cast

import h11

from exec_server.errors import ConnectFailed, ExecServerError, os_error_text
from exec_server.transports.dial import (
    Url,
    open_connection,
    parse_url,
    proxy_for,
    roots_for_http,
    tls_context,
)

# For a whole exchange, from the name of the host to the last byte of the answer.
REQUEST_SECONDS = 10.0
# Of an answer. The longest that makes sense is some kilobytes; more is not read.
BODY_BYTES = 1_048_576
HEAD_BYTES = 65_536
# Connections kept for the next request: as many as handshakes are validated at a time in all but
# the busiest moments. More are closed after their answer.
IDLE_LINKS = 8
# Beyond it a connection is not used again: a middlebox may have forgotten it without a word, and
# then a request would wait for its whole time.
IDLE_SECONDS = 60.0

_SCHEMES = frozenset({"http", "https"})


class Reply(NamedTuple):
    """A whole answer, whatever its status."""

    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: bytes


class HttpFailed(ExecServerError):
    """No whole answer came; `causes` lead from the outside in."""

    def __init__(self, text: str, *causes: str) -> None:
        super().__init__(text)
        self.text = text
        self.causes = causes


class AnswerTooLarge(HttpFailed):
    """The answer was more than BODY_BYTES: asking again would not help."""


class HttpClient:
    """Makes requests, any number at a time; whoever makes it closes it."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._idle: list[_Link] = []  # the one used last is the last
        self._closed = False

    async def request(
        self, method: str, url: str, headers: Sequence[tuple[str, str]], body: bytes = b""
    ) -> Reply:
        """Ask once; raises HttpFailed unless an answer came whole and in time."""
        try:
            where = parse_url(url, _SCHEMES)
        except ValueError as error:
            raise HttpFailed(f"builder error for url ({url})", str(error)) from None
        sending = f"error sending request for url ({url})"
        request = _encoded(method, where, headers, body, sending)
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                return await self._ask(where, request, body, sending)
        except TimeoutError:
            raise HttpFailed("route-aware request timed out") from None

    async def close(self) -> None:
        """Close what is idle; requests under way end with their callers."""
        self._closed = True
        links, self._idle = self._idle, []
        for link in links:
            link.close()
            await link.lost

    async def _ask(self, where: Url, request: h11.Request, body: bytes, sending: str) -> Reply:
        link = self._take(where)
        if link is not None:
            try:
                return await self._exchange(link, request, body, sending)
            except HttpFailed:
                # The server may close an idle connection just when we use it again. If it has
                # begun to answer, it was something else.
                if link.heard:
                    raise
        link = await self._open(where, sending)
        return await self._exchange(link, request, body, sending)

    async def _exchange(
        self, link: _Link, request: h11.Request, body: bytes, sending: str
    ) -> Reply:
        try:
            reply = await link.ask(request, body, sending)
        except BaseException:
            link.close()
            raise
        if self._closed or not link.may_be_used_again():
            link.close()
            return reply
        self._idle.append(link)
        if len(self._idle) > IDLE_LINKS:
            self._idle.pop(0).close()
        return reply

    def _take(self, where: Url) -> _Link | None:
        """A connection to there that is still good, as far as we can tell."""
        oldest = time.monotonic() - IDLE_SECONDS
        for link in [link for link in self._idle if link.used < oldest or link.is_closing()]:
            self._idle.remove(link)
            link.close()
        for index in range(len(self._idle) - 1, -1, -1):
            if self._idle[index].where[:3] == where[:3]:
                return self._idle.pop(index)
        return None

    async def _open(self, where: Url, sending: str) -> _Link:
        try:
            if where.secure and self._tls is None:
                # In a thread: it reads and parses all roots of the system.
                self._tls = await asyncio.to_thread(tls_context, roots_for_http(os.environ))
            _, link = await open_connection(where, lambda: _Link(where), tls=self._tls)
        except ConnectFailed as error:
            raise HttpFailed(sending, "client error (Connect)", str(error)) from None
        except OSError as error:
            raise HttpFailed(sending, "client error (Connect)", *_causes(error)) from None
        return link


class _Link(asyncio.Protocol):
    """One connection, with one exchange at a time."""

    def __init__(self, where: Url) -> None:
        self.where = where
        self.heard = False  # whether anything came since the last request
        self.used = 0.0
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES)
        self._sending = ""
        self._head: h11.Response | None = None
        self._body = bytearray()
        self._answer: asyncio.Future[Reply] | None = None

    async def ask(self, request: h11.Request, body: bytes, sending: str) -> Reply:
        """Send a request and wait for its answer; raises HttpFailed."""
        self.heard = False
        self._sending, self._head = sending, None
        self._body.clear()
        if self.is_closing():
            raise HttpFailed(sending, "client error (SendRequest)", "connection closed")
        self._answer = asyncio.get_running_loop().create_future()
        parts = [self._http.send(request), self._http.send(h11.Data(body))]
        parts.append(self._http.send(h11.EndOfMessage()))
        self._transport.write(b"".join(part for part in parts if part))
        return await self._answer

    def may_be_used_again(self) -> bool:
        """Whether the connection is ready for another request; makes it so."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        if self._http.trailing_data[0] or self.is_closing():
            return False
        self._http.start_next_cycle()
        self._answer = None
        self.used = time.monotonic()
        return True

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        """Drop the connection: nobody waits for a farewell."""
        self._transport.abort()

    # ---- what the loop calls ----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.heard = True
        if self._answer is None or self._answer.done():
            self.close()  # an answer to no question: it must not become that of the next
            return
        self._http.receive_data(data)
        self._advance()

    def eof_received(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._http.receive_data(b"")
            self._advance()

    def connection_lost(self, error: Exception | None) -> None:
        cause = os_error_text(error) if isinstance(error, OSError) else "connection closed"
        self._fail(cause)
        if not self.lost.done():
            self.lost.set_result(None)

    # ---- the answer -------------------------------------------------------------------

    def _advance(self) -> None:
        try:
            while True:
                event = self._http.next_event()
                if isinstance(event, h11.Response):
                    self._head = event
                elif isinstance(event, h11.Data):
                    self._body += event.data
                    if len(self._body) > BODY_BYTES:
                        self._end(AnswerTooLarge(f"response body exceeds {BODY_BYTES} bytes"))
                        return
                elif isinstance(event, h11.EndOfMessage):
                    self._finish()
                    return
                elif not isinstance(event, h11.InformationalResponse):
                    return
        except h11.RemoteProtocolError as error:
            ended = self._http.trailing_data[1]
            self._fail("connection closed before message completed" if ended else str(error))

    def _finish(self) -> None:
        head = self._head
        assert head is not None
        headers = [(name.decode(), value.decode("latin-1")) for name, value in head.headers]
        reason = head.reason.decode("latin-1")
        assert self._answer is not None
        self._answer.set_result(Reply(head.status_code, reason, headers, bytes(self._body)))

    def _fail(self, cause: str) -> None:
        if self._head is not None:
            reading = ("error reading a body from connection", cause)
            self._end(HttpFailed("error decoding response body", *reading))
        else:
            self._end(HttpFailed(self._sending, "client error (SendRequest)", cause))

    def _end(self, failure: HttpFailed) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(failure)


def _encoded(
    method: str, where: Url, headers: Sequence[tuple[str, str]], body: bytes, sending: str
) -> h11.Request:
    lines = [("host", where.authority), *headers]
    target = where.target
    if body or method == "POST":
        lines.append(("content-length", str(len(body))))
    try:
        proxy = proxy_for(where)
    except ConnectFailed as error:
        raise HttpFailed(sending, "client error (Connect)", str(error)) from None
    if proxy is not None and not where.secure:
        # A proxy is told the whole URL, unless there is a tunnel through it.
        target = f"http://{where.authority}{target}"
        if proxy.authorization is not None:
            lines.append(("proxy-authorization", proxy.authorization))
    try:
        encoded = [(name.encode(), value.encode()) for name, value in lines]
        return h11.Request(method=method, target=target, headers=encoded)
    except h11.LocalProtocolError:
        # Its text would show the value, and that may be a secret.
        raise HttpFailed(sending, "a header has an invalid value") from None


def _causes(error: OSError) -> tuple[str, ...]:
    if isinstance(error, socket.gaierror):
        return "dns error", f"failed to lookup address information: {error.strerror}"
    if isinstance(error, ssl.SSLError):
        return (str(error),)
    if error.errno is not None:
        error = OSError(error.errno, os.strerror(error.errno))  # a loop words it its own way
    return "tcp connect error", os_error_text(error)
