"""http/request: the response in one message, or its head first and the body in notifications."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import msgspec
import pybase64

from exec_server.errors import ExecServerError, InternalError, InvalidParams, InvalidRequest
from exec_server.host import http as requests
from exec_server.host.http import HttpRequest, HttpResources, HttpResponse, ResponseBody
from exec_server.protocol.http import BODY_DELTA, BodyDeltaParams, RequestParams, RequestResult
from exec_server.server.context import ConnectionContext, Encoded, Streamed

# Bodies that are streamed to one connection at a time, each with a socket and a read buffer: as
# many as a connection may have open files. Further requests are refused.
MAX_STREAMS = 128
# The id is repeated in every delta, so its length is limited.
REQUEST_ID_BYTES = 4096
# The reference's limit of a delta.
DELTA_BYTES = 1_048_576
# A longer timeout is treated as none.
MAX_SECONDS = 31_536_000.0
# Longer bodies are encoded in pieces, so that the body and its base64 text are not both in memory.
WHOLE_BYTES = 4 * 1_048_576
# One piece. A multiple of three, so that the base64 texts of pieces can be joined.
PIECE_BYTES = 3 * 262_144
# Requests with a longer URL or more headers are checked in a thread, because that takes
# milliseconds. Real requests are below both.
INLINE_URL_CHARACTERS = 8192
INLINE_HEADERS = 128

# A checked request, or the thread that checks it.
_Outgoing = HttpRequest | asyncio.Future[HttpRequest]


def request(
    context: ConnectionContext, params: RequestParams
) -> Awaitable[RequestResult | Encoded | Streamed]:
    if context.server.http is None:
        raise InternalError("this exec-server makes no HTTP requests")
    resources = context.server.http()
    if len(params.request_id.encode()) > REQUEST_ID_BYTES:
        raise InvalidParams(f"requestId must not exceed {REQUEST_ID_BYTES} bytes")
    if params.stream_response:
        _check_stream(context, params.request_id)
    outgoing: _Outgoing
    if len(params.url) > INLINE_URL_CHARACTERS or len(params.headers) > INLINE_HEADERS:
        outgoing = context.in_thread(requests.build_request, params, context.server.variables)
    else:
        outgoing = requests.build_request(params, context.server.variables)
    deadline = _deadline(params.timeout_ms)
    if not params.stream_response:
        return _whole(context, resources, outgoing, deadline)
    context.http_streams.add(params.request_id)
    return _head(context, resources, outgoing, deadline, params.request_id)


async def _built(outgoing: _Outgoing) -> HttpRequest:
    return outgoing if isinstance(outgoing, HttpRequest) else await outgoing


def _check_stream(context: ConnectionContext, request_id: str) -> None:
    if request_id in context.http_streams:
        raise InvalidParams(
            f"http/request streamResponse requestId `{request_id}` is already active"
        )
    if len(context.http_streams) >= MAX_STREAMS:
        text = f"at most {MAX_STREAMS} http/request bodies may be streamed per connection"
        raise InvalidRequest(text)


def _deadline(timeout_ms: int | None) -> float | None:
    if timeout_ms is None or timeout_ms / 1000 > MAX_SECONDS:
        return None
    return asyncio.get_running_loop().time() + timeout_ms / 1000


@asynccontextmanager
async def _slot(context: ConnectionContext, deadline: float | None) -> AsyncIterator[None]:
    """One of the requests of this connection that may wait for their responses."""
    try:
        async with asyncio.timeout_at(deadline):
            await context.http_slots.acquire()
    except TimeoutError:
        raise _timed_out() from None
    try:
        if deadline is not None and deadline <= asyncio.get_running_loop().time():
            raise _timed_out()
        yield
    finally:
        context.http_slots.release()


def _timed_out() -> InternalError:
    return InternalError("http/request failed: route-aware request timed out")


async def _whole(
    context: ConnectionContext,
    resources: HttpResources,
    outgoing: _Outgoing,
    deadline: float | None,
) -> Encoded | Streamed:
    body = ResponseBody(resources)
    checked = await _built(outgoing)
    async with _slot(context, deadline):
        response = await requests.send(resources.transport, checked, deadline)
        try:
            await body.fill(response, deadline)
        finally:
            response.close()
    headers = msgspec.json.encode(requests.response_headers(response))
    before = b'{"status":%d,"headers":%b,"bodyBase64":"' % (response.status, headers)
    if len(body.data) <= WHOLE_BYTES:
        await context.drain()
        return Encoded(b'%b%b"}' % (before, pybase64.b64encode(body.data)))
    size = len(before) + (len(body.data) + 2) // 3 * 4 + 2
    return Streamed(size, _pieces(before, body))


async def _pieces(before: bytes, body: ResponseBody) -> AsyncIterator[bytes]:
    yield before
    with memoryview(body.data) as data:
        for start in range(0, len(data), PIECE_BYTES):
            yield pybase64.b64encode(data[start : start + PIECE_BYTES])
    yield b'"}'


async def _head(
    context: ConnectionContext,
    resources: HttpResources,
    outgoing: _Outgoing,
    deadline: float | None,
    request_id: str,
) -> RequestResult:
    try:
        checked = await _built(outgoing)
        async with _slot(context, deadline):
            response = await requests.send(resources.transport, checked, deadline)
    except BaseException:
        context.http_streams.discard(request_id)
        raise
    # No await from here to the response: the first delta has to follow it.
    if not context.start_task(_deliver(context, response, deadline, request_id)):
        response.close()
    return RequestResult(response.status, requests.response_headers(response), b"")


async def _deliver(
    context: ConnectionContext, response: HttpResponse, deadline: float | None, request_id: str
) -> None:
    """Send a body in notifications, no faster than the client reads them."""
    seq = 0
    error = None
    try:
        async with asyncio.timeout_at(deadline):
            while data := await response.read():
                for start in range(0, len(data), DELTA_BYTES):
                    await context.drain()
                    seq += 1
                    piece = data[start : start + DELTA_BYTES]
                    context.notify(BODY_DELTA, BodyDeltaParams(request_id, seq, piece, False, None))
    except (ExecServerError, TimeoutError):
        error = requests.BODY_ERROR
    finally:
        response.close()
        context.http_streams.discard(request_id)
    context.notify(BODY_DELTA, BodyDeltaParams(request_id, seq + 1, b"", True, error))
