"""ClientSession: calls and notifications that survive the loss of a connection.

It has a connection past its handshake (`_connection`), or a task opens one (`__aenter__`, later
`_recover`), or it has ended (`_end_reason`). A `PendingCall` is in `_queue` until it is sent, then
in `pending` of the connection. A lost connection puts its repeatable calls back to the front of the
queue in their old order; the others fail. The answer to `initialize` is processed in the callback
that receives it, so that subscribers learn of the resumption before the first notification.

`reconnect`, or with `reconnect=True` the next call, replaces a session that has ended (`_renew`).
All that waited for it fail with SessionLost, except calls that were never sent and name nothing of
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import enum
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Final, Protocol, Self, TypeVar

from msgspec import UNSET, Raw

from exec_server.client.engine.attempts import Attempts
from exec_server.client.engine.flow_control import FlowControl
from exec_server.client.engine.messages import (
    FLOOD_SECONDS,
    CallQueue,
    Envelope,
    InitializeAnswer,
    InitializeCall,
    InitializeRequest,
    PendingCall,
    UselessMessages,
    decode,
    decode_as,
    decode_environment,
    decode_params,
    find_notice,
    request_body,
    without_binary,
)
from exec_server.client.engine.server_features import ServerFeatures, discover
from exec_server.client.engine.server_requests import ServerRequests
from exec_server.client.results import ConnectionStatus
from exec_server.errors import (
    CertificateRejected,
    ConnectFailed,
    ConnectionLost,
    ExecServerError,
    InvalidRequest,
    MalformedMessage,
    MethodNotFound,
    RegistryUnavailable,
    SessionAttached,
    SessionLost,
    Unsupported,
    printable,
)
from exec_server.host.clock import boot_time
from exec_server.host.event_loop import ForkGuard
from exec_server.net.stream import BinaryStream, MessageStream, ReceiverFactory
from exec_server.protocol.decoding import Call, Notice
from exec_server.protocol.session import CLOSE, INITIALIZE, EnvironmentInfo, SessionId

T = TypeVar("T")

log = logging.getLogger(__name__)

CLIENT_NAME: Final = "exec-server-client"
# For the answer to `initialize`, and to all questions to a server that does not describe itself.
INITIALIZE_SECONDS = 10.0
INFO_SECONDS = 30.0
# The session is given up this long after its connection was lost, unless the server has granted
# another time. Servers since 0.169 keep it for 80 s, and some of that time passes before the client
# notices. Older ones keep it for 30 s, and refuse the next attempt then, which ends the session at
# once.
RECOVERY_SECONDS = 45.0
# Through a registry the delays grow to seconds. There is an attempt this long before the end, which
# leaves time for a handshake.
LAST_ATTEMPT_SECONDS = 3.0
# How long closing waits for a server that does not answer. It ends the session by itself later, and
# a kill takes milliseconds.
CLOSE_SECONDS = 1.0
# How often one request is sent. A request that makes the server drop the connection must not be
# repeated forever; even on a bad network no other request comes near this number.
MAX_SENDS = 32
# Size of one message that servers accept. A larger one would cost the connection.
MESSAGE_BYTES = 64 * 1_048_576
# Calls that are sent and not answered; further ones wait in the client. The reference queues 128
# requests and as many outgoing messages, and deadlocks when both queues are full.
CALLS_IN_FLIGHT = 120

# HTTP statuses that another attempt would get again.
_FINAL_STATUSES = frozenset({401, 403, 404})
# Close codes of RFC 6455, section 7.4.1.
_NORMAL: Final = 1000
_TIMED_OUT = "timed out waiting for exec-server initialize handshake after"
_PROTOCOL_ERROR: Final = 1002
# Servers answer with this id if they could not read the id of a message.
_NO_ID: Final = -1
# The reason if the peer does not know `initialize`, or sends it to the client.
_CLOSED: Final = "the session was closed"
_ENVIRONMENT_CLOSED: Final = "the environment was closed"  # what callers are told
_NOT_A_SERVER: Final = "it does not speak the protocol of an exec-server"
_FLOOD: Final = f"the server has sent nothing but useless messages for {FLOOD_SECONDS:g} s"
_RESTARTED: Final = "; the server was probably restarted"

P = TypeVar("P")
R = TypeVar("R")


# Work that outlives the caller's cancellation: a task, and a future for its result.
def start_background(tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    """Start a task; cancelling the future, whose result need not be retrieved, ends it."""
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    task = tasks.create_task(_settle(work, future))
    future.add_done_callback(lambda _: task.cancel())
    task.add_done_callback(lambda _: work.close())  # the task may end before it has run
    return future


def refuse_background(work: Coroutine[Any, Any, T], error: Exception) -> asyncio.Future[T]:
    """A future that has failed, for work that is not begun."""
    work.close()
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    future.exception()  # mark it as retrieved
    return future


def other_loop_error(noun: str) -> RuntimeError:
    """The error of a use in another event loop, where the caller would wait for ever."""
    return RuntimeError(
        f"this {noun} belongs to another event loop: connect in each loop, or use "
        "exec_server.sync, which works in all threads"
    )


async def _settle(work: Coroutine[Any, Any, T], future: asyncio.Future[T]) -> None:
    try:
        result = await work
    except asyncio.CancelledError:
        future.cancel()
        raise
    except Exception as error:  # an edge: the holder of the future gets it
        if not future.done():
            future.set_exception(error)
            future.exception()  # mark it as retrieved
    else:
        if not future.done():
            future.set_result(result)


class Closing(enum.Enum):
    """What a dialer that closes its connections may expect of the server."""

    ORDERLY = enum.auto()  # it answers the close
    ENDED = enum.auto()  # it has ended the session, so there is nothing to wait for
    SILENT = enum.auto()  # it does not answer any more


class Dialer(Protocol):
    """Opens connections to one server."""

    @property
    def can_reconnect(self) -> bool:
        """Whether a session can be resumed on another connection."""
        ...

    @property
    def calls_in_flight(self) -> int:
        """How many calls may await an answer on one connection."""
        ...

    async def open(self, make_receiver: ReceiverFactory) -> MessageStream:
        """Open a connection; `is_transient` tells whether to try again after an exception.

        After a cancellation, `close` closes everything that was opened so far.
        """
        ...

    def retry_delay(self, attempt: int) -> float:
        """Seconds to wait after a failed attempt; the first one has number 0."""
        ...

    async def close(self, closing: Closing) -> None:
        """Close all connections and wait for their end."""
        ...


def is_transient(error: ExecServerError) -> bool:
    """Whether another attempt to connect, or to resume a session, may succeed."""
    if isinstance(error, CertificateRejected):
        return False
    if isinstance(error, ConnectFailed):
        return error.status not in _FINAL_STATUSES
    return isinstance(error, RegistryUnavailable | SessionAttached)


class ClientConnection:
    """A stream, and the calls on it that are not answered."""

    def __init__(self, session: ClientSession, stream: MessageStream) -> None:
        self._session = session
        self.stream = stream
        self.last_id = 0
        # A cancelled call stays until it is answered: the server is still working on it, so it
        # counts as one in flight.
        self.pending: dict[int, PendingCall] = {}
        self.end_reason: str | None = None
        self.is_writing_paused = False
        self._useless = UselessMessages()

    def message_received(self, message: bytes) -> None:
        if self.end_reason is not None:
            return
        try:
            self._session.message_received(self, decode(message))
        except MalformedMessage as error:
            self._session.message_malformed(self, error)

    def useless_received(self) -> None:
        if self.end_reason is None:
            self.judge(is_useful=False)

    def judge(self, *, is_useful: bool) -> None:
        """Count a message, or a frame; report a server that sends useless ones for too long."""
        if is_useful:
            self._useless.useful_received()
        elif self._useless.useless_received(asyncio.get_running_loop().time()):
            self._session.give_up(self, _FLOOD)

    def pause_writing(self) -> None:
        self.is_writing_paused = True

    def resume_writing(self) -> None:
        self.is_writing_paused = False
        self._session.send_queued()

    def connection_lost(self) -> None:
        if self.end_reason is None:
            self._session.connection_ended(self, "connection lost")


# Messages that the server sends on its own: notifications to subscribers, requests to handlers.
class Subscriber(Protocol):
    """Receives session events by plain calls, in order; a slow one calls `pause_reading`."""

    def on_notice(self, notice: Notice[Any], params: Any) -> bool | None:
        """Take a notice's struct; True if it was for this subscriber and told something new."""
        ...

    def on_disconnected(self) -> None:
        """The connection was lost: notifications may be missed from now on."""
        ...

    def on_resumed(self) -> None:
        """The session has a connection again: missed output can be requested."""
        ...

    def on_lost(self, error: SessionLost) -> None:
        """The session has ended; no further event follows."""
        ...


def deliver_notification(subscribers: Iterable[Subscriber], method: str, params: Raw) -> bool:
    """Decode a notification for all subscribers; unknown ones are ignored, as servers may be newer.

    Returns whether it told a subscriber something new. Raises MalformedMessage.
    """
    notice = find_notice(method)
    if notice is None:
        return False
    is_useful = False
    decoded = decode_params(notice, params)
    for subscriber in tuple(subscribers):
        try:
            is_useful |= subscriber.on_notice(notice, decoded) is True
        except Exception:  # an edge: see `notify`
            log.exception("a subscriber failed")
    return is_useful


def report_event(subscribers: Iterable[Subscriber], report: Callable[[Subscriber], None]) -> None:
    """Report an event of the session to all subscribers."""
    for subscriber in tuple(subscribers):
        try:
            report(subscriber)
        except Exception:  # an edge: the other subscribers get the event all the same
            log.exception("a subscriber failed")


class ClientSession:
    """A session with a server, for `async with`; owns its dialer and closes it.

    Entering raises ConnectFailed, RegistryError or RpcError if no session can be opened.
    """

    session_id: SessionId | None
    environment_info: EnvironmentInfo
    features: ServerFeatures

    def __init__(
        self,
        dialer: Dialer,
        *,
        client_name: str = CLIENT_NAME,
        reconnect: bool = False,
        retention: int | None = None,
    ) -> None:
        """With `reconnect`, a call after the end of the session opens a new one.

        The server is asked to keep the session for `retention` seconds without a connection.
        """
        self.flow_control = FlowControl(self)
        # Called when a new session has taken the place of one that had ended.
        self.on_renewed: Callable[[], None] = lambda: None
        # What removes temporary files of the session; called before it is closed in order.
        self.clean_ups: set[Callable[[], Coroutine[Any, Any, None]]] = set()
        # The methods that the server lacks, and what is called instead with method and params.
        self.missing_methods: frozenset[str] = frozenset()
        self.polyfill: Callable[[str, Any], Awaitable[Any]] = _no_polyfill
        self._fork = ForkGuard()
        self._dialer = dialer
        self._client_name = client_name
        self._reconnects = reconnect
        self._retention = UNSET if retention is None else retention
        self.granted_retention: int | None = None
        """What the server has granted; None if it was not asked, or does not know the request."""
        self._attempts: Attempts | None = None
        self._since = _now()  # of the state that `status` has
        self._loss = ""  # the reason of the last lost connection
        self._tasks = asyncio.TaskGroup()
        self._loop: asyncio.AbstractEventLoop | None = None  # from entering on
        self._is_closed = False
        self.is_silent = False  # the server has not answered in time while this was being closed
        self._recovery: asyncio.Task[None] | None = None
        self._connection: ClientConnection | None = None
        self._end_reason: str | None = None
        self._renewal_error: ExecServerError | None = None
        self._queue = CallQueue()
        self._subscribers: list[Subscriber] = []
        self._server_requests = ServerRequests(self._tasks)
        self._pauses = 0

    async def __aenter__(self) -> Self:
        if self._loop is not None:
            raise RuntimeError("a session can be entered only once: connect again instead")
        self._loop = asyncio.get_running_loop()
        await self._tasks.__aenter__()
        try:
            await self._attach(resume=None)
        except BaseException:
            await self._finish()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._finish()

    async def close(self) -> None:
        """End the session, also on the server; calls in flight fail with SessionLost.

        Without a connection the server ends the session when its retention is over.
        """
        self._is_closed = True
        self._since = _now()
        self.flow_control.close()
        closing = Closing.SILENT
        try:
            closing = await self._close_on_server()
        finally:
            self._end(_CLOSED)
            self._queue.fail(SessionLost(_CLOSED))
            if self._recovery is not None:
                self._recovery.cancel()
                await asyncio.wait([self._recovery])
            await self._dialer.close(closing)

    async def _close_on_server(self) -> Closing:
        """Let the server end the session with all descendants of its processes, if it can."""
        connection = self._connection
        if connection is None or self.is_silent or not self.features.capabilities.session_close:
            return Closing.SILENT if self.is_silent else Closing.ORDERLY
        for call in connection.pending.values():
            call.fail(SessionLost(_ENVIRONMENT_CLOSED))
        self._queue.fail(SessionLost(_ENVIRONMENT_CLOSED))
        if self._pauses:
            connection.stream.resume_reading()  # the answer is to be read
        closing = PendingCall(self._body(CLOSE.name, None), is_retryable=False)
        self._send(connection, closing)
        await asyncio.wait([closing.future], timeout=CLOSE_SECONDS)
        return Closing.ENDED if closing.future.done() else Closing.SILENT

    async def reconnect(self) -> None:
        """Open a new session if this one has ended; if it is being resumed, wait for that.

        Raises ConnectFailed, RegistryError or RpcError if the server cannot be reached within
        RECOVERY_SECONDS, and SessionLost after `close`.
        """
        if self._loop is not None:
            self.check_loop()
        if self._is_closed or self._loop is None:
            raise SessionLost("the session is not open")
        if self._recovery is not None:
            await asyncio.wait([self._recovery])
            if self._is_closed:
                raise SessionLost("the session was closed")
        if self._end_reason is not None:
            await asyncio.wait([self._begin_renewal()])
            if self._end_reason is not None:
                raise self._renewal_error or SessionLost(self._end_reason)

    async def _finish(self) -> None:
        """Close, and wait for all tasks; an exception of the body does not pass the group."""
        try:
            await self.close()
        finally:
            await self._tasks.__aexit__(None, None, None)

    @property
    def status(self) -> ConnectionStatus:
        """What the connection does, and since when."""
        if self._loop is None or self._is_closed:
            return ConnectionStatus("closed", self._since)
        if self._connection is not None:
            return ConnectionStatus("connected", self._since)
        attempts = self._attempts
        if attempts is None or self._recovery is None or self._recovery.done():
            return ConnectionStatus("lost", self._since, self._end_reason)
        return ConnectionStatus(
            "reconnecting",
            self._since,
            attempts.reason or self._end_reason or self._loss,
            attempts.count,
            _now() + datetime.timedelta(seconds=attempts.remaining),
        )

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection now; without one, notifications may be missed."""
        return self._connection is not None

    async def wait_connected(self) -> None:
        """Wait until a lost connection is there again, or is given up."""
        if self._connection is None and self._recovery is not None:
            await asyncio.wait([self._recovery])

    def check_loop(self) -> None:
        """Raise RuntimeError in another event loop, or process, than that of the session."""
        self._fork.check()
        if asyncio.get_running_loop() is not self._loop:
            raise other_loop_error("session")

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Start a task that outlives the caller's cancellation; cancelling the future ends it."""
        if asyncio.get_running_loop() is not self._loop:
            return refuse_background(work, other_loop_error("session"))
        if self._is_closed:
            return refuse_background(work, SessionLost(_ENVIRONMENT_CLOSED))
        return start_background(self._tasks, work)

    async def call(
        self,
        call: Call[P, R],
        params: P,
        *,
        is_retryable: bool = False,
        is_bound: bool = False,
        on_send: Callable[[], None] | None = None,
        on_answer: Callable[[], None] | None = None,
    ) -> R:
        """Send a request and wait for its answer without a time limit.

        Raises RpcError (a subclass for each code) if the server refuses, ConnectionLost if the
        connection ends first and the request is not `is_retryable`, and SessionLost. A request that
        `is_bound` to this session is not made in a new one. `on_send` is called when it is sent,
        `on_answer` when the result is received, before the next message is. If the caller is
        cancelled, the answer is discarded; the server does not learn of it. For a method that the
        server lacks, its polyfill is used.
        """
        consumers = self.flow_control.begin_wait()
        try:
            if call.name in self.missing_methods:
                return await self.call_polyfill(call, params)
            answer = await self._request(
                call.name,
                params,
                is_retryable=is_retryable,
                is_bound=is_bound,
                on_send=on_send,
                on_answer=on_answer,
            )
        finally:
            self.flow_control.end_wait(consumers)
        return decode_as(call.result, answer, f"answer to {call.name}")

    async def call_polyfill(self, call: Call[P, R], params: P) -> R:
        """Do without the server what the method would do; see `client.polyfills`."""
        result: R = await self.polyfill(call.name, params)
        return result

    async def call_server(self, call: Call[P, R], params: P, *, is_retryable: bool = False) -> R:
        """Do as `call` for a polyfill, which is a part of such a call."""
        answer = await self._request(call.name, params, is_retryable=is_retryable)
        return decode_as(call.result, answer, f"answer to {call.name}")

    async def call_in_background(
        self, call: Call[P, R], params: P, *, is_retryable: bool = True, is_urgent: bool = False
    ) -> R:
        """Make a call about a process that no consumer waits for: it exempts no full queue.

        A process that does not read its input may delay the answer to a write. An urgent call does
        not wait for such answers, whatever the number of calls in flight.
        """
        answer = await self._request(
            call.name, params, is_retryable=is_retryable, is_urgent=is_urgent, is_bound=True
        )
        return decode_as(call.result, answer, f"answer to {call.name}")

    async def _request(
        self,
        method: str,
        params: object,
        *,
        is_retryable: bool,
        is_urgent: bool = False,
        is_bound: bool = False,
        on_send: Callable[[], None] | None = None,
        on_answer: Callable[[], None] | None = None,
    ) -> Raw:
        call = PendingCall(
            self._body(method, params),
            is_retryable=is_retryable,
            is_urgent=is_urgent,
            is_bound=is_bound,
            on_send=on_send,
            on_answer=on_answer,
        )
        self._enqueue(call)
        try:
            return await call.future
        finally:
            self._queue.discard(call)

    def post(self, call: Call[P, R], params: P) -> None:
        """Send a request once, unless the session has ended, and discard its answer."""
        body = self._body(call.name, params)
        with contextlib.suppress(SessionLost):
            self._enqueue(PendingCall(body, is_retryable=False, is_bound=True))

    def _body(self, method: str, params: object) -> bytes:
        if self._loop is None:
            raise RuntimeError("the session is not open: use it inside of its `async with`")
        self.check_loop()
        body = request_body(method, params, has_uri_paths=self.features.sends_uris)
        if len(body) + 32 > MESSAGE_BYTES:
            raise InvalidRequest(f"the request has {len(body)} bytes; a message may have 64 MiB")
        return body

    def _enqueue(self, call: PendingCall) -> None:
        """Send a call as soon as possible; raises SessionLost."""
        if self._is_closed:
            raise SessionLost(_ENVIRONMENT_CLOSED)
        if self._end_reason is not None:
            if call.is_bound or not self._reconnects:
                raise SessionLost(self._end_reason)
            self._begin_renewal()
        self._queue.add(call)
        self.send_queued()

    def send_queued(self) -> None:
        """Send queued calls, up to the number that may be in flight; urgent ones are first."""
        while self._queue:
            connection = self._connection  # sending may find out that it has ended
            if connection is None or connection.is_writing_paused:
                return
            is_full = len(connection.pending) >= self._dialer.calls_in_flight
            if is_full and not self._queue.is_urgent:
                return
            self._send(connection, self._queue.pop())

    def _send(self, connection: ClientConnection, call: PendingCall) -> None:
        connection.last_id += 1
        connection.pending[connection.last_id] = call
        call.send(connection.stream, connection.last_id)

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Report all events from now on to `subscriber`; returns a function that ends this."""
        self._subscribers.append(subscriber)
        return lambda: self._subscribers.remove(subscriber)

    def answer(self, call: Call[P, R], handler: Callable[[P], Awaitable[R]]) -> None:
        """Let `handler` answer this request of the server; an RpcError it raises is an answer."""
        self._server_requests.handlers[call.name] = (call, handler)

    def pause_reading(self) -> None:
        """Stop reading from the server, answers included, until as many `resume_reading`."""
        self._pauses += 1
        if self._pauses == 1 and self._connection is not None:
            self._connection.stream.pause_reading()

    def resume_reading(self) -> None:
        """Undo one `pause_reading`."""
        assert self._pauses, "reading is not paused"
        self._pauses -= 1
        if not self._pauses and self._connection is not None:
            self._connection.stream.resume_reading()

    async def _attach(self, resume: SessionId | None) -> None:
        """Make one attempt to open a connection and complete the handshake."""
        made: list[ClientConnection] = []

        def make_receiver(stream: MessageStream) -> ClientConnection:
            made.append(ClientConnection(self, stream))
            return made[0]

        await self._dialer.open(make_receiver)
        connection = made[0]
        if connection.end_reason is not None:
            raise ConnectFailed(f"connection ended during initialize: {connection.end_reason}")
        initialize = InitializeCall(
            request_body(
                INITIALIZE.name,
                InitializeRequest(
                    self._client_name,
                    resume,
                    session_retention_seconds=self._retention,
                    binary_output=True if isinstance(connection.stream, BinaryStream) else UNSET,
                ),
            ),
            lambda answer: self._accept(connection, resume, answer),
        )
        try:
            self._send(connection, initialize)
            # No timeout scope: it could expire just after the connection was accepted.
            await asyncio.wait([initialize.future], timeout=INITIALIZE_SECONDS)
            if not initialize.future.done():
                raise ConnectFailed(f"{_TIMED_OUT} {INITIALIZE_SECONDS:g}s")
            initialize.future.result()
            if connection is not self._connection and connection.end_reason is None:
                await self._discover(connection)
                self._use(connection, resume)
        except MethodNotFound as error:
            self._drop(connection, "initialize failed")
            if resume is not None:
                raise  # which is not transient
            raise ConnectFailed(f"{_NOT_A_SERVER}: it says: {error}") from None
        except BaseException:
            if connection is not self._connection:
                self._drop(connection, "initialize failed")
            raise

    def _accept(self, connection: ClientConnection, resume: SessionId | None, answer: Raw) -> None:
        """Take the answer to `initialize`; use the connection if the server describes itself."""
        initialized = decode_as(InitializeAnswer, answer, "answer to initialize")
        if resume is not None and initialized.session_id != resume:
            raise SessionLost("exec-server initialized an unexpected session")
        self.session_id = initialized.session_id
        self.granted_retention = initialized.session_retention_seconds
        if initialized.environment_info is not UNSET:
            info = decode_environment(initialized.environment_info)
            if not isinstance(connection.stream, BinaryStream):
                info = without_binary(info)
            self.environment_info = info
            self.features = ServerFeatures(
                capabilities=info.capabilities, has_sessions=self.session_id is not None
            )
        connection.stream.send(b'{"method":"initialized","params":{}}')
        # A server that is unknown is asked first; until then no subscriber expects notifications.
        if resume is not None or initialized.environment_info is not UNSET:
            self._use(connection, resume)

    async def _discover(self, connection: ClientConnection) -> None:
        """Ask a server that does not describe itself, before anything else uses the connection."""

        def ask(method: str, params: object) -> asyncio.Future[Raw]:
            call = PendingCall(request_body(method, params), is_retryable=False)
            self._send(connection, call)
            return call.future

        try:
            async with asyncio.timeout(INFO_SECONDS):
                found = await discover(ask, has_sessions=self.session_id is not None)
        except TimeoutError:
            raise ConnectFailed("timed out waiting for environment/info") from None
        self.environment_info, self.features = found

    def _use(self, connection: ClientConnection, resume: SessionId | None) -> None:
        self._connection = connection
        self._since = _now()
        if self._pauses:
            connection.stream.pause_reading()
        if resume is not None:
            log.info("session resumed")
            report_event(self._subscribers, lambda subscriber: subscriber.on_resumed())
        elif self._end_reason is not None:
            log.info("a new session takes the place of one that has ended")
            self._end_reason = None
            self.on_renewed()
        self.send_queued()

    def message_malformed(self, connection: ClientConnection, error: MalformedMessage) -> None:
        """End the session: its server is broken, and the content of the message is lost.

        A process whose output was in it would otherwise seem to have ended in order.
        """
        self.give_up(connection, f"malformed message from the server: {error}")

    def give_up(self, connection: ClientConnection, reason: str) -> None:
        """End the session, or the connection before it is used."""
        if connection is self._connection:
            self._end(reason, _PROTOCOL_ERROR)
        else:
            self._drop(connection, reason, _PROTOCOL_ERROR)

    def _drop(self, connection: ClientConnection, reason: str, code: int = _NORMAL) -> None:
        """Close a connection; the answers to its requests are lost."""
        if connection.end_reason is None:
            log.info("connection ends: %s", printable(reason))
            self.connection_ended(connection, reason)
            connection.stream.close(code, reason[:100].encode("ascii", "replace").decode())

    def connection_ended(self, connection: ClientConnection, reason: str) -> None:
        """Requeue or fail the calls of a connection, and reconnect; called once for each."""
        connection.end_reason = reason
        calls = [call for call in connection.pending.values() if not call.future.done()]
        connection.pending.clear()
        if connection is not self._connection:
            for call in calls:  # only `initialize`
                call.fail(ConnectFailed(f"connection ended during initialize: {reason}"))
            return
        self._connection = None
        self._since, self._loss = _now(), reason
        if not self._dialer.can_reconnect:
            self._end(reason)
        elif not self.features.has_sessions:
            self._end(f"the server has no sessions to resume: {reason}")
        if self._end_reason is not None:
            for call in calls:
                call.fail(SessionLost(self._end_reason))
            return
        may_repeat = [call.is_retryable and call.times_sent < MAX_SENDS for call in calls]
        self._queue.put_back(itertools.compress(calls, may_repeat))
        for call, is_repeated in zip(calls, may_repeat, strict=True):
            if not is_repeated:
                call.fail(ConnectionLost(f"no answer: {reason}"))
        log.info("connection to the server lost: %s", printable(reason))
        self._recovery = self._tasks.create_task(self._recover(reason))
        report_event(self._subscribers, lambda subscriber: subscriber.on_disconnected())

    async def _recover(self, reason: str) -> None:
        error = await self._try_to_attach(self.session_id, reason)
        if error is not None:
            hint = _RESTARTED if "unknown session" in str(error) else ""
            # Calls do not wait for a server twice that was away all this time.
            is_away = is_transient(error)
            self._end(f"the session could not be resumed: {error}{hint}", keeps_calls=not is_away)

    async def _renew(self) -> None:
        """Open a new session, or fail all that wait for it."""
        self._renewal_error = await self._try_to_attach(None, "no answer")
        if self._renewal_error is not None:
            self._queue.fail(SessionLost(f"there is no new session: {self._renewal_error}"))

    def _begin_renewal(self) -> asyncio.Task[None]:
        """Open a new session in a task, unless one does that already."""
        task = self._recovery
        is_over = task is None or task.done() or task.cancelling()
        if task is None or is_over or task is asyncio.current_task():
            task = self._recovery = self._tasks.create_task(self._renew())
        return task

    async def _try_to_attach(self, resume: SessionId | None, reason: str) -> ExecServerError | None:
        """Attempt as long as the session can exist, or for RECOVERY_SECONDS to open a new one.

        Returns the last error, or else `reason`, if all attempts fail.
        """
        granted = None if resume is None else self.granted_retention
        seconds = RECOVERY_SECONDS if granted is None else float(granted)
        attempts = self._attempts = Attempts(seconds, LAST_ATTEMPT_SECONDS, boot_time)
        while attempts.remaining > 0:
            try:
                async with attempts.limit():
                    attempts.count += 1
                    try:
                        await self._attach(resume)
                        return None
                    except ExecServerError as error:
                        reason = attempts.reason = str(error)
                        if not (is_transient(error) and self._dialer.can_reconnect):
                            return error
                        log.debug("no connection yet: %s", printable(reason))
                    shortest = self._dialer.retry_delay(attempts.count - 1)
                    await asyncio.sleep(attempts.delay(shortest))
            except TimeoutError:
                pass  # the end, or this machine has woken up
            if self._connection is not None:
                return None  # it was accepted just before the timeout
        return ConnectFailed(f"no connection within {seconds:g} s: {reason}")

    def _end(self, reason: str, code: int = _NORMAL, *, keeps_calls: bool = True) -> None:
        """Fail all calls, with `keeps_calls` only those ever sent, and tell the subscribers."""
        if self._end_reason is not None:
            return
        self._end_reason = reason
        self._since = _now()
        if self._recovery is not None and self._recovery is not asyncio.current_task():
            self._recovery.cancel()
        self._server_requests.cancel()
        if self._connection is not None:
            self._drop(self._connection, reason, code)
        keeps_calls = keeps_calls and self._reconnects and not self._is_closed
        self._queue.fail(SessionLost(reason), keep_movable=keeps_calls)
        report_event(self._subscribers, lambda subscriber: subscriber.on_lost(SessionLost(reason)))
        if self._queue:
            self._begin_renewal()

    def message_received(self, connection: ClientConnection, envelope: Envelope) -> None:
        """Pass on an answer, a notification or a request; raises MalformedMessage."""
        if envelope.method is UNSET:
            self._answer_received(connection, envelope)
        elif envelope.id is UNSET:
            connection.judge(
                is_useful=deliver_notification(self._subscribers, envelope.method, envelope.params)
            )
        else:
            self._request_received(connection, envelope)

    def _answer_received(self, connection: ClientConnection, envelope: Envelope) -> None:
        request_id = envelope.id
        call = connection.pending.pop(request_id, None) if type(request_id) is int else None
        if call is not None:
            if not call.is_bound:
                # An answer about a process is no sign of progress: it may say that nothing is new.
                connection.judge(is_useful=True)
            if envelope.result is not UNSET:
                call.resolve(envelope.result)
            else:
                assert envelope.error is not UNSET
                call.fail(envelope.error.exception())
            self.send_queued()
        elif request_id == _NO_ID and envelope.error is not UNSET:
            # The answer does not tell which request it is for, and that one would hang.
            reason = f"the server could not read a request: {envelope.error.message}"
            self._drop(connection, reason, _PROTOCOL_ERROR)
        else:
            log.info("the server answered a request that was not made")
            connection.judge(is_useful=False)

    def _request_received(self, connection: ClientConnection, envelope: Envelope) -> None:
        assert envelope.id is not UNSET
        assert envelope.method is not UNSET
        if envelope.method == INITIALIZE.name and connection is not self._connection:
            # A program such as cat, which would echo the answer to this request, too.
            self._drop(connection, f"{_NOT_A_SERVER}: it sends back what it is sent")
        elif connection.is_writing_paused:
            # The answers would fill the memory of a client whose server does not read them.
            self._drop(connection, "the server sends requests and reads no answers")
        elif self._end_reason is None:
            answer, send = self._server_requests.received, connection.stream.send
            connection.judge(is_useful=answer(envelope.id, envelope.method, envelope.params, send))


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


async def _no_polyfill(method: str, params: object) -> object:
    raise Unsupported(method, "this session has no replacement for it")
