"""HTTP requests that the server makes from its machine, with bodies that come piece by piece."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Self

from exec_server.client.parties import Party, reading_party
from exec_server.client.results import Response
from exec_server.client.traffic import Traffic
from exec_server.errors import (
    ConnectionLost,
    ExecServerError,
    InternalError,
    MethodNotFound,
    SessionLost,
    Unsupported,
)
from exec_server.protocol.base64text import Base64
from exec_server.protocol.http import REQUEST, BodyDeltaParams, Header, RequestParams
from exec_server.protocol.method import Notice

# Of a body that nobody reads fast enough: reading from the server stops and goes on.
FULL_BYTES: Final = 2 * 1_048_576
FREE_BYTES: Final = 524_288
# What may come while somebody waits for an answer to something else. The rest cannot be asked for
# again, so beyond this the body is given up.
BURSTING_BYTES: Final = 64 * 1_048_576
# Of the body of a whole response. Larger ones are for `http_stream`.
BODY_BYTES: Final = 256 * 1_048_576

# A name may be there more than once only in pairs.
Headers = Mapping[str, str] | Iterable[tuple[str, str]]


class HttpStream:
    """An answer whose body is still coming, for `async with`; iterating gives its pieces.

    A connection that is lost meanwhile takes the body with it: iterating raises ConnectionLost.
    """

    status: int
    headers: tuple[tuple[str, str], ...]

    def __init__(
        self,
        traffic: Traffic,
        method: str,
        url: str,
        *,
        headers: Headers,
        body: bytes | None,
        timeout: float | None,
        follow_redirects: bool,
    ) -> None:
        pairs = headers.items() if isinstance(headers, Mapping) else headers
        self._traffic = traffic
        self._params = RequestParams(
            method=method,
            url=url,
            headers=[Header(name, value) for name, value in pairs],
            body_base64=None if body is None else Base64(body),
            timeout_ms=None if timeout is None else max(1, round(timeout * 1000)),
            redirect_policy="follow" if follow_redirects else "stop",
            request_id=uuid.uuid4().hex,
            stream_response=True,
        )
        self._is_entered = False
        self._unsubscribe: Callable[[], None] = lambda: None
        self._pieces: deque[bytes] = deque()
        self._weight = 0
        self._next = 1
        self._reader: Party | None = None
        self._is_done = False
        self._failure: ExecServerError | None = None
        self._news = asyncio.Event()

    async def __aenter__(self) -> Self:
        if self._is_entered:
            raise RuntimeError("a request can be entered only once: make another instead")
        self._is_entered = True
        self._unsubscribe = self._traffic.session.subscribe(self)
        try:
            answer = await self._traffic.call(REQUEST, self._params)
        except MethodNotFound:
            self._unsubscribe()
            hint = "it makes no requests; run curl or the like there"
            raise Unsupported("http/request", hint) from None
        except BaseException:
            self._unsubscribe()
            raise
        self.status = answer.status
        self.headers = tuple((header.name, header.value) for header in answer.headers)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._unsubscribe()
        self._pieces.clear()
        self._traffic.queue_free(self)

    def header(self, name: str) -> str | None:
        """The first header of that name."""
        return Response(self.status, self.headers).header(name)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if not self._is_entered:
            raise RuntimeError("the request is not made: use it inside of its `async with`")
        self._reader = reading_party()
        while not self._pieces:
            if self._failure is not None:
                raise self._failure
            if self._is_done:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        piece = self._pieces.popleft()
        self._weight -= len(piece)
        if self._weight < FREE_BYTES:
            self._traffic.queue_free(self)
        else:
            self._traffic.queue_moves(self, self._reader)
        return piece

    # ---- what the session tells -------------------------------------------------------

    def on_notice(self, notice: Notice[Any], params: Any) -> None:
        if not isinstance(params, BodyDeltaParams) or params.request_id != self._params.request_id:
            return
        if params.seq != self._next:
            self._fail(InternalError("a part of the body is missing"))
            return
        self._next += 1
        if params.delta_base64:
            self._pieces.append(params.delta_base64)
            self._weight += len(params.delta_base64)
        if self._weight >= FULL_BYTES:
            self._traffic.queue_full(self, self._reader)
        if self._weight >= BURSTING_BYTES:
            self._fail(InternalError("the body came faster than it was read, and was given up"))
        if params.done:
            self._is_done = True
            if params.error is not None:
                self._fail(InternalError(params.error))
        self._news.set()

    def on_disconnected(self) -> None:
        if not self._is_done:
            self._fail(ConnectionLost("the connection was lost while a body was coming"))

    def on_resumed(self) -> None:
        """Nothing comes back: streams end with their connection."""

    def on_lost(self, error: SessionLost) -> None:
        if not self._is_done:
            self._fail(error)

    def _fail(self, error: ExecServerError) -> None:
        self._failure = self._failure or error
        self._unsubscribe()
        self._unsubscribe = lambda: None
        self._news.set()


async def fetch(traffic: Traffic, method: str, url: str, **options: Any) -> Response:
    """The same with the whole body; raises InternalError if that is too large."""
    body: list[bytes] = []
    size = 0
    async with HttpStream(traffic, method, url, **options) as stream:
        async for piece in stream:
            size += len(piece)
            if size > BODY_BYTES:
                limit = BODY_BYTES // 1_048_576
                raise InternalError(f"the body has more than {limit} MiB; use http_stream")
            body.append(piece)
        return Response(stream.status, stream.headers, b"".join(body))
