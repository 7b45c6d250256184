"""Connection: the handshake, the order of requests, answers and notifications of one link.

Theory of operation. `message_received` is called by the transport for each message and does
everything that need not wait: decode, look up, run the handler, send the answer. A handler
that has to wait returns an awaitable, which becomes a task.

Requests wait for their turn in lanes. With one request at a time, the rule of the
reference, the main lane has one place: a request starts when those before it are answered.
Two kinds of requests are not held up by that: control methods (a process must be stoppable
while a file copy runs), unless the process they name is itself waiting to be started; and
nobody waits behind a request that `steps_aside`. With more requests at a time both lanes
have that many places.

What a client can make us hold is bounded: when too many requests wait, nothing more is read
from the link; when it does not take our answers, no further request starts.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec

from exec_server.errors import (
    InternalError,
    InvalidRequest,
    MalformedMessage,
    MethodNotFound,
    RpcError,
    rpc_error_from_os,
)
from exec_server.protocol import jsonrpc, process
from exec_server.protocol.method import Notice
from exec_server.protocol.session import INITIALIZE, InitializeParams, InitializeResult
from exec_server.protocol.wire import Result, decode, decode_unit
from exec_server.rpc.methods import METHODS, Method
from exec_server.rpc.scope import Encoded, Machine, Scope, Streamed
from exec_server.rpc.session import SessionRegistry
from exec_server.rpc.stream import MessageStream

log = logging.getLogger(__name__)

# Requests waiting for their turn; as many as the reference queues. Then the link is not read.
QUEUED_REQUESTS = 128
# Requests that have stepped aside (long polls, writes to a full stdin), at 4 KB each: far more
# than a client that does not wait for answers will have under way. Further ones keep their
# place in the lane.
ASIDE_REQUESTS = 8192
# Request bytes under way: one message of the largest size. Then the link is not read.
PENDING_BYTES = 64 * 1_048_576
# Answers that the client has not taken. Then no further request starts, except control ones.
UNSENT_BYTES = 8 * 1_048_576
# The same for what needs no place in a lane, such as the answers to malformed messages. Then
# the link is not read.
UNSENT_HARD_BYTES = 16 * 1_048_576
# Requests answered in a row before other connections get their turn.
BURST = 64
# A larger message is decoded in a thread, so that it does not delay other connections.
DECODED_INLINE_BYTES = 1_048_576

POLICY_VIOLATION = 1008
INTERNAL_FAILURE = 1011


# What a handler returns when it need not wait.
_ANSWERS = (Result, Encoded)


class State(enum.Enum):
    NEW = "call initialize"
    INITIALIZING = "send initialized"
    READY = "ready"
    CLOSED = "closed"


# What a client may say in which state; a missing key is a mistake of the client. The values of
# State say what it has to do next.
_TRANSITIONS = {
    (State.NEW, "initialize"): State.INITIALIZING,
    (State.INITIALIZING, "initialized"): State.READY,
    (State.READY, "initialized"): State.READY,
}


class _Job(msgspec.Struct, frozen=True, gc=False):
    """A request that waits or runs."""

    id: jsonrpc.RequestId
    method: Method[Any, Any]
    params: object
    size: int


class _Lane:
    """Requests in their order of arrival, of which `places` may run at a time."""

    __slots__ = ("places", "queue", "running")

    def __init__(self, places: int) -> None:
        self.places = places
        self.queue: deque[_Job] = deque()
        self.running = 0


@dataclass(frozen=True, slots=True)
class Host:
    """What the connections of a server have in common."""

    machine: Machine
    sessions: SessionRegistry
    tasks: asyncio.TaskGroup
    concurrent_requests: int = 1


class Connection:
    """One client's link; a MessageReceiver for its transport and a Link for its session."""

    def __init__(self, host: Host, stream: MessageStream) -> None:
        self._host = host
        self._stream = stream
        self._state = State.NEW
        self._scope: Scope | None = None
        self._main = _Lane(host.concurrent_requests)
        self._control = _Lane(host.concurrent_requests)
        self._unfinished_starts: Counter[object] = Counter()
        self._aside = 0
        self._pending_bytes = 0
        self._decoding = False
        self._holding = False
        self._sendable = asyncio.Event()  # set while the client takes what we send
        self._sendable.set()
        self._is_pressed = False  # it does not, or requests wait: the limits have to be watched
        self._running: set[asyncio.Task[None]] = set()

    # ---- messages in ------------------------------------------------------------------

    def message_received(self, message: bytes) -> None:
        if len(message) > DECODED_INLINE_BYTES:
            self._decoding = True
            self._update_hold()
            self._create_task(self._decode_aside(message))
            return
        try:
            decoded = jsonrpc.decode(message)
        except MalformedMessage as error:
            self._refuse(error)
        else:
            if type(decoded) is jsonrpc.Request:
                self._accept(decoded, len(message))
            else:
                self._dispatch(decoded, len(message))
        if self._is_pressed:
            self._update_hold()

    async def _decode_aside(self, message: bytes) -> None:
        """Decode a large message in a thread; nothing more is read from the link meanwhile."""
        threads = self._host.machine.file_threads
        try:
            decoded = await threads.run(jsonrpc.decode, message)
            self._dispatch(decoded, len(message))
        except MalformedMessage as error:
            self._refuse(error)
        except Exception:
            # It must not get out of this task: it would end the server with all its clients.
            log.exception("a message of %d bytes failed unexpectedly", len(message))
            self._stream.close(INTERNAL_FAILURE, "internal error")
        finally:
            self._decoding = False
        self._update_hold()

    def _refuse(self, error: MalformedMessage) -> None:
        text = f"failed to parse {self._stream.origin}: {error}"
        if self._stream.is_strict:
            self._stream.close(POLICY_VIOLATION, text)
            return
        self._stream.send(jsonrpc.encode_error(None, InvalidRequest(text)))

    def _dispatch(self, message: jsonrpc.Message, size: int) -> None:
        if isinstance(message, jsonrpc.Request):
            self._accept(message, size)
        elif isinstance(message, jsonrpc.Response):
            # This server has asked nothing, so there is nothing to answer.
            self._stream.close(POLICY_VIOLATION, "response to a request that was never made")
        elif message.method != "initialized":
            text = f"unexpected notification method: {message.method}"
            self._stream.send(jsonrpc.encode_error(None, InvalidRequest(text)))
        elif (self._state, "initialized") in _TRANSITIONS:
            self._state = _TRANSITIONS[self._state, "initialized"]
        else:
            self._stream.close(POLICY_VIOLATION, "initialized before initialize")

    def _accept(self, request: jsonrpc.Request, size: int) -> None:
        method = METHODS.get(request.method)
        if method is not None:
            job = _Job(request.id, method, request.params, size)
            lane = self._control if method.control and self._may_overtake(job) else self._main
            if lane.queue or not self._has_place(lane):
                self._enqueue(lane, job)
            else:
                self._run(lane, job)
        elif request.method == INITIALIZE.name:
            self._initialize(request)
        else:
            text = f"exec-server stub does not implement `{request.method}` yet"
            self._fail(request.id, MethodNotFound(text))

    def _may_overtake(self, job: _Job) -> bool:
        """Whether a control request may run before earlier requests of the main lane."""
        if self._host.concurrent_requests > 1:
            return True
        if job.method.family == "filesystem":
            return False  # closing a handle must not overtake reads from it
        return not self._unfinished_starts or _named_process(job) not in self._unfinished_starts

    # ---- lanes ------------------------------------------------------------------------

    def _has_place(self, lane: _Lane) -> bool:
        return lane.running < lane.places and (
            not self._is_pressed or lane is self._control or self._stream.unsent() <= UNSENT_BYTES
        )

    def _enqueue(self, lane: _Lane, job: _Job) -> None:
        lane.queue.append(job)
        self._pending_bytes += job.size
        if job.method.call is process.START:
            self._unfinished_starts[_named_process(job)] += 1
        self._update_hold()

    def _advance(self, lane: _Lane) -> None:
        """Run what waits in a lane, as far as there are places."""
        answered = 0
        while lane.queue and self._state is not State.CLOSED and self._has_place(lane):
            if answered == BURST:
                asyncio.get_running_loop().call_soon(self._advance, lane)
                break
            answered += 1
            job = lane.queue.popleft()
            self._pending_bytes -= job.size
            if job.method.call is process.START:
                self._unfinished_starts -= Counter([_named_process(job)])
            self._run(lane, job)
        self._update_hold()

    def _run(self, lane: _Lane, job: _Job) -> None:
        """Run a request to its answer, or to the point where it has to wait."""
        try:
            outcome = self._call(job)
            if isinstance(outcome, _ANSWERS):
                self._send_result(job.id, outcome)
                return
        except Exception as error:
            self._fail(job.id, error)
            return
        self._pending_bytes += job.size
        if job.method.call is process.START:
            self._unfinished_starts[_named_process(job)] += 1
        aside = job.method.steps_aside and self._aside < ASIDE_REQUESTS
        if aside:
            self._aside += 1
        else:
            lane.running += 1
        self._create_task(self._finish(lane, job, outcome, aside=aside))
        self._update_hold()

    async def _finish(
        self, lane: _Lane, job: _Job, outcome: Awaitable[object], *, aside: bool
    ) -> None:
        try:
            # No await between the handler's result and its sending: see processes.start.
            result = await outcome
            if isinstance(result, Streamed):
                before, after = jsonrpc.result_frame(job.id)
                size = len(before) + result.size + len(after)
                await self._stream.send_parts(self._framed(before, result, after), size)
            else:
                self._send_result(job.id, result)
        except Exception as error:
            self._fail(job.id, error)
        finally:
            self._pending_bytes -= job.size
            if job.method.call is process.START:
                self._unfinished_starts -= Counter([_named_process(job)])
            if aside:
                self._aside -= 1
            else:
                lane.running -= 1
        self._advance(lane)

    async def _framed(self, before: bytes, result: Streamed, after: bytes) -> AsyncIterator[bytes]:
        yield before
        try:
            async for part in result.parts:
                yield part
        except OSError as error:
            # Half of the answer is on its way, so there is no error answer any more.
            log.error("a file could not be read to its end: %s", error)
            self._stream.close(INTERNAL_FAILURE, "a file could not be read to its end")
            return
        yield after

    def _update_hold(self) -> None:
        """Read from the link exactly while there is room for more requests."""
        waiting = bool(self._main.queue or self._control.queue)
        self._is_pressed = waiting or not self._sendable.is_set()
        holding = (
            self._decoding
            or len(self._main.queue) + len(self._control.queue) >= QUEUED_REQUESTS
            or self._pending_bytes >= PENDING_BYTES
            or self._stream.unsent() > UNSENT_HARD_BYTES
        )
        if holding != self._holding and self._state is not State.CLOSED:
            self._holding = holding
            self._stream.hold(receiving=not holding)

    def _create_task(self, coroutine: Any) -> None:
        task = self._host.tasks.create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> bool:
        """Run what goes on after its request was answered, unless the link is gone already."""
        if self._state is State.CLOSED:
            coroutine.close()
            return False
        self._create_task(self._watched(coroutine))
        return True

    async def _watched(self, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            await coroutine
        except Exception:
            # It must not get out of this task: it would end the server with all its clients.
            log.exception("something failed unexpectedly after its request was answered")
            self._stream.close(INTERNAL_FAILURE, "internal error")

    # ---- methods and answers ----------------------------------------------------------

    def _call(self, job: _Job) -> Any:
        kind = job.method.call.params
        params = None
        if kind is not None:
            params = decode(kind, job.params)
        elif job.params is not None:
            decode_unit(job.params)
        if self._state is not State.READY:
            raise InvalidRequest(
                f"client must {self._state.value} before using {job.method.family} methods"
            )
        return job.method.handler(self._scope, params)  # type: ignore[arg-type]

    def _initialize(self, request: jsonrpc.Request) -> None:
        try:
            self._send_result(request.id, self._open_session(request.params))
        except RpcError as error:
            self._fail(request.id, error)

    def _open_session(self, params: object) -> InitializeResult:
        initialize = decode(InitializeParams, params)
        following = _TRANSITIONS.get((self._state, "initialize"))
        if following is None:
            raise InvalidRequest("initialize may only be sent once per connection")
        sessions = self._host.sessions
        if initialize.resume_session_id is None:
            session = sessions.create(self)
        else:
            session = sessions.resume(initialize.resume_session_id, self)
        self._scope = Scope(self._host.machine, session, self.notify, self._start, self._sendable)
        self._state = following
        log.info("client %s has session %s", self._stream.origin, session.id)
        return InitializeResult(session.id, self._host.machine.environment)

    def _send_result(self, request_id: jsonrpc.RequestId, result: object) -> None:
        text = result.text if isinstance(result, Encoded) else jsonrpc.encode(result)
        self._stream.send(jsonrpc.encode_result(request_id, text))

    def _fail(self, request_id: jsonrpc.RequestId, error: Exception) -> None:
        """The one place where an exception becomes an answer."""
        if isinstance(error, OSError):
            error = rpc_error_from_os(error)
        elif not isinstance(error, RpcError):
            log.error("request %r failed unexpectedly", request_id, exc_info=error)
            error = InternalError("internal error")
        self._stream.send(jsonrpc.encode_error(request_id, error))

    def notify(self, notice: Notice[msgspec.Struct], params: msgspec.Struct) -> None:
        self._stream.send(jsonrpc.encode_notification(notice, params))

    # ---- the link ---------------------------------------------------------------------

    def probe(self) -> None:
        self._stream.probe()

    def sending_slow(self) -> None:
        self._is_pressed = True
        self._sendable.clear()
        if self._scope is not None:
            self._scope.session.processes.pause()

    def sending_ready(self) -> None:
        self._sendable.set()
        if self._scope is not None:
            self._scope.session.processes.resume()
        self._advance(self._main)

    def link_lost(self) -> None:
        self._state = State.CLOSED
        self._main.queue.clear()
        self._control.queue.clear()
        # At once: on a relay the next message may be the client's, on its new stream.
        if self._scope is not None:
            self._host.sessions.detach(self._scope.session)
        # Not at once: a task that is cancelled before it has begun could not even clean up.
        asyncio.get_running_loop().call_soon(self._abandon)

    def _abandon(self) -> None:
        """Give up whatever still runs here, and what belonged to the connection alone."""
        for task in list(self._running):
            task.cancel()
        if self._scope is not None:
            self._scope.close()


def _named_process(job: _Job) -> object:
    """The process a request is about, as far as that can be told before decoding it."""
    if isinstance(job.params, dict):
        name = job.params.get("processId")
    elif isinstance(job.params, list) and job.params:
        name = job.params[0]
    else:
        return None
    return name if isinstance(name, str) else None
