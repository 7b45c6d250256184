"""http/request: a whole answer in one message, or its head and then the body as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import msgspec
import pybase64

from exec_server.core import http as requests
from exec_server.core.http import Answer, Body, Means, Request
from exec_server.errors import ExecServerError, InternalError, InvalidParams, InvalidRequest
from exec_server.protocol.http import BODY_DELTA, BodyDeltaParams, RequestParams, RequestResult
from exec_server.rpc.scope import Encoded, Scope, Streamed

# Bodies that are streamed to one connection at a time, each with a socket and what is read ahead:
# as many as it may have files open. One more is refused.
MAX_STREAMS = 128
# The id is repeated in every delta, so it may not be of any length.
REQUEST_ID_BYTES = 4096
# The reference's limit of a delta.
DELTA_BYTES = 1_048_576
# A longer time than this is none.
MAX_SECONDS = 31_536_000.0
# Longer bodies are sent piece by piece, so that they do not exist twice.
WHOLE_BYTES = 4 * 1_048_576
# One piece. A multiple of three, so that the pieces' base64 can be joined.
PIECE_BYTES = 3 * 262_144


def request(scope: Scope, params: RequestParams) -> Awaitable[RequestResult | Encoded | Streamed]:
    means = scope.machine.http
    if means is None:
        raise InternalError("this exec-server makes no HTTP requests")
    if len(params.request_id.encode()) > REQUEST_ID_BYTES:
        raise InvalidParams(f"requestId must not exceed {REQUEST_ID_BYTES} bytes")
    if params.stream_response:
        _check_stream(scope, params.request_id)
    wanted = requests.checked(params, scope.machine.variables)
    deadline = _deadline(params.timeout_ms)
    if not params.stream_response:
        return _whole(scope, means, wanted, deadline)
    scope.http_streams.add(params.request_id)
    return _head(scope, means, wanted, deadline, params.request_id)


def _check_stream(scope: Scope, request_id: str) -> None:
    if request_id in scope.http_streams:
        text = f"http/request streamResponse requestId `{request_id}` is already active"
        raise InvalidParams(text)
    if len(scope.http_streams) >= MAX_STREAMS:
        text = f"at most {MAX_STREAMS} http/request bodies may be streamed per connection"
        raise InvalidRequest(text)


def _deadline(timeout_ms: int | None) -> float | None:
    if timeout_ms is None or timeout_ms / 1000 > MAX_SECONDS:
        return None
    return asyncio.get_running_loop().time() + timeout_ms / 1000


@asynccontextmanager
async def _turn(scope: Scope, deadline: float | None) -> AsyncIterator[None]:
    """A place among the requests of this connection that wait for their answers."""
    try:
        async with asyncio.timeout_at(deadline):
            await scope.http_turns.acquire()
    except TimeoutError:
        raise _never_sent() from None
    try:
        if deadline is not None and deadline <= asyncio.get_running_loop().time():
            raise _never_sent()
        yield
    finally:
        scope.http_turns.release()


def _never_sent() -> InternalError:
    return InternalError("http/request failed: route-aware request timed out")


# ---- in one message -------------------------------------------------------------------


async def _whole(
    scope: Scope, means: Means, wanted: Request, deadline: float | None
) -> Encoded | Streamed:
    body = Body(means)
    async with _turn(scope, deadline):
        answer = await requests.send(means.fetch, wanted, deadline)
        try:
            await body.fill(answer, deadline)
        finally:
            answer.close()
    headers = msgspec.json.encode(requests.answer_headers(answer))
    before = b'{"status":%d,"headers":%b,"bodyBase64":"' % (answer.status, headers)
    if len(body.data) <= WHOLE_BYTES:
        await scope.until_sendable()
        return Encoded(b'%b%b"}' % (before, pybase64.b64encode(body.data)))
    size = len(before) + (len(body.data) + 2) // 3 * 4 + 2
    return Streamed(size, _pieces(before, body))


async def _pieces(before: bytes, body: Body) -> AsyncIterator[bytes]:
    yield before
    with memoryview(body.data) as data:
        for start in range(0, len(data), PIECE_BYTES):
            yield pybase64.b64encode(data[start : start + PIECE_BYTES])
    yield b'"}'


# ---- as it comes ----------------------------------------------------------------------


async def _head(
    scope: Scope, means: Means, wanted: Request, deadline: float | None, request_id: str
) -> RequestResult:
    try:
        async with _turn(scope, deadline):
            answer = await requests.send(means.fetch, wanted, deadline)
    except BaseException:
        scope.http_streams.discard(request_id)
        raise
    # No await from here to the answer: the first delta comes after it.
    if not scope.start(_deliver(scope, answer, deadline, request_id)):
        answer.close()
    return RequestResult(answer.status, requests.answer_headers(answer), b"")


async def _deliver(scope: Scope, answer: Answer, deadline: float | None, request_id: str) -> None:
    """Pass a body on, no faster than the client takes it."""
    seq = 0
    error = None
    try:
        async with asyncio.timeout_at(deadline):
            while data := await answer.read():
                for start in range(0, len(data), DELTA_BYTES):
                    await scope.until_sendable()
                    seq += 1
                    piece = data[start : start + DELTA_BYTES]
                    scope.notify(BODY_DELTA, BodyDeltaParams(request_id, seq, piece, False, None))
    except (ExecServerError, TimeoutError):
        error = requests.BROKEN
    finally:
        answer.close()
        scope.http_streams.discard(request_id)
    scope.notify(BODY_DELTA, BodyDeltaParams(request_id, seq + 1, b"", True, error))
