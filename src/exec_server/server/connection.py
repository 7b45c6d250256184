"""Connection: the handshake, requests, responses and notifications of one client.

The stream calls `message_received`, which does everything that need not wait; a handler that waits
returns an awaitable, which becomes a task. Memory is bounded: reading pauses when too many requests
are pending, and none starts while the client does not read its responses.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final

import msgspec

from exec_server.errors import (
    InternalError,
    InvalidRequest,
    MalformedMessage,
    MethodNotFound,
    RpcError,
    rpc_error_from_os,
)
from exec_server.host.event_loop import guarded_call
from exec_server.net.stream import BinaryStream, GatheringStream, MessageStream, RelayedStream
from exec_server.protocol import jsonrpc
from exec_server.protocol.decoding import Call, Notice, Result, decode
from exec_server.protocol.process import OutputParams, output_pieces, output_text
from exec_server.protocol.session import INITIALIZE, InitializeParams, InitializeResult
from exec_server.server.context import (
    ConnectionContext,
    Encoded,
    LazyEvent,
    ServerContext,
    Streamed,
    WithData,
)
from exec_server.server.lanes import Lane, Lanes, PendingRequest, named_process
from exec_server.server.methods import METHODS, DecodedParams, Method, Waited, load

# Requests under way to one client, as in the reference. A further one is not made, and counts as
# unanswered.
MAX_CLIENT_REQUESTS: Final = 256

log = logging.getLogger(__name__)

# Responses in the send buffer. Above this no further request starts, except control requests.
UNSENT_BYTES = 8 * 1_048_576
# The same including responses that need no slot, such as errors for malformed messages. Above
# this reading pauses.
UNSENT_HARD_BYTES = 16 * 1_048_576
# Queued requests run for this long before other connections do; `net.inbox` has the same limit.
BURST_SECONDS = 0.002
# A message up to the first size is decoded on the event loop, and up to the second one if it has
# few strings; others in a thread, because they could delay other connections. The worst of those
# that are decoded on the loop take some milliseconds: `python -m bench.floods` measures them.
SHORT_BYTES = 4096
INLINE_DECODE_BYTES = 32_768
INLINE_QUOTES = 1024
# After the end of input, requests that yielded their slot (an http/request to a silent host, for
# example) have this long to finish; others are waited for.
EOF_GRACE_SECONDS = 2.0

NORMAL_CLOSURE = 1000
POLICY_VIOLATION = 1008
INTERNAL_FAILURE = 1011

# The outcomes of a handler that did not have to wait.
_RESULTS = (Result, Encoded)


class ClientRequests:
    """The requests of the server to one client, until they are answered, by ids from 1."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._last_id = 0
        self._open: dict[int, asyncio.Future[object]] = {}
        self._is_closed = False

    def ask(self, call: Call[Any, Any], params: msgspec.Struct) -> asyncio.Future[object]:
        """Send a request; the future has the `result`, or None. Cancel it to ignore a response."""
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        if self._is_closed or len(self._open) >= MAX_CLIENT_REQUESTS:
            future.set_result(None)
            return future
        self._last_id += 1
        request_id = self._last_id
        self._open[request_id] = future
        future.add_done_callback(lambda _: self._open.pop(request_id, None))
        self._send(jsonrpc.encode_request(request_id, call.name, params))
        return future

    def answer(self, response: jsonrpc.RpcResponse) -> bool:
        """Take a response; False if no such request was ever made."""
        number = response.id
        if not isinstance(number, int) or not 0 < number <= self._last_id:
            return False
        future = self._open.get(number)
        if future is not None and not future.done():
            future.set_result(response.result)
        return True

    def close(self) -> None:
        """Leave all requests unanswered: the connection is lost."""
        self._is_closed = True
        for future in tuple(self._open.values()):
            if not future.done():
                future.set_result(None)


class ConnectionState(enum.Enum):
    """The state of the handshake; the values complete the text "client must ..."."""

    NEW = "call initialize"
    INITIALIZING = "send initialized"
    READY = "ready"
    ENDED = "open another connection"  # the client has ended its session
    CLOSED = "closed"


# The messages of the handshake; a missing key is a protocol error of the client.
_TRANSITIONS = {
    (ConnectionState.NEW, "initialize"): ConnectionState.INITIALIZING,
    (ConnectionState.INITIALIZING, "initialized"): ConnectionState.READY,
    (ConnectionState.READY, "initialized"): ConnectionState.READY,
}


class Connection:
    """One client; the MessageReceiver of its stream."""

    def __init__(self, server: ServerContext, stream: MessageStream) -> None:
        self._server = server
        self._stream = stream
        self._send = stream.send
        self._send_pieces = stream.send_pieces if isinstance(stream, GatheringStream) else None
        self._send_binary = stream.send_binary if isinstance(stream, BinaryStream) else None
        self._send_output: Callable[[bytes, bytes], None] | None = None  # if the client wants that
        self._stream_id = stream.stream_id if isinstance(stream, RelayedStream) else None
        self._state = ConnectionState.NEW
        self._context: ConnectionContext | None = None
        self._lanes = Lanes(server.concurrent_requests)
        self._is_decoding = False  # a large message, in a thread
        self._is_reading = True
        self._is_eof = False  # no more messages arrive
        self._writable = LazyEvent()  # cleared while the send buffer is full
        self._writable.set()
        self._is_congested = False  # requests are queued or the send buffer is full
        self._tasks: set[asyncio.Task[None]] = set()
        self._lasting_tasks: set[asyncio.Task[None]] = set()  # those that outlive their requests
        self._client_requests = ClientRequests(stream.send)

    def message_received(self, message: bytes) -> None:
        try:
            self._receive(message)
        except Exception:
            self._break_off("a message")

    def _receive(self, message: bytes) -> None:
        if message[:1] == jsonrpc.BINARY_MARK and self._send_binary is not None:
            self._binary_received(message)
        elif len(message) > SHORT_BYTES and _is_costly(message):
            self._is_decoding = True
            self._update_reading()
            self._create_task(self._decode_in_thread(message))
            return
        else:
            try:
                decoded = jsonrpc.decode(message)
            except MalformedMessage as error:
                self._refuse(error)
            else:
                if type(decoded) is not jsonrpc.Request:
                    self._dispatch(decoded, len(message))
                elif self._is_unhindered() and (method := METHODS.get(decoded.method)) is not None:
                    self._answer(decoded, method, len(message))
                else:
                    self._accept(decoded, len(message))
        if self._is_congested:
            self._update_reading()

    def _binary_received(self, message: bytes) -> None:
        """Accept a request with data; its JSON text is short."""
        try:
            text, data = jsonrpc.split(message)
            request = jsonrpc.decode(text)
        except MalformedMessage as error:
            self._refuse(error)
            return
        if not isinstance(request, jsonrpc.Request):
            method = None
        else:
            try:
                method = _find(request.method)
            except (ImportError, OSError) as error:
                self._fail(request.id, error)
                return
        if not isinstance(request, jsonrpc.Request) or method is None or not method.takes_data:
            self._refuse(MalformedMessage("no request of a method that takes data"))
            return
        params = DecodedParams(method, request.params, self._server.environment.cwd)
        params.attach(data)
        self._accept(request, len(message), params)

    async def _decode_in_thread(self, message: bytes) -> None:
        """Decode a large message; reading pauses meanwhile, which keeps messages in order."""
        try:
            decoded, params = await self._server.decode_threads.run(
                _decode_all, message, self._server.environment.cwd
            )
            self._dispatch(decoded, len(message), params)
        except MalformedMessage as error:
            self._refuse(error)
        finally:
            self._is_decoding = False
        self._update_reading()

    def _refuse(self, error: MalformedMessage) -> None:
        text = f"failed to parse {self._stream.origin}: {error.args[0]}"
        if self._stream.is_strict:
            self._stream.close(POLICY_VIOLATION, text)
            return
        self._stream.send(jsonrpc.encode_error(None, InvalidRequest(text)))

    def _dispatch(
        self, message: jsonrpc.Message, size: int, params: DecodedParams | None = None
    ) -> None:
        if isinstance(message, jsonrpc.Request):
            self._accept(message, size, params)
        elif isinstance(message, jsonrpc.RpcResponse):
            if not self._client_requests.answer(message):
                self._stream.close(POLICY_VIOLATION, "response to a request that was never made")
        elif message.method != "initialized":
            text = f"unexpected notification method: {message.method}"
            self._stream.send(jsonrpc.encode_error(None, InvalidRequest(text)))
        elif (self._state, "initialized") in _TRANSITIONS:
            self._state = _TRANSITIONS[self._state, "initialized"]
        else:
            self._stream.close(POLICY_VIOLATION, "initialized before initialize")

    def _is_unhindered(self) -> bool:
        """Whether any request may start at once: in each lane nothing is queued or runs."""
        lanes = self._lanes
        return (
            self._state is ConnectionState.READY
            and not self._is_congested
            and not lanes.main.running
            and not lanes.control.running
        )

    def _answer(self, request: jsonrpc.Request, method: Method, size: int) -> None:
        """Fast path: what `_accept` and `_run` do for a request that is unhindered."""
        assert self._context is not None
        try:
            outcome = method.invoke(self._context, request.params)
            if isinstance(outcome, _RESULTS):
                text = outcome.text if type(outcome) is Encoded else jsonrpc.encode(outcome)
                self._send(jsonrpc.encode_result(request.id, text))
                return
        except Exception as error:
            self._fail(request.id, error)
            return
        pending = PendingRequest(request.id, method, request.params, size)
        self._wait(self._lanes.lane_for(pending), pending, outcome)

    def _accept(
        self, request: jsonrpc.Request, size: int, params: DecodedParams | None = None
    ) -> None:
        try:
            method = _find(request.method)
        except (ImportError, OSError) as error:  # no descriptor is left, for example
            self._fail(request.id, error)
            return
        if method is not None:
            pending = PendingRequest(request.id, method, request.params, size, params)
            can_cancel = method.cancels_start and self._can_cancel_start(pending)
            lane = self._lanes.lane_for(pending, can_cancel=can_cancel)
            if lane.queue or not self._may_start(lane):
                self._lanes.enqueue(lane, pending)
                self._update_reading()
            else:
                self._run(lane, pending)
        elif request.method == INITIALIZE.name:
            self._initialize(request)
        else:
            text = f"exec-server stub does not implement `{request.method}` yet"
            self._fail(request.id, MethodNotFound(text))

    def _can_cancel_start(self, request: PendingRequest) -> bool:
        processes = self._context.session.processes if self._context is not None else None
        return processes is not None and processes.can_cancel(named_process(request))

    def _may_start(self, lane: Lane) -> bool:
        return lane.running < lane.slots and (
            not self._is_congested
            or lane is self._lanes.control
            or self._stream.unsent() <= UNSENT_BYTES
        )

    def _continue(self, lane: Lane) -> None:
        try:
            self._advance(lane)
        except Exception:
            self._break_off("a queued request")

    def _advance(self, lane: Lane) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + BURST_SECONDS
        while lane.queue and self._state is not ConnectionState.CLOSED and self._may_start(lane):
            self._run(lane, self._lanes.dequeue(lane))
            if loop.time() >= until:
                loop.call_soon(self._continue, lane)
                break
        self._update_reading()

    def _run(self, lane: Lane, request: PendingRequest) -> None:
        try:
            if self._state is not ConnectionState.READY or self._context is None:
                raise self._handshake_error(request)
            if request.decoded is None:
                outcome = request.method.invoke(self._context, request.params)
            else:
                outcome = request.method.handle(self._context, request.decoded.get())
            if isinstance(outcome, _RESULTS):
                self._send_result(request.id, outcome)
                return
        except Exception as error:
            self._fail(request.id, error)
            return
        self._wait(lane, request, outcome)

    def _wait(self, lane: Lane, request: PendingRequest, outcome: Awaitable[Waited]) -> None:
        """Send the response when the handler's awaitable has it."""
        occupied = self._lanes.occupy(lane, request)
        self._create_task(self._finish(lane, occupied, request, outcome))
        self._update_reading()

    def _handshake_error(self, request: PendingRequest) -> InvalidRequest:
        # The reference reports invalid params before the missing handshake.
        if request.decoded is None:
            request.method.decode_params(request.params, self._server.environment.cwd)
        else:
            request.decoded.get()
        text = f"client must {self._state.value} before using {request.method.family} methods"
        return InvalidRequest(text)

    async def _finish(
        self, lane: Lane, occupied: Lane, request: PendingRequest, outcome: Awaitable[Waited]
    ) -> None:
        try:
            # No await between the handler's result and its sending: see handlers.process._start.
            result = await outcome
            if isinstance(result, Streamed):
                before, after = jsonrpc.result_frame(request.id)
                size = len(before) + result.size + len(after)
                await self._stream.send_parts(self._framed(before, result, after), size)
            else:
                self._send_result(request.id, result)
        except Exception as error:
            self._fail(request.id, error)
        finally:
            self._lanes.release(occupied, request)
        self._advance(lane)

    async def _framed(self, before: bytes, result: Streamed, after: bytes) -> AsyncIterator[bytes]:
        yield before
        try:
            async for part in result.parts:
                yield part
        except OSError as error:
            # Part of the response is sent, so an error response is no longer possible.
            log.error("a file could not be read to its end: %s", error)
            self._stream.close(INTERNAL_FAILURE, "a file could not be read to its end")
            return
        yield after

    def _update_reading(self) -> None:
        self._is_congested = self._lanes.has_queued or not self._writable.is_set()
        may_read = not (
            self._is_decoding or self._lanes.is_full or self._stream.unsent() > UNSENT_HARD_BYTES
        )
        if may_read != self._is_reading and self._state is not ConnectionState.CLOSED:
            self._is_reading = may_read
            if may_read:
                self._stream.resume_reading()
            else:
                self._stream.pause_reading()
        if self._is_eof and not self._is_decoding and self._lanes.is_idle:
            self._stream.close(NORMAL_CLOSURE, "end of input")

    def _create_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._server.tasks.create_task(coroutine, self._close_broken)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> bool:
        """Run a task that outlives its request, unless session or connection have ended."""
        if self._state in (ConnectionState.ENDED, ConnectionState.CLOSED):
            coroutine.close()
            return False
        task = self._create_task(coroutine)
        self._lasting_tasks.add(task)
        task.add_done_callback(self._lasting_tasks.discard)
        return True

    def _break_off(self, what: str) -> None:
        """End the connection because of the current exception, which must not reach others."""
        log.exception("%s: %s failed unexpectedly", self._stream.origin, what)
        self._close_broken()

    def _close_broken(self) -> None:
        self._stream.close(INTERNAL_FAILURE, "internal error")

    def _initialize(self, request: jsonrpc.Request) -> None:
        try:
            self._send_result(request.id, self._open_session(request.params))
        except RpcError as error:
            self._fail(request.id, error)

    def _open_session(self, raw_params: object) -> InitializeResult:
        params = decode(InitializeParams, raw_params)
        next_state = _TRANSITIONS.get((self._state, "initialize"))
        if next_state is None:
            raise InvalidRequest("initialize may only be sent once per connection")
        sessions = self._server.sessions
        if params.resume_session_id is None:
            session = sessions.create(self)
        else:
            session = sessions.resume(params.resume_session_id, self)
        session.stream_id = self._stream_id
        granted = sessions.grant_retention(session, params.session_retention_seconds)
        self._send_output = self._send_binary if params.binary_output else None
        self._context = ConnectionContext(
            self._server,
            session,
            self.notify,
            self._start_task,
            self._writable,
            has_binary=self._send_binary is not None,
        )
        self._state = next_state
        log.info("client %s has session %s", self._stream.origin, session.id)
        return InitializeResult(session.id, self._context.environment, granted)

    def _send_result(
        self, request_id: jsonrpc.RequestId, result: Result | Encoded | WithData
    ) -> None:
        if isinstance(result, WithData):
            if self._send_binary is None:
                raise InvalidRequest("binary messages need a WebSocket without a relay")
            text = jsonrpc.encode_result(request_id, jsonrpc.encode(result.result))
            self._send_binary(jsonrpc.head(text), result.data)
            return
        text = result.text if isinstance(result, Encoded) else jsonrpc.encode(result)
        self._stream.send(jsonrpc.encode_result(request_id, text))

    def _fail(self, request_id: jsonrpc.RequestId, error: Exception) -> None:
        """Answer a request with an error; the only place that turns exceptions into responses."""
        if isinstance(error, OSError):
            error = rpc_error_from_os(error)
        elif not isinstance(error, RpcError):
            log.error("request %r failed unexpectedly", request_id, exc_info=error)
            error = InternalError("internal error")
        self._stream.send(jsonrpc.encode_error(request_id, error))

    def notify(self, notice: Notice[msgspec.Struct], params: msgspec.Struct) -> None:
        if self._state is ConnectionState.ENDED:
            return
        try:
            if not isinstance(params, OutputParams):
                self._stream.send(jsonrpc.encode_notification(notice, params))
            elif self._send_output is not None:
                self._send_output(jsonrpc.head(output_text(params)), params.chunk)
            elif self._send_pieces is not None:
                for pieces in output_pieces(params):
                    self._send_pieces(*pieces)
            else:
                for pieces in output_pieces(params):
                    self._stream.send(b"".join(pieces))
        except Exception:
            self._break_off("a notification")

    def ask(self, call: Call[Any, Any], params: msgspec.Struct) -> asyncio.Future[object]:
        return self._client_requests.ask(call, params)

    def probe(self) -> None:
        self._stream.probe()

    def session_closed(self) -> None:
        self._state = ConnectionState.ENDED
        asyncio.get_running_loop().call_soon(self._close_resources, self._lasting_tasks)

    def pause_writing(self) -> None:
        self._is_congested = True
        self._writable.clear()
        try:
            if self._context is not None:
                self._context.pause_writing()
        except Exception:
            self._break_off("the flow control")

    def resume_writing(self) -> None:
        self._writable.set()
        try:
            if self._context is not None:
                self._context.resume_writing()
        except Exception:
            self._break_off("the flow control")
        self._continue(self._lanes.main)

    def eof_received(self) -> None:
        """Kill the processes, which ends long polls; close when all requests are answered."""
        self._is_eof = True
        asyncio.get_running_loop().call_later(EOF_GRACE_SECONDS, self._close_if_parked)
        try:
            if self._context is not None:
                self._context.session.terminate_all()
            self._update_reading()
        except Exception:
            self._break_off("the end of input")

    def _close_if_parked(self) -> None:
        """Close after the end of input if only requests that may wait for ever are pending."""
        if self._state is ConnectionState.CLOSED:
            return
        if self._lanes.has_only_parked:
            self._stream.close(NORMAL_CLOSURE, "end of input")
        else:
            asyncio.get_running_loop().call_later(EOF_GRACE_SECONDS, self._close_if_parked)

    def connection_lost(self) -> None:
        self._state = ConnectionState.CLOSED
        guarded_call(self._lanes.clear)
        guarded_call(self._client_requests.close)
        # At once: on a relay the next message may resume the session on a new stream.
        if self._context is not None:
            guarded_call(self._server.sessions.detach, self._context.session)
        # Later: a task that is cancelled before its first step does not run its clean-up.
        asyncio.get_running_loop().call_soon(self._close_resources, self._tasks)

    def _close_resources(self, tasks: set[asyncio.Task[None]]) -> None:
        for task in list(tasks):
            task.cancel()
        if self._context is not None:
            self._context.close()


def _is_costly(message: bytes) -> bool:
    return len(message) > INLINE_DECODE_BYTES or message.count(b'"') > INLINE_QUOTES


def _decode_all(
    data: bytes, server_cwd: str | None
) -> tuple[jsonrpc.Message, DecodedParams | None]:
    """A message and, of a request with a known method, its params; for a thread."""
    message = jsonrpc.decode(data)
    method = None
    if isinstance(message, jsonrpc.Request):
        with contextlib.suppress(ImportError, OSError):  # `_accept` reports it
            method = _find(message.method)
    if not isinstance(message, jsonrpc.Request) or method is None:
        return message, None
    return message, DecodedParams(method, message.params, server_cwd)


def _find(name: str) -> Method | None:
    """A method; the first request to its family imports it. Raises ImportError or OSError."""
    if name not in METHODS:
        load(name)
    return METHODS.get(name)
