"""ServerRequests: the requests of a server to this client, and their handlers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from msgspec import Raw

from exec_server.client.engine.messages import decode_as, encode
from exec_server.errors import InternalError, MethodNotFound, RpcError
from exec_server.protocol.decoding import Call
from exec_server.protocol.jsonrpc import RequestId, encode_error, encode_result

log = logging.getLogger(__name__)

# Requests of the server that are being handled: the reference allows as many. Further ones are
# refused.
MAX_REQUESTS: Final = 256

Handler = Callable[[Any], Awaitable[Any]]


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
