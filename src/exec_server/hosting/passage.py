"""Forwarder: passes a client's connection on to the node that holds its executor.

The request is sent again as it came, and from then on bytes are copied both ways without looking.
Each direction stops when the other side does not take them: these are ordinary sockets with
ordinary back-pressure.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Final, cast

from exec_server.errors import ConnectFailed
from exec_server.hosting.http_messages import PASSED_ON, Request, rejection_answer
from exec_server.hosting.tickets import Rejection
from exec_server.net.client_tls import roots_for_http, tls_context
from exec_server.protocol.urls import Url

# Bytes of one direction that wait in this node. The kernel's buffers come on top.
UNSENT_BYTES: Final = 262_144
# Nodes of a site are close to each other; one that does not accept for so long counts as dead.
CONNECT_SECONDS: Final = 2.0


class Forwarder:
    """Two sockets, from the client to this node and from this node to the holder."""

    def __init__(self, forwarders: set[Forwarder]) -> None:
        self._forwarders = forwarders
        self._client = _Side(self)
        self._holder = _Side(self)
        self._client.other, self._holder.other = self._holder, self._client
        self._is_answered = False

    async def connect(self, url: Url, environ: dict[str, str], seconds: float) -> None:
        """Connect to the holder; raises ConnectFailed."""
        context: ssl.SSLContext | None = None
        loop = asyncio.get_running_loop()
        try:
            if url.secure:
                context = tls_context(roots_for_http(environ))
            async with asyncio.timeout(seconds):
                await loop.create_connection(lambda: self._holder, url.host, url.port, ssl=context)
        except (OSError, TimeoutError) as error:
            raise ConnectFailed(str(error) or type(error).__name__) from None
        assert self._holder.transport is not None
        self._holder.transport.pause_reading()

    def open(self, transport: asyncio.Transport, request: Request, first: bytes) -> None:
        """Pass on a client's request and all that follows."""
        holder = self._holder.transport
        self._client.transport = transport
        if holder is None or holder.is_closing():
            self.lost(self._holder)
            return
        self._forwarders.add(self)
        for one in (transport, holder):
            one.set_write_buffer_limits(UNSENT_BYTES, UNSENT_BYTES // 4)
        transport.pause_reading()
        transport.set_protocol(self._client)
        line, _, rest = request.head.partition(b"\r\n")
        holder.write(line + b"\r\n" + PASSED_ON.encode() + b": 1\r\n" + rest + first)
        transport.resume_reading()
        holder.resume_reading()

    def cancel(self) -> None:
        """The client has left."""
        if self._holder.transport is not None:
            self._holder.transport.abort()

    def answered(self) -> None:
        self._is_answered = True

    def lost(self, side: _Side) -> None:
        """One side has ended; so does the other one, after the bytes that it was sent."""
        self._forwarders.discard(self)
        client = self._client.transport
        if side is self._holder and client is not None and not self._is_answered:
            # Every request gets an answer.
            self._is_answered = True
            if not client.is_closing():
                client.write(rejection_answer(Rejection(503, "route_unavailable")).encode())
        other = cast(_Side, side.other).transport
        if other is not None and not other.is_closing():
            other.resume_reading()
            other.close()

    def close(self) -> None:
        """End both sides."""
        for side in (self._client, self._holder):
            if side.transport is not None:
                side.transport.close()

    @property
    def holder_protocol(self) -> asyncio.Protocol:
        return self._holder


class _Side(asyncio.Protocol):
    """One of the two sockets."""

    def __init__(self, forwarder: Forwarder) -> None:
        self._forwarder = forwarder
        self.other: _Side | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        assert self.other is not None
        if self is self._forwarder.holder_protocol:
            self._forwarder.answered()
        if self.other.transport is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        other = None if self.other is None else self.other.transport
        if other is not None and not other.is_closing():
            other.resume_reading()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._forwarder.lost(self)
