"""serve_http: an MCP server on streamable HTTP, for clients of this machine that have the token.

The SDK checks the headers Host and Origin, so that no page of a browser reaches it by a name of its
own, and gives each client a session with a random id. This module adds the token and the limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

from exec_server.adapters.target import framework_missing

try:
    import uvicorn
    from mcp.server.mcpserver import MCPServer
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise framework_missing("mcp", "mcp", error) from error

# A request, which holds at most the content of a file. A larger one is answered by 413.
BODY_BYTES: Final = 8 * 1_048_576
# Requests under way, each perhaps with such a body, and streams; beyond it 503.
MAX_REQUESTS: Final = 64
# Connections, also of clients without the token; beyond it 503.
MAX_CONNECTIONS: Final = 512
# Sessions of clients, most of which leave without a word; each ends after 30 minutes without a
# request.
MAX_SESSIONS: Final = 256
# For the head of a request, and for its body: a client of this machine sends both at once.
HEAD_SECONDS: Final = 10.0
BODY_SECONDS: Final = 30.0

Application = Callable[..., Awaitable[None]]


async def serve_http(
    server: MCPServer, listener: socket.socket, host: str, token: str, on_ready: Callable[[], None]
) -> None:
    """Serve clients that have the token at http://HOST:PORT/mcp, until it is cancelled."""
    app = server.streamable_http_app(
        host=host, max_request_body_size=BODY_BYTES, max_sessions=MAX_SESSIONS
    )
    config = uvicorn.Config(
        guarded(app, token),
        http=BoundedProtocol,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        lifespan="off",  # its end by cancellation would be reported as an error
    )

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # the command has its own

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            on_ready()

    serving = Server(config)
    async with server.session_manager.run(), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(serving.serve([listener]))
        try:
            await asyncio.wait([task])
        finally:
            serving.should_exit = serving.force_exit = True
            await asyncio.wait([task])


class BoundedProtocol(H11Protocol):
    """A connection that is closed if the head of a request does not arrive in time."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._deadline is None:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def guarded(app: Application, token: str) -> Application:
    """The ASGI application for requests with the bearer token, and no more than MAX_REQUESTS."""
    under_way = 0

    async def guard(scope: Any, receive: Any, send: Any) -> None:
        nonlocal under_way
        if not has_token(scope["headers"], token):
            await _refuse(send, 401, (b"www-authenticate", b"Bearer"))
            return
        if under_way >= MAX_REQUESTS:
            await _refuse(send, 503, (b"retry-after", b"1"))
            return
        under_way += 1
        try:
            await app(scope, _in_time(receive), send)
        finally:
            under_way -= 1

    return guard


def has_token(headers: list[tuple[bytes, bytes]], token: str) -> bool:
    """Whether the headers have exactly one Authorization, and that is the bearer token."""
    values = [value for name, value in headers if name.lower() == b"authorization"]
    scheme, _, sent = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
    return scheme.lower() == b"bearer" and hmac.compare_digest(sent.strip(), token.encode())


def _in_time(receive: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any]]:
    """`receive` for a body that arrives within BODY_SECONDS; then it waits for a disconnect."""
    deadline: float | None = asyncio.get_running_loop().time() + BODY_SECONDS

    async def receive_in_time() -> Any:
        nonlocal deadline
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            return {"type": "http.disconnect"}
        if not message.get("more_body"):
            deadline = None
        return message

    return receive_in_time


async def _refuse(send: Any, status: int, header: tuple[bytes, bytes]) -> None:
    headers = [header, (b"content-length", b"0")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
