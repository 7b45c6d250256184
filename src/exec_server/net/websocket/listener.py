"""WebSocketListener: the listening sockets of a server and all their connections."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Sequence

from exec_server.host.event_loop import GuardedTasks, guarded_call
from exec_server.net.listen import BoundSocket
from exec_server.net.server_certificate import ServerCertificate
from exec_server.net.tls_acceptor import TlsAcceptor
from exec_server.net.websocket.server import GOING_AWAY, Settings, WebSocketStream

# How long peers may take to hang up when the server ends, which should be quick.
SHUTDOWN_GRACE_SECONDS = 0.25
# With the interval of `server.serve.SWEEP_SECONDS` less than the 10 s in which memory is returned.
_TICK_SECONDS = 3.0


class WebSocketListener:
    """Bound sockets and their connections, which share one set of limits."""

    def __init__(
        self,
        bound: Sequence[BoundSocket],
        settings: Settings,
        tasks: GuardedTasks,
        certificate: ServerCertificate | None = None,
    ) -> None:
        """`certificate` is for the sockets with TLS, `tasks` runs their handshakes."""
        self._bound = bound
        self._settings = settings
        self._tasks = tasks
        self._certificate = certificate
        self._streams: set[WebSocketStream] = set()
        self._servers: list[asyncio.Server | TlsAcceptor] = []
        self._has_ended = False  # a stream, since the last tick
        self._ticker: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        for bound in self._bound:
            if bound.is_tls:
                assert self._certificate is not None
                acceptor = TlsAcceptor(
                    bound.socket, self._certificate, self._make_stream, self._tasks
                )
                acceptor.open()
                self._servers.append(acceptor)
            elif bound.socket.family == socket.AF_UNIX:
                self._servers.append(
                    await loop.create_unix_server(self._make_stream, sock=bound.socket)
                )
            else:
                self._servers.append(await loop.create_server(self._make_stream, sock=bound.socket))
        self._tick()

    def _make_stream(self) -> WebSocketStream:
        stream = WebSocketStream(self._settings, self._streams)
        stream.closed.add_done_callback(self._note_end)
        return stream

    def _note_end(self, _: asyncio.Future[None]) -> None:
        self._has_ended = True

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for stream in list(self._streams):
            if not guarded_call(stream.tick, now):
                guarded_call(stream.abort, "internal error")
        if self._certificate is not None:
            self._collect_ended()
        self._ticker = loop.call_later(_TICK_SECONDS, self._tick)

    def _collect_ended(self) -> None:
        """Free the connections that have ended since the last tick.

        The objects of a TLS connection refer to each other and hold what was received last,
        megabytes of it; automatic collections are rare here (see `cli.serve.run`).
        """
        if self._has_ended:
            gc.collect()
        self._has_ended = False

    async def close(self) -> None:
        """Stop accepting, send all peers a close frame, and hang up."""
        if self._ticker is not None:
            self._ticker.cancel()
        for server in self._servers:
            server.close()
        for bound in self._bound:
            bound.remove_file()
        for stream in list(self._streams):
            guarded_call(stream.close, GOING_AWAY, "server is shutting down")
        closed = [stream.closed for stream in self._streams]
        if closed:
            await asyncio.wait(closed, timeout=SHUTDOWN_GRACE_SECONDS)
        for stream in list(self._streams):
            guarded_call(stream.abort, "server is shutting down")
