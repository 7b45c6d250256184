"""HttpExchange: the requests of one HTTP connection, and their exchange with origins.

h11 parses both directions, and every head is written anew from the parsed form: a request or
response that two parsers could read differently is refused or passed on in the proxy's reading.
Libraries (mitmproxy, pproxy) bring a policy of their own instead of our limits and decisions.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Final

import h11

from exec_server.net import http1
from exec_server.net.http1 import PARSED_HEAD_BYTES
from exec_server.proxy import http_messages as messages
from exec_server.proxy.http_messages import BadRequest, Head, HeadBuffer, ProxyAnswer
from exec_server.proxy.stream import BUFFER_BYTES, Stream

# Bytes of a body that are read at once if the parser has to find its end, and the parts of it, or
# interim responses, that are parsed before other connections get their turn: each part may have
# one byte, and takes as long as a large one.
PARSED_BYTES: Final = 65_536
EVENTS_AT_ONCE: Final = 64
# The time for the rest of a head once its first byte has arrived, and for the next request on an
# open connection. Then the connection is closed.
HEAD_SECONDS = 30.0
IDLE_SECONDS = 300.0

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
# What the parser of responses has to know about requests: those to HEAD have no body.
_OF_HEAD: Final = h11.Request(method=b"HEAD", target=b"/", headers=[(b"Host", b"a")])
_OF_OTHERS: Final = h11.Request(method=b"GET", target=b"/", headers=[(b"Host", b"a")])


class HttpExchange(ABC):
    """Serves the requests of one connection, one after the other; subclasses handle each."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._http = _request_parser()
        self._head = HeadBuffer()
        self._may_continue = False  # the process waits for `100 Continue`
        self._is_over = False  # no other request is served

    @abstractmethod
    async def handle(self, request: h11.Request) -> bool:
        """Answer a request; True if the connection has ended or is used for something else."""

    async def serve(self) -> None:
        """Serve until either side ends the connection; raises OSError if that is broken."""
        request = None
        while True:
            try:
                request = await self._next_request()
                if request is None:
                    return
                messages.check_framing(request)
                if await self.handle(request):
                    return
            except BadRequest as error:
                answer = messages.text_answer(error.status, error.text, date())
                await self.answer(request, answer, last=True)
                return
            except h11.RemoteProtocolError as error:
                await self._refuse_bytes(error.error_status_hint)
                return
            if self._is_over or not messages.keeps_alive(request) or not self._has_ended(request):
                return
            rest, is_closed = self._http.trailing_data
            self._http, self._head = _request_parser(), HeadBuffer(rest, is_closed)
            if rest:
                await asyncio.sleep(0)  # many small requests must not keep the loop from others

    def _has_ended(self, request: h11.Request) -> bool:
        if messages.is_empty(request):
            return True  # at the end of its head
        return self._http.their_state not in (h11.SEND_BODY, h11.ERROR)

    @property
    def early(self) -> bytes:
        """Bytes that follow the request."""
        return self._http.trailing_data[0]

    async def _next_request(self) -> h11.Request | None:
        """The next request; None at the end of the connection, or after too long."""
        loop = asyncio.get_running_loop()
        head = self._head
        is_idle = not head.data
        try:
            async with asyncio.timeout(IDLE_SECONDS if is_idle else HEAD_SECONDS) as scope:
                while not head.is_complete and len(head.data) <= PARSED_HEAD_BYTES:
                    head.receive(await self.stream.receive(PARSED_HEAD_BYTES))
                    if is_idle:
                        is_idle = False
                        scope.reschedule(loop.time() + HEAD_SECONDS)
        except TimeoutError:
            return None
        if head.data:
            self._http.receive_data(head.amended())
        if head.is_closed:
            self._http.receive_data(b"")
        event = self._http.next_event()
        if not isinstance(event, h11.Request):
            return None
        self._may_continue = self._http.they_are_waiting_for_100_continue
        return event

    async def drop_body(self, request: h11.Request) -> None:
        """Read a request to its end."""
        if not messages.is_empty(request):
            while await self._request_body():
                pass

    async def _request_body(self) -> bytes:
        return await _body(self._http, self._receive_body)

    async def _receive_body(self) -> bytes:
        if self._may_continue:
            self._may_continue = False
            await self.stream.send(_CONTINUE)
        return await self.stream.receive(PARSED_BYTES)

    async def exchange(self, request: h11.Request, forwarded: Head, outer: Stream) -> bool:
        """Pass on a request and its response, both while they arrive; False without a response."""
        head = forwarded.encode()
        if messages.is_empty(request):
            try:
                await outer.send(head)
            except OSError:
                return False
            return await self._download(request, outer)
        async with asyncio.TaskGroup() as group:
            upload = group.create_task(self._upload(request, head, outer))
            has_response = await self._download(request, outer)
            upload.cancel()  # of a body that the origin has not waited for
        return has_response

    async def _upload(self, request: h11.Request, head: bytes, outer: Stream) -> None:
        """Pass on a request with its body; what fails here shows in the response."""
        is_chunked = messages.is_chunked(request)
        try:
            await outer.send(head)
            while data := await self._request_body():
                await outer.send(messages.chunk(data) if is_chunked else data)
            if is_chunked:
                await outer.send(messages.LAST_CHUNK)
        except (OSError, h11.ProtocolError):
            outer.abort()

    async def _download(self, request: h11.Request, outer: Stream) -> bool:
        """Pass on the response; False if none has begun."""
        origin = h11.Connection(h11.CLIENT, max_incomplete_event_size=PARSED_HEAD_BYTES)
        origin.send(_OF_HEAD if request.method == b"HEAD" else _OF_OTHERS)
        try:
            response = await self._response(origin, outer)
        except (OSError, h11.ProtocolError):
            return False
        self._may_continue = False
        try:
            length = messages.body_length(request, response)
            head = messages.forwarded_response(request, response, length, date()).encode()
            if length is None:
                await self.stream.send(head)
                await self._pass_parsed(request.http_version >= b"1.1", origin, outer)
            else:
                await self._pass_bytes(head, length, origin, outer)
        except (OSError, h11.ProtocolError):
            self._is_over = True
            self.stream.abort()  # the process must not take a part for the whole
        return True

    async def _response(self, origin: h11.Connection, outer: Stream) -> h11.Response:
        for number in itertools.count(1):
            event = origin.next_event()
            if isinstance(event, h11.Response):
                messages.check_response(event)
                return event
            if event is h11.NEED_DATA:
                origin.receive_data(await outer.receive(PARSED_HEAD_BYTES))
            elif not isinstance(event, h11.InformationalResponse):
                break
            if number % EVENTS_AT_ONCE == 0:
                await asyncio.sleep(0)
        raise h11.RemoteProtocolError("the origin has closed the connection")

    async def _pass_bytes(
        self, head: bytes, length: int, origin: h11.Connection, outer: Stream
    ) -> None:
        data = head + origin.trailing_data[0][:length]
        left = length + len(head)
        while True:
            await self.stream.send(data)
            left -= len(data)
            if not left:
                return
            data = await outer.receive(min(left, BUFFER_BYTES))
            if not data:
                raise ConnectionResetError("the origin has closed the connection")

    async def _pass_parsed(self, may_chunk: bool, origin: h11.Connection, outer: Stream) -> None:
        while data := await _body(origin, lambda: outer.receive(PARSED_BYTES)):
            await self.stream.send(messages.chunk(data) if may_chunk else data)
        if may_chunk:
            await self.stream.send(messages.LAST_CHUNK)

    async def answer(
        self, request: h11.Request | None, answer: ProxyAnswer, *, last: bool = False
    ) -> None:
        """Send an answer of the proxy itself; the last one says that the connection ends."""
        self._may_continue = False
        self._is_over |= last
        await self.stream.send(messages.encode_answer(request, answer, last=last))

    async def _refuse_bytes(self, status: int) -> None:
        reason = http1.reason(431 if status == 431 else 400)
        headers = [("connection", "close"), ("content-length", "0"), ("date", date().decode())]
        await self.stream.send(http1.encode_head(f"HTTP/1.1 {status} {reason}", headers))


async def _body(parser: h11.Connection, receive: Callable[[], Awaitable[bytes]]) -> bytes:
    """The next bytes of a body, all of one read together; empty at its end."""
    data = bytearray()
    for number in itertools.count(1):
        if parser.their_state is not h11.SEND_BODY:
            break
        event = parser.next_event()
        if isinstance(event, h11.Data):
            data += event.data
        elif event is h11.NEED_DATA:
            if data:
                break
            parser.receive_data(await receive())
        if number % EVENTS_AT_ONCE == 0:
            await asyncio.sleep(0)
    return bytes(data)


def _request_parser() -> h11.Connection:
    return h11.Connection(h11.SERVER, max_incomplete_event_size=PARSED_HEAD_BYTES)


def date() -> bytes:
    """The current time for a Date header."""
    return http1.date(int(time.time())).encode()
