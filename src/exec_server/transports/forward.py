"""Forwarding: each message stream is joined to a WebSocket of its own at a fixed destination.

Nothing is looked at on the way, so sessions, processes and mistakes are the destination's.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable

from exec_server.errors import ConnectFailed
from exec_server.rpc.stream import MessageReceiver, MessageStream
from exec_server.transports.client_socket import ClientSocket, connect

log = logging.getLogger(__name__)

# How long the destination may take to open a WebSocket; then the stream ends.
CONNECT_SECONDS = 10.0


def forwarder(
    url: str, tls: ssl.SSLContext | None, tasks: asyncio.TaskGroup
) -> Callable[[MessageStream], MessageReceiver]:
    """Makes what joins a stream to the destination; dials on `tasks`."""
    return lambda stream: _FromClient(stream, url, tls, tasks)


class _FromClient:
    """The receiver of a stream: passes its messages on."""

    def __init__(
        self, stream: MessageStream, url: str, tls: ssl.SSLContext | None, tasks: asyncio.TaskGroup
    ) -> None:
        self._stream = stream
        self._socket: ClientSocket | None = None
        stream.hold(receiving=False)  # until there is somebody to pass it on to
        self._dialling = tasks.create_task(self._dial(url, tls))

    async def _dial(self, url: str, tls: ssl.SSLContext | None) -> None:
        stream = self._stream
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                self._socket = await connect(url, lambda _: _FromDestination(stream), tls=tls)
        except (ConnectFailed, TimeoutError) as error:
            log.error("the destination cannot be reached: %s", str(error) or "timed out")
            stream.close(0, "the destination cannot be reached")
        else:
            stream.hold(receiving=True)

    def message_received(self, message: bytes) -> None:
        assert self._socket is not None
        self._socket.send(message, is_text=False)

    def sending_slow(self) -> None:
        if self._socket is not None:
            self._socket.hold(receiving=False)

    def sending_ready(self) -> None:
        if self._socket is not None:
            self._socket.hold(receiving=True)

    def link_lost(self) -> None:
        self._dialling.cancel()
        if self._socket is not None:
            self._socket.abort("the client is gone")


class _FromDestination:
    """The user of a socket: passes its messages back."""

    def __init__(self, stream: MessageStream) -> None:
        self._stream = stream

    def message_received(self, message: bytes, *, is_text: bool) -> None:
        if message:
            self._stream.send(message)
        else:
            self._stream.close(0, "the destination sent an empty message")

    def pong_received(self) -> None:
        """We send no pings."""

    def sending_slow(self) -> None:
        self._stream.hold(receiving=False)

    def sending_ready(self) -> None:
        self._stream.hold(receiving=True)

    def socket_lost(self, reason: str) -> None:
        self._stream.close(0, f"the destination hung up: {reason}")
