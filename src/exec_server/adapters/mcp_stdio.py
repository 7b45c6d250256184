"""serve_stdio: an MCP server on lines of JSON, with limits for its client.

The transport of the SDK drops a line that it cannot parse, so that a client waits forever for the
answer to a request with a lone surrogate. It also starts every request at once, and writes in a
thread that a signal cannot end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from exec_server.adapters.target import framework_missing
from exec_server.errors import ProtocolError

try:
    import anyio
    from mcp.server.mcpserver import MCPServer
    from mcp.shared.message import SessionMessage
    from mcp_types import (
        INVALID_REQUEST,
        PARSE_ERROR,
        ErrorData,
        JSONRPCError,
        JSONRPCNotification,
        JSONRPCRequest,
        JSONRPCResponse,
        jsonrpc_message_adapter,
    )
except ImportError as error:
    raise framework_missing("mcp", "mcp", error) from error

# Requests under way: more than any client makes. Further ones are refused.
MAX_REQUESTS: Final = 64
# Bytes of all requests under way; two of the largest fit.
REQUEST_BYTES: Final = 32 * 1_048_576
# For the last answers, after the client has closed its end: it may not read them.
LAST_ANSWERS_SECONDS: Final = 1.0
# A code of the range that JSON-RPC leaves to servers.
TOO_MANY_REQUESTS: Final = -32_000

Write = Callable[[bytes], Awaitable[None]]


async def serve_stdio(server: MCPServer, lines: AsyncIterator[str], write: Write) -> None:
    """Serve a client until it leaves; raises ProtocolError if a line is not acceptable."""
    await _Transport(server, lines, write).run()


class _Transport:
    def __init__(self, server: MCPServer, lines: AsyncIterator[str], write: Write) -> None:
        self._server = server._lowlevel_server
        self._lines = lines
        self._write = write
        self._requests: dict[str, int] = {}  # under way, with their sizes
        self._failure: ProtocolError | None = None
        streams: Any = anyio.create_memory_object_stream
        self._to_server, self._received = streams(0)
        self._from_server, self._to_send = streams(0)

    async def run(self) -> None:
        options = self._server.create_initialization_options()
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._read(self._from_server.clone()))
            writing = tasks.create_task(self._send())
            writing.add_done_callback(lambda _: reading.cancel())
            await self._server.run(self._received, self._from_server, options)
            reading.cancel()
            await asyncio.wait([writing], timeout=LAST_ANSWERS_SECONDS)
            writing.cancel()
        if self._failure is not None:
            raise self._failure

    async def _read(self, refusals: Any) -> None:
        """Pass messages of the client to the server, and refuse those that it must not get."""
        async with self._to_server, refusals:
            try:
                async for line in self._lines:
                    message, refusal = self._admit(line)
                    if message is not None:
                        await self._to_server.send(SessionMessage(message))
                    elif refusal is not None:
                        await refusals.send(SessionMessage(refusal))
            except ProtocolError as error:
                self._failure = error
            except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                pass  # the server has ended

    def _admit(self, line: str) -> tuple[Any, JSONRPCError | None]:
        """The message of a line, or the answer of a request that is refused, or neither."""
        try:
            message = jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValueError:
            return None, _refusal_of(line)
        if isinstance(message, JSONRPCNotification):
            if message.method == "notifications/cancelled":  # it gets no answer
                self._requests.pop(str((message.params or {}).get("requestId")), None)
        elif isinstance(message, JSONRPCRequest):
            key = str(message.id)
            if key in self._requests:
                text = "a request with this id is under way"
                return None, _error(message.id, INVALID_REQUEST, text)
            size = sum(self._requests.values()) + len(line)
            if len(self._requests) >= MAX_REQUESTS or size > REQUEST_BYTES:
                text = "too many requests are under way: wait for an answer"
                return None, _error(message.id, TOO_MANY_REQUESTS, text)
            self._requests[key] = len(line)
        return message, None

    async def _send(self) -> None:
        """Write the messages of the server, until it ends or the client no longer reads."""
        with contextlib.suppress(OSError):
            async for item in self._to_send:
                message = item.message
                if isinstance(message, JSONRPCResponse | JSONRPCError):
                    self._requests.pop(str(message.id), None)
                text = message.model_dump_json(by_alias=True, exclude_unset=True)
                await self._write(text.encode() + b"\n")


def _refusal_of(line: str) -> JSONRPCError | None:
    """The answer to a line that is no message; none if it would be one to an answer."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return _error(None, PARSE_ERROR, "the line is not JSON in UTF-8")
    if not isinstance(value, dict):
        return _error(None, INVALID_REQUEST, "the line is no JSON object")
    if "method" not in value:
        return None
    found = value.get("id")
    is_id = isinstance(found, str | int) and not isinstance(found, bool) and str(found).isascii()
    text = "the request is not valid: its id, its method, its params, or a lone surrogate in a text"
    return _error(found if is_id else None, INVALID_REQUEST, text)


def _error(request_id: Any, code: int, text: str) -> JSONRPCError:
    return JSONRPCError(jsonrpc="2.0", id=request_id, error=ErrorData(code=code, message=text))
