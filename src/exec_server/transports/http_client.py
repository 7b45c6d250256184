"""An HTTP/1.1 client around h11: answers are read piece by piece, connections are kept.

It sends what it is told to and nothing more: no User-Agent, no cookies, no compression, and
redirects are answers like any other.
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

from exec_server.errors import ConnectFailed, ExecServerError, os_error_text
from exec_server.transports.dial import (
    Url,
    open_connection,
    parse_url,
    proxy_for,
    roots_for_http,
    tls_context,
)

# Of an answer's head. The longest that are met have some kilobytes; more is not read.
HEAD_BYTES = 65_536
# Of a body, what is taken from the network before somebody has asked for it: enough to keep a
# fast link busy. Then the connection is not read. What one read brings may come on top.
AHEAD_BYTES = 262_144
# Connections kept for the next request: as many as one client uses in all but the busiest
# moments. More are closed after their answer.
IDLE_LINKS = 8
# Beyond it a connection is not used again: a middlebox may have forgotten it without a word, and
# then a request would wait for its whole time.
IDLE_SECONDS = 60.0
# The same for a request that must not be sent twice: no usual server closes a connection so
# early, so that it is not closed just when we use it.
FRESH_SECONDS = 1.0

_SCHEMES = frozenset({"http", "https"})
# Methods whose requests say how long their body is even if there is none, as RFC 9110 wants it.
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class HttpFailed(ExecServerError):
    """No whole answer came; `causes` lead from the outside in, and so do `args`."""

    def __init__(self, text: str, *causes: str) -> None:
        super().__init__(text, *causes)
        self.text = text
        self.causes = causes

    def __str__(self) -> str:
        return self.text


class Answer:
    """The head of an answer, and its body as it comes; whoever has it closes it."""

    def __init__(self, link: _Link, head: _Head, finished: Callable[[_Link], None]) -> None:
        self.status = head.status_code
        self.reason = head.reason.decode("latin-1")
        self.headers = [(name.decode(), value.decode("latin-1")) for name, value in head.headers]
        self._link: _Link | None = link
        self._finished = finished

    async def read(self) -> bytes:
        """The next piece of the body, nothing at its end; raises HttpFailed."""
        if self._link is None:
            return b""
        try:
            piece = await self._link.read()
        except BaseException:
            self._link.close()
            raise
        if not piece:
            self.close()
        return piece

    def close(self) -> None:
        """Let go of the connection: it is kept if all of the answer has come."""
        link, self._link = self._link, None
        if link is not None:
            self._finished(link)


class Client:
    """Makes requests, any number at a time; whoever makes it closes it."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._idle: list[_Link] = []  # the one used last is the last
        self._closed = False

    async def open(
        self,
        method: str,
        url: str,
        headers: Sequence[tuple[str, str]],
        body: bytes = b"",
        *,
        repeatable: bool = False,
    ) -> Answer:
        """Ask, and wait for the head of the answer; raises HttpFailed.

        A server may close a kept connection just when it is used again. A `repeatable` request
        is then sent once more.
        """
        try:
            where = parse_url(url, _SCHEMES)
        except ValueError as error:
            raise HttpFailed(f"builder error for url ({url})", str(error)) from None
        sending = f"error sending request for url ({url})"
        request = _encoded(method, where, headers, body, sending)
        link = self._take(where, IDLE_SECONDS if repeatable else FRESH_SECONDS)
        if link is not None:
            try:
                return await self._ask(link, request, body, sending)
            except HttpFailed:
                # If it has begun to answer, it was something else.
                if link.heard or not repeatable:
                    raise
        return await self._ask(await self._open(where, sending), request, body, sending)

    async def close(self) -> None:
        """Close what is idle; requests under way end with their callers."""
        self._closed = True
        links, self._idle = self._idle, []
        for link in links:
            link.close()
            await link.lost

    async def _ask(self, link: _Link, request: h11.Request, body: bytes, sending: str) -> Answer:
        try:
            return Answer(link, await link.ask(request, body, sending), self._finished)
        except BaseException:
            link.close()
            raise

    def _finished(self, link: _Link) -> None:
        if self._closed or not link.may_be_used_again():
            link.close()
            return
        self._idle.append(link)
        if len(self._idle) > IDLE_LINKS:
            self._idle.pop(0).close()

    def _take(self, where: Url, age: float) -> _Link | None:
        """A connection to there that is still good, as far as we can tell."""
        now = time.monotonic()
        for link in list(self._idle):
            if link.used < now - IDLE_SECONDS or link.is_closing():
                self._idle.remove(link)
                link.close()
        for index in range(len(self._idle) - 1, -1, -1):
            link = self._idle[index]
            if link.where[:3] == where[:3] and link.used >= now - age:
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


_Head = h11.Response | h11.InformationalResponse  # the latter only to switch protocols


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
        self._asked = False
        self._head: _Head | None = None
        self._pieces: list[bytes] = []  # of the body, not asked for yet
        self._ahead = 0  # their bytes
        self._ended = False
        self._failure: HttpFailed | None = None
        self._news: asyncio.Future[None] | None = None

    async def ask(self, request: h11.Request, body: bytes, sending: str) -> _Head:
        """Send a request and wait for the head of its answer; raises HttpFailed."""
        self.heard, self._sending, self._head = False, sending, None
        if self.is_closing():
            raise HttpFailed(sending, "client error (SendRequest)", "connection closed")
        self._asked = True
        try:
            events = (request, h11.Data(body), h11.EndOfMessage())
            parts = [self._http.send(event) for event in events]
        except h11.LocalProtocolError:
            raise HttpFailed(sending, "the body has another length than it says") from None
        for part in filter(None, parts):
            self._transport.write(part)
        while self._head is None:
            await self._wait()
        return self._head

    async def read(self) -> bytes:
        """The next piece of the body, nothing at its end; raises HttpFailed."""
        while not self._pieces and not self._ended:
            await self._wait()
        piece = b"".join(self._pieces)
        self._pieces.clear()
        self._ahead = 0
        if not self.is_closing():
            self._transport.resume_reading()
        return piece

    def may_be_used_again(self) -> bool:
        """Whether the connection is ready for another request; makes it so."""
        if not self._ended or self.is_closing() or self._http.trailing_data[0]:
            return False
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        self._asked = self._ended = False
        self._pieces.clear()
        self._ahead = 0
        self._transport.resume_reading()
        self.used = time.monotonic()
        return True

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        """Drop the connection: nobody waits for a farewell."""
        self._transport.abort()

    async def _wait(self) -> None:
        """Wait until something has come; raises HttpFailed if nothing more will."""
        if self._failure is not None:
            raise self._failure
        self._news = asyncio.get_running_loop().create_future()
        await self._news

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    # ---- what the loop calls ----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.heard = True
        if not self._asked or self._ended:
            self.close()  # an answer to no question: it must not become that of the next
            return
        self._http.receive_data(data)
        self._advance()

    def eof_received(self) -> None:
        if self._asked and not self._ended:
            self._http.receive_data(b"")
            self._advance()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(os_error_text(error) if isinstance(error, OSError) else "connection closed")
        if not self.lost.done():
            self.lost.set_result(None)

    # ---- the answer -------------------------------------------------------------------

    def _advance(self) -> None:
        """Take what has come apart."""
        try:
            while not self._ended:
                event = self._http.next_event()
                if isinstance(event, h11.Data):
                    self._pieces.append(bytes(event.data))
                    self._ahead += len(event.data)
                elif isinstance(event, h11.Response):
                    self._head = event
                elif isinstance(event, h11.InformationalResponse):
                    if event.status_code == 101:
                        self._head = event
                elif event is h11.NEED_DATA:
                    break
                else:
                    # The end, or that of HTTP: after a switch to something else there is no body.
                    self._ended = True
        except h11.RemoteProtocolError:
            ended = self._http.trailing_data[1]
            # Its own text would show what came, and that may repeat a secret of ours.
            self._fail("connection closed before message completed" if ended else "invalid HTTP")
        if self._ahead > AHEAD_BYTES and not self.is_closing():
            self._transport.pause_reading()
        self._tell()

    def _fail(self, cause: str) -> None:
        if self._failure is not None or self._ended:
            return
        if self._head is not None:
            reading = ("error reading a body from connection", cause)
            self._failure = HttpFailed("error decoding response body", *reading)
        else:
            self._failure = HttpFailed(self._sending, "client error (SendRequest)", cause)
        self._tell()


def _encoded(
    method: str, where: Url, headers: Sequence[tuple[str, str]], body: bytes, sending: str
) -> h11.Request:
    lines = list(headers)
    named = {name.lower() for name, _ in headers}
    if "host" not in named:
        lines.insert(0, ("host", where.authority))
    has_length = "content-length" in named or "transfer-encoding" in named
    if not has_length and (body or method in _WITH_BODY):
        lines.append(("content-length", str(len(body))))
    target = f"{where.host}:{where.port}" if method == "CONNECT" else where.target
    try:
        proxy = proxy_for(where)
    except ConnectFailed as error:
        raise HttpFailed(sending, "client error (Connect)", str(error)) from None
    if proxy is not None and not where.secure:
        # A proxy is told the whole URL, unless there is a tunnel through it.
        target = f"http://{where.authority}{where.target}"
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
