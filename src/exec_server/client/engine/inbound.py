"""Messages that the server sends on its own: notifications to subscribers, requests to handlers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, Protocol

from msgspec import Raw

from exec_server.client.engine.messages import decode_as, encode, find_notice
from exec_server.errors import InternalError, MethodNotFound, RpcError, SessionLost
from exec_server.protocol.jsonrpc import RequestId, encode_error, encode_result
from exec_server.protocol.method import Call, Notice

log = logging.getLogger(__name__)

# Requests of the server that are being handled: the reference allows as many. Further ones are
# refused.
MAX_REQUESTS: Final = 256

Handler = Callable[[Any], Awaitable[Any]]


class Subscriber(Protocol):
    """Receives the events of a session by plain calls, in order.

    A subscriber that cannot keep up calls `ClientSession.pause_reading`.
    """

    def on_notice(self, notice: Notice[Any], params: Any) -> bool | None:
        """A notification was received; `params` is the notice's struct.

        True if it was for this subscriber and told something new.
        """
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


def deliver(subscribers: Iterable[Subscriber], method: str, params: Raw) -> bool:
    """Decode a notification for all subscribers; unknown ones are ignored, as servers may be newer.

    Returns whether it told a subscriber something new. Raises MalformedMessage.
    """
    notice = find_notice(method)
    if notice is None:
        return False
    is_useful = False
    decoded = decode_as(notice.params, params, method)
    for subscriber in tuple(subscribers):
        try:
            is_useful |= subscriber.on_notice(notice, decoded) is True
        except Exception:  # an edge: see `notify`
            log.exception("a subscriber failed")
    return is_useful


def notify(subscribers: Iterable[Subscriber], report: Callable[[Subscriber], None]) -> None:
    """Report an event of the session to all subscribers."""
    for subscriber in tuple(subscribers):
        try:
            report(subscriber)
        except Exception:  # an edge: the other subscribers get the event all the same
            log.exception("a subscriber failed")


class ServerRequests:
    """The handlers of a session, and the requests that they are handling."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._running: set[asyncio.Task[None]] = set()
        self.handlers: dict[str, tuple[Call[Any, Any], Handler]] = {}

    def received(
        self, request_id: RequestId, method: str, params: Raw, send: Callable[[bytes], None]
    ) -> bool:
        """Handle a request and `send` the answer; returns whether it is none that is refused.

        Raises MalformedMessage for wrong params.
        """
        if method not in self.handlers:
            text = f"exec-server client does not implement `{method}` yet"
            send(encode_error(request_id, MethodNotFound(text)))
            return False
        if len(self._running) >= MAX_REQUESTS:
            send(encode_error(request_id, InternalError("too many requests at a time")))
            return False
        call, handler = self.handlers[method]
        decoded = None if call.params is None else decode_as(call.params, params, method)
        task = self._tasks.create_task(self._handle(request_id, call, handler, decoded, send))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return True

    async def _handle(
        self,
        request_id: RequestId,
        call: Call[Any, Any],
        handler: Handler,
        params: Any,
        send: Callable[[bytes], None],
    ) -> None:
        try:
            answer = encode_result(request_id, encode(await handler(params)))
        except RpcError as error:
            answer = encode_error(request_id, error)
        except Exception:  # an edge: the server gets an answer in any case
            log.exception("the handler of %s failed", call.name)
            answer = encode_error(request_id, InternalError("the client failed"))
        send(answer)

    def cancel(self) -> None:
        """Cancel all handlers, except one that is the running task."""
        current = asyncio.current_task()
        for task in self._running:
            if task is not current:
                task.cancel()
