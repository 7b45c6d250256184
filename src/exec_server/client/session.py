"""ClientSession: calls and notifications that survive the loss of a connection.

Theory of operation. At any time there is either a link past its handshake (`_link`), or somebody
is at work to get one (opening at first, `_recover` later), or the session has ended (`_end` says
why). Every call is a `Waiting`. It is in `_queue` until it is sent, then the link has it. When a
link ends, the calls on it that may be repeated go back to the front of the queue in their old
order, the others fail; what has not been sent yet just waits longer. The answer to `initialize`
is acted upon in the very callback that brings it, so that subscribers hear of the resumption
before the first notification of the new link.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from msgspec import UNSET, Raw

from exec_server.client.answers import (
    NOTICES,
    decode_as,
    decode_environment,
    decode_greeting,
    encode,
    request_body,
)
from exec_server.client.dialers import Dialer, is_passing
from exec_server.client.link import Link, Waiting
from exec_server.errors import (
    ConnectFailed,
    ConnectionLost,
    ExecServerError,
    InternalError,
    InvalidParams,
    InvalidRequest,
    MalformedMessage,
    MethodNotFound,
    RpcError,
    SessionLost,
)
from exec_server.protocol.jsonrpc import RequestId, encode_error, encode_result
from exec_server.protocol.method import Call, Notice
from exec_server.protocol.session import (
    INFO,
    INITIALIZE,
    EnvironmentInfo,
    InitializeParams,
    SessionId,
)

log = logging.getLogger(__name__)

CLIENT_NAME = "exec-server-client"
# For the answer to `initialize`, and to `environment/info` of a server that needs to be asked.
INITIALIZE_SECONDS = 10.0
INFO_SECONDS = 30.0
# Servers keep a session for 30 s after its connection was lost; some of that is gone before a
# client notices. Beyond it the session is given up.
RECOVERY_SECONDS = 25.0
# A request that ends the connection whenever it is sent, such as one that the server chokes on,
# is not sent for ever. Many more losses than a request meets on the worst of networks.
TIMES_SENT = 32
# Of one message, as servers take it. A larger one would only cost the connection.
MESSAGE_BYTES = 64 * 1_048_576
# Requests of the server that are being answered: as many as the reference leaves open. Further
# ones are refused.
ANSWERING = 256

# Who does not know `initialize`, or asks us for it.
_STRANGER = "it does not speak the protocol of an exec-server"

P = TypeVar("P")
R = TypeVar("R")


class Subscriber(Protocol):
    """Who is told what happens in a session, by plain calls in the order of the events.

    Whoever cannot keep up calls `ClientSession.hold`.
    """

    def on_notice(self, notice: Notice[Any], params: Any) -> None:
        """A notification came; `params` is the notice's struct."""
        ...

    def on_disconnected(self) -> None:
        """The connection was lost: notifications may be missed from now on."""
        ...

    def on_resumed(self) -> None:
        """There is a connection again: what was missed can be asked for."""
        ...

    def on_lost(self, error: SessionLost) -> None:
        """The session has ended; nothing more will come."""
        ...


class ClientSession:
    """A session with a server, for `async with`; owns its dialer and closes it.

    Entering raises ConnectFailed, RegistryError or RpcError if there is no way to get one.
    """

    session_id: SessionId
    environment_info: EnvironmentInfo

    def __init__(self, dialer: Dialer, *, client_name: str = CLIENT_NAME) -> None:
        self._dialer = dialer
        self._client_name = client_name
        self._tasks = asyncio.TaskGroup()
        self._is_entered = False
        self._recovery: asyncio.Task[None] | None = None
        self._link: Link | None = None
        self._end: str | None = None
        self._queue: OrderedDict[Waiting, None] = OrderedDict()
        self._subscribers: list[Subscriber] = []
        self._handlers: dict[str, tuple[Call[Any, Any], Callable[[Any], Awaitable[Any]]]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._holds = 0

    # ---- its life ---------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._is_entered:
            raise RuntimeError("this can be entered only once: connect again instead")
        self._is_entered = True
        await self._tasks.__aenter__()
        try:
            await self._attach(resume=None)
            if not hasattr(self, "environment_info"):
                async with asyncio.timeout(INFO_SECONDS):
                    answer = await self._ask(INFO.name, None, is_retryable=True)
                self.environment_info = decode_environment(answer)
        except TimeoutError:
            await self._finish()
            raise ConnectFailed("timed out waiting for environment/info") from None
        except BaseException:
            await self._finish()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._finish()

    async def close(self) -> None:
        """End the session: calls under way fail with SessionLost; the connection is gone after."""
        self._lose("the session was closed")
        if self._recovery is not None:
            await asyncio.wait([self._recovery])  # which has been cancelled
        await self._dialer.close()

    async def _finish(self) -> None:
        """Close, and see that no task is left; what the body raised is not the group's affair."""
        try:
            await self.close()
        finally:
            await self._tasks.__aexit__(None, None, None)

    # ---- what its users do ------------------------------------------------------------

    async def call(self, call: Call[P, R], params: P, *, is_retryable: bool = False) -> R:
        """Ask the server and wait for its answer, however long that takes.

        Raises RpcError (its subclass tells the code) if the server refuses, ConnectionLost if
        the connection ends first, unless `is_retryable` says that the request may be sent
        again, and SessionLost. Cancelled, it forgets the answer; the server is not told.
        """
        answer = await self._ask(call.name, params, is_retryable=is_retryable)
        return decode_as(call.result, answer, f"answer to {call.name}")

    async def _ask(self, method: str, params: object, *, is_retryable: bool) -> Raw:
        if not self._is_entered:
            raise RuntimeError("there is no session yet: use it inside of its `async with`")
        try:
            body = request_body(method, params)
        except UnicodeEncodeError:
            raise InvalidParams("text that is not UTF-8 cannot be sent") from None
        except (NotImplementedError, TypeError) as error:
            raise InvalidParams(str(error)) from None
        if len(body) + 32 > MESSAGE_BYTES:
            raise InvalidRequest(f"the request has {len(body)} bytes; a message may have 64 MiB")
        if self._end is not None:
            raise SessionLost(self._end)
        waiting = Waiting(body, is_retryable=is_retryable)
        self._queue[waiting] = None
        self._send_queued()
        try:
            return await waiting.future
        finally:
            self._queue.pop(waiting, None)  # if it was cancelled before its turn came

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Tell it what happens from now on; returns what ends that."""
        self._subscribers.append(subscriber)
        return lambda: self._subscribers.remove(subscriber)

    def answer(self, call: Call[P, R], handler: Callable[[P], Awaitable[R]]) -> None:
        """Let `handler` answer this request of the server; its RpcErrors are answers too."""
        self._handlers[call.name] = (call, handler)

    def hold(self) -> None:
        """Stop reading from the server, answers to calls included, until `release`."""
        self._holds += 1
        if self._holds == 1 and self._link is not None:
            self._link.hold(receiving=False)

    def release(self) -> None:
        """Undo one `hold`."""
        assert self._holds, "nobody holds"
        self._holds -= 1
        if not self._holds and self._link is not None:
            self._link.hold(receiving=True)

    # ---- links come and go ------------------------------------------------------------

    async def _attach(self, resume: SessionId | None) -> None:
        """One attempt to get a link past its handshake."""
        links: list[Link] = []

        def make_link(stream: Any) -> Link:
            links.append(Link(self, stream))
            return links[0]

        await self._dialer.open(make_link)
        link = links[0]
        if link.ended is not None:
            raise ConnectFailed(f"connection ended during initialize: {link.ended}")
        greeting = _Greeting(
            request_body(INITIALIZE.name, InitializeParams(self._client_name, resume)),
            lambda answer: self._accept(link, resume, answer),
        )
        try:
            link.ask(greeting)
            # No timeout scope: it could end just after the link was accepted.
            await asyncio.wait([greeting.future], timeout=INITIALIZE_SECONDS)
            if not greeting.future.done():
                raise ConnectFailed(
                    "timed out waiting for exec-server initialize handshake after "
                    f"{INITIALIZE_SECONDS:g}s"
                )
            greeting.future.result()
        except MethodNotFound as error:
            link.drop("initialize failed")
            if resume is not None:
                raise  # and do not try again
            raise ConnectFailed(f"{_STRANGER}: it says: {error}") from None
        except BaseException:
            if link is not self._link:
                link.drop("initialize failed")
            raise

    def _accept(self, link: Link, resume: SessionId | None, answer: Raw) -> None:
        """The server has taken us: this is the session's link from now on."""
        greeting = decode_greeting(answer)
        if resume is not None and greeting.session_id != resume:
            raise SessionLost("exec-server initialized an unexpected session")
        self.session_id = greeting.session_id
        if greeting.environment_info is not UNSET:
            self.environment_info = decode_environment(greeting.environment_info)
        link.send(b'{"method":"initialized","params":{}}')
        self._link = link
        if self._holds:
            link.hold(receiving=False)
        if resume is not None:
            log.info("session resumed")
            self._tell(lambda subscriber: subscriber.on_resumed())
        self._send_queued()

    def link_ended(self, link: Link, unanswered: list[Waiting], reason: str) -> None:
        if link is not self._link:
            for waiting in unanswered:  # only `initialize`
                waiting.fail(ConnectFailed(f"connection ended during initialize: {reason}"))
            return
        self._link = None
        if not self._dialer.can_reconnect:
            self._lose(reason)
        if self._end is not None:
            for waiting in unanswered:
                waiting.fail(SessionLost(self._end))
            return
        for waiting in reversed(unanswered):
            if waiting.is_retryable and waiting.times_sent < TIMES_SENT:
                self._queue[waiting] = None
                self._queue.move_to_end(waiting, last=False)
            else:
                waiting.fail(ConnectionLost(f"no answer: {reason}"))
        log.info("connection to the server lost: %s", reason)
        self._recovery = self._tasks.create_task(self._recover(reason))
        self._tell(lambda subscriber: subscriber.on_disconnected())

    async def _recover(self, reason: str) -> None:
        """Attach again with the same session, or end it."""
        attempt = 0
        try:
            async with asyncio.timeout(RECOVERY_SECONDS):
                while True:
                    try:
                        await self._attach(resume=self.session_id)
                        return
                    except ExecServerError as error:
                        reason = str(error)
                        if not is_passing(error):
                            break
                        log.debug("cannot resume yet: %s", reason)
                    await asyncio.sleep(self._dialer.retry_delay(attempt))
                    attempt += 1
        except TimeoutError:
            if self._link is not None:
                return  # at the last moment
            reason = f"no connection within {RECOVERY_SECONDS:g} s: {reason}"
        self._lose(f"the session could not be resumed: {reason}")

    def _lose(self, reason: str) -> None:
        """End the session and tell everybody."""
        if self._end is not None:
            return
        self._end = reason
        for task in (self._recovery, *self._answering):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        if self._link is not None:
            self._link.drop(reason)
        queue, self._queue = self._queue, OrderedDict()
        for waiting in queue:
            waiting.fail(SessionLost(reason))
        self._tell(lambda subscriber: subscriber.on_lost(SessionLost(reason)))

    def _send_queued(self) -> None:
        """Send what waits, as far as the server may have it."""
        link = self._link
        while (
            self._queue
            and link is not None
            and not link.is_slow
            and link.unanswered < self._dialer.calls_in_flight
        ):
            waiting, _ = self._queue.popitem(last=False)
            link.ask(waiting)
            link = self._link  # sending may find out that it has ended

    # ---- what a link tells ------------------------------------------------------------

    def room_made(self, link: Link) -> None:
        if link is self._link:
            self._send_queued()

    def notified(self, link: Link, method: str, params: Raw) -> None:
        notice = NOTICES.get(method)
        if notice is None:
            return
        decoded = decode_as(notice.params, params, method)
        for subscriber in tuple(self._subscribers):
            try:
                subscriber.on_notice(notice, decoded)
            except Exception:  # an edge: see `_tell`
                log.exception("a subscriber failed")

    def _tell(self, what: Callable[[Subscriber], None]) -> None:
        for subscriber in tuple(self._subscribers):
            try:
                what(subscriber)
            except Exception:  # an edge: one that fails must not keep the others from hearing it
                log.exception("a subscriber failed")

    def requested(self, link: Link, request_id: RequestId, method: str, params: Raw) -> None:
        if method == INITIALIZE.name and link is not self._link:
            # A program such as cat, which would send back our answer to this, too.
            link.drop(f"{_STRANGER}: it sends back what it is sent")
        elif method not in self._handlers:
            text = f"exec-server client does not implement `{method}` yet"
            link.send(encode_error(request_id, MethodNotFound(text)))
        elif len(self._answering) >= ANSWERING:
            link.send(encode_error(request_id, InternalError("too many requests at a time")))
        elif self._end is None:
            task = self._tasks.create_task(self._answer(link, request_id, method, params))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _answer(self, link: Link, request_id: RequestId, method: str, params: Raw) -> None:
        call, handler = self._handlers[method]
        try:
            given = None if call.params is None else decode_as(call.params, params, method)
            answer = encode_result(request_id, encode(await handler(given)))
        except RpcError as error:
            answer = encode_error(request_id, error)
        except MalformedMessage as error:
            link.drop(f"malformed message from the server: {error}")
            return
        except Exception:  # an edge: the server gets an answer, whatever happens here
            log.exception("the handler of %s failed", method)
            answer = encode_error(request_id, InternalError("the client failed"))
        link.send(answer)


class _Greeting(Waiting):
    """`initialize`, whose answer is acted upon at once."""

    __slots__ = ("_accept",)

    def __init__(self, body: bytes, accept: Callable[[Raw], None]) -> None:
        super().__init__(body, is_retryable=False)
        self._accept = accept

    def resolve(self, result: Raw) -> None:
        try:
            self._accept(result)
        except ExecServerError as error:
            self.fail(error)
        else:
            super().resolve(result)
