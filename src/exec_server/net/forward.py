"""Forwarding: each message stream is joined to a WebSocket of its own at a fixed destination.

Messages are not decoded, so sessions, processes and error answers are the destination's.
"""

from __future__ import annotations

import asyncio
import logging
import ssl

from exec_server.errors import ConnectFailed
from exec_server.host.event_loop import GuardedTasks
from exec_server.net.stream import MessageStream, ReceiverFactory
from exec_server.net.websocket.client import ClientSocket, connect

log = logging.getLogger(__name__)

# How long the destination may take to open a WebSocket; then the stream ends.
CONNECT_SECONDS = 10.0


def forwarder(url: str, tls: ssl.SSLContext | None, tasks: GuardedTasks) -> ReceiverFactory:
    """A factory of receivers that join streams to the destination; dials on `tasks`."""
    return lambda stream: _FromClient(stream, url, tls, tasks)


class _FromClient:
    """The receiver of a stream: passes its messages to the destination."""

    def __init__(
        self, stream: MessageStream, url: str, tls: ssl.SSLContext | None, tasks: GuardedTasks
    ) -> None:
        self._stream = stream
        self._socket: ClientSocket | None = None
        stream.pause_reading()  # until the destination is connected
        self._dialling = tasks.create_task(
            self._dial(url, tls), lambda: stream.close(0, "internal error")
        )

    async def _dial(self, url: str, tls: ssl.SSLContext | None) -> None:
        stream = self._stream
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                self._socket = await connect(url, lambda _: _FromDestination(stream), tls=tls)
        except (ConnectFailed, TimeoutError) as error:
            log.error("the destination cannot be reached: %s", str(error) or "timed out")
            stream.close(0, "the destination cannot be reached")
        else:
            stream.resume_reading()

    def message_received(self, message: bytes) -> None:
        assert self._socket is not None
        self._socket.send(message, is_text=False)

    def pause_writing(self) -> None:
        if self._socket is not None:
            self._socket.pause_reading()

    def resume_writing(self) -> None:
        if self._socket is not None:
            self._socket.resume_reading()

    def connection_lost(self) -> None:
        self._dialling.cancel()
        if self._socket is not None:
            self._socket.abort("the client is gone")


class _FromDestination:
    """The user of the destination's socket: passes its messages to the client."""

    def __init__(self, stream: MessageStream) -> None:
        self._stream = stream

    def message_received(self, message: bytes, *, is_text: bool) -> None:
        if message:
            self._stream.send(message)
        else:
            self._stream.close(0, "the destination sent an empty message")

    def pong_received(self) -> None:
        """No pings are sent to the destination."""

    def pause_writing(self) -> None:
        self._stream.pause_reading()

    def resume_writing(self) -> None:
        self._stream.resume_reading()

    def socket_lost(self, reason: str) -> None:
        self._stream.close(0, f"the destination hung up: {reason}")
