"""HTTP requests that the server makes from its machine, with streamed response bodies."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Self

from exec_server.client.arguments import check_seconds
from exec_server.client.engine.flow_control import Consumer, current_consumer
from exec_server.client.engine.session import ClientSession
from exec_server.client.handle import Handle
from exec_server.client.results import Response
from exec_server.errors import (
    ConnectionLost,
    ExecServerError,
    InternalError,
    MethodNotFound,
    SessionLost,
    Unsupported,
)
from exec_server.protocol.decoding import Base64, Notice
from exec_server.protocol.http import REQUEST, BodyDeltaParams, Header, RequestParams

# Unread bytes of a body: reading from the server stops at the first and continues below the second.
FULL_BYTES: Final = 2 * 1_048_576
DRAINED_BYTES: Final = 524_288
# The memory that a piece takes beside its bytes, which counts as well.
PIECE_COST: Final = 256
# Unread bytes while a task waits for another answer. Body data cannot be requested again, so the
# body is given up beyond this.
OVERFLOW_BYTES: Final = 64 * 1_048_576
# Body of a complete response. A larger one needs `http_stream`.
BODY_BYTES: Final = 256 * 1_048_576

# Only pairs can contain a name more than once.
Headers = Mapping[str, str] | Iterable[tuple[str, str]]


class HttpStream(Handle):
    """A response with a streamed body; iterating gives its pieces.

    If the connection is lost, the rest of the body is lost: iterating raises ConnectionLost.
    """

    status: int
    headers: tuple[tuple[str, str], ...]

    def __init__(
        self,
        session: ClientSession,
        method: str,
        url: str,
        *,
        headers: Headers,
        body: bytes | None,
        timeout: float | None,
        follow_redirects: bool,
    ) -> None:
        super().__init__()
        if body is not None and not isinstance(body, bytes | bytearray | memoryview):
            raise TypeError(f"body must be bytes, not {type(body).__name__}: encode a text")
        check_seconds(timeout)
        pairs = headers.items() if isinstance(headers, Mapping) else headers
        self._session = session
        self._params = RequestParams(
            method=method,
            url=url,
            headers=[Header(name, value) for name, value in pairs],
            body_base64=None if body is None else Base64(body),
            timeout_ms=None if timeout in (None, math.inf) else max(1, round(timeout * 1000)),
            redirect_policy="follow" if follow_redirects else "stop",
            request_id=uuid.uuid4().hex,
            stream_response=True,
        )
        self._unsubscribe: Callable[[], None] = lambda: None
        self._pieces: deque[bytes] = deque()
        self._unread_bytes = 0
        self._next_seq = 1
        self._consumer: Consumer | None = None
        self._is_done = False
        self._failure: ExecServerError | None = None
        self._changed = asyncio.Event()

    def _target(self) -> str:
        """The request without the password and the query of its URL, and the status if known."""
        url = self._params.url.partition("?")[0].partition("#")[0]
        scheme, slashes, rest = url.rpartition("://")
        host, slash, path = rest.partition("/")
        status = f", status {self.status}" if hasattr(self, "status") else ""
        place = f"{scheme}{slashes}{host.rpartition('@')[2]}{slash}{path}"
        return f"{self._params.method} {place}{status}"

    async def _open(self) -> None:
        self._unsubscribe = self._session.subscribe(self)
        try:
            answer = await self._session.call(REQUEST, self._params)
        except MethodNotFound:
            self._unsubscribe()
            hint = "run a program such as curl on its machine instead"
            raise Unsupported("http/request", hint) from None
        except BaseException:
            self._unsubscribe()
            raise
        self.status = answer.status
        self.headers = tuple((header.name, header.value) for header in answer.headers)

    async def _close(self) -> None:
        self._unsubscribe()
        self._unsubscribe = lambda: None
        self._pieces.clear()
        self._session.flow_control.queue_drained(self)

    def header(self, name: str) -> str | None:
        """The value of the first header with this name."""
        return Response(self.status, self.headers).header(name)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if not self.is_open:
            raise self._not_open("the request")
        self._consumer = current_consumer()
        while not self._pieces:
            if self._failure is not None:
                raise self._failure
            if self._is_done:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        piece = self._pieces.popleft()
        self._unread_bytes -= len(piece) + PIECE_COST
        if self._unread_bytes < DRAINED_BYTES:
            self._session.flow_control.queue_drained(self)
        else:
            self._session.flow_control.queue_read(self, self._consumer)
        return piece

    def on_notice(self, notice: Notice[Any], params: Any) -> bool:
        if not isinstance(params, BodyDeltaParams) or params.request_id != self._params.request_id:
            return False
        if self._is_done or self._failure is not None:
            return False
        if params.seq != self._next_seq:
            self._fail(InternalError("a part of the body is missing"))
            return True
        self._next_seq += 1
        if params.delta_base64:
            self._pieces.append(params.delta_base64)
            self._unread_bytes += len(params.delta_base64) + PIECE_COST
        if self._unread_bytes >= FULL_BYTES:
            self._session.flow_control.queue_full(self, self._consumer)
        if self._unread_bytes >= OVERFLOW_BYTES:
            self._fail(InternalError("the body was given up: it was read too slowly"))
        if params.done:
            self._is_done = True
            if params.error is not None:
                self._fail(InternalError(params.error))
        self._changed.set()
        return bool(params.delta_base64) or params.done

    def on_disconnected(self) -> None:
        if not self._is_done:
            self._fail(ConnectionLost("the connection was lost while a body was received"))

    def on_resumed(self) -> None:
        """A body cannot be resumed: it ends with its connection."""

    def on_lost(self, error: SessionLost) -> None:
        if not self._is_done:
            self._fail(error)

    def _fail(self, error: ExecServerError) -> None:
        self._failure = self._failure or error
        self._unsubscribe()
        self._unsubscribe = lambda: None
        self._changed.set()


async def fetch(stream: HttpStream) -> Response:
    """Make a request and read the whole body; raises InternalError if it is too large."""
    body: list[bytes] = []
    size = 0
    async with stream:
        async for piece in stream:
            size += len(piece)
            if size > BODY_BYTES:
                limit = BODY_BYTES // 1_048_576
                raise InternalError(f"the body has more than {limit} MiB: use http_stream")
            body.append(piece)
        return Response(stream.status, stream.headers, b"".join(body))
