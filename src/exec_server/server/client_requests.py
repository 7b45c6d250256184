"""ClientRequests: the requests of the server to one client, until they are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import msgspec

from exec_server.protocol import jsonrpc
from exec_server.protocol.decoding import Call

# Requests under way to one client, as in the reference. A further one is not made, and counts as
# unanswered.
MAX_CLIENT_REQUESTS: Final = 256


class ClientRequests:
    """The requests under way to one client, by their ids, which count from 1."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._last_id = 0
        self._open: dict[int, asyncio.Future[object]] = {}
        self._is_closed = False

    def ask(self, call: Call[Any, Any], params: msgspec.Struct) -> asyncio.Future[object]:
        """Send a request; the future has the `result` of the response, or None without one.

        Cancel the future to ignore a later response.
        """
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

    def answer(self, response: jsonrpc.Response) -> bool:
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
