"""Asyncio transports in memory: one whose peer is the test, and connected pairs of streams.

Also both relays of bytes between two sockets, which a test and a benchmark compare.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any, cast

from exec_server.hosting.http_messages import ServiceRequest
from exec_server.hosting.rendezvous import Forwarder
from exec_server.protocol.urls import parse_url
from exec_server.proxy.stream import TransportStream, carry


class _Socket:
    """The socket of a transport that has none; its descriptor makes writers use the transport."""

    def __init__(self, family: int, peer_user: int) -> None:
        self.family = family
        self.options: list[tuple[int, ...]] = []
        self.peer_user = peer_user

    def fileno(self) -> int:
        return -1

    def getsockopt(self, *option: int) -> bytes:
        assert option[:2] == (socket.SOL_SOCKET, socket.SO_PEERCRED)
        return struct.pack("3I", 1, self.peer_user, 0)

    def setsockopt(self, *option: int) -> None:
        self.options.append(option)


class MemoryTransport(asyncio.Transport):
    """Records the writes of its protocol; `receive` and `lose` are the peer's actions."""

    def __init__(
        self,
        protocol: asyncio.BaseProtocol,
        family: int = socket.AF_INET,
        peer: object = None,
        *,
        peer_user: int = 0,
        is_tls: bool = False,
    ) -> None:
        self.socket = _Socket(family, peer_user)
        tls = {"ssl_object": object()} if is_tls else {}
        super().__init__({"socket": self.socket, "peername": peer, **tls})
        self._is_tls = is_tls
        self._protocol = protocol
        self.written = b""
        self.buffered = 0  # bytes that the peer has not read; set by the test
        self.is_reading_paused = False
        self.has_written_eof = False
        self.is_aborted = False
        self._is_closing = False
        cast(Any, protocol).connection_made(self)

    # ---- the protocol's side ----------------------------------------------------------

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.has_written_eof
        self.written += bytes(data)

    def can_write_eof(self) -> bool:
        return not self._is_tls

    def write_eof(self) -> None:
        assert not self._is_tls
        self.has_written_eof = True

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.limits = (high, low)

    def pause_reading(self) -> None:
        self.is_reading_paused = True

    def resume_reading(self) -> None:
        self.is_reading_paused = False

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    def abort(self) -> None:
        self._is_closing = True
        self.is_aborted = True

    # ---- the peer's side --------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Let the peer send bytes, as the event loop would deliver them."""
        assert not self.is_reading_paused
        if not isinstance(self._protocol, asyncio.BufferedProtocol):
            cast(asyncio.Protocol, self._protocol).data_received(data)
            return
        while data and isinstance(self._protocol, asyncio.BufferedProtocol):
            buffer = memoryview(self._protocol.get_buffer(-1))
            count = min(len(buffer), len(data))
            buffer[:count] = data[:count]
            data = data[count:]
            self._protocol.buffer_updated(count)
        if data:
            self.receive(data)

    def take_written(self) -> bytes:
        """The bytes written since the last call."""
        written, self.written = self.written, b""
        return written

    def eof(self) -> None:
        if not cast(Any, self._protocol).eof_received():
            self.close()

    def lose(self, error: Exception | None = None) -> None:
        """The connection is gone."""
        self._is_closing = True
        cast(Any, self._protocol).connection_lost(error)


class PipeTransport(asyncio.Transport):
    """Writes into the reader of the other end."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 5), "sockname": ("127.0.0.1", 6)})
        self.other: asyncio.StreamReader | None = None
        self._is_closing = False
        self._has_eof = False

    def write(self, data: Any) -> None:
        assert self.other is not None
        if self._is_closing:
            return
        self.other.feed_data(bytes(data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        assert self.other is not None
        if not self._has_eof and not self._is_closing:
            self._has_eof = True
            self.other.feed_eof()

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self.write_eof()
        self._is_closing = True

    abort = close

    def is_reading(self) -> bool:
        return True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def stream_pair() -> tuple[TransportStream, TransportStream]:
    """Two ends of a connection; in a running event loop."""
    loop = asyncio.get_running_loop()
    readers = [asyncio.StreamReader(), asyncio.StreamReader()]
    transports = [PipeTransport(), PipeTransport()]
    streams = []
    for index, (reader, transport) in enumerate(zip(readers, transports, strict=True)):
        transport.other = readers[1 - index]
        protocol = asyncio.StreamReaderProtocol(reader)
        streams.append(
            TransportStream(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
        )
    return streams[0], streams[1]


# Starts a relay in the running loop, and returns the sockets at its two ends.
StartRelay = Callable[[], Awaitable[tuple[socket.socket, socket.socket]]]
_HEAD = b"GET / HTTP/1.1\r\nhost: h\r\n\r\n"
_carrying: set[asyncio.Task[None]] = set()


def _small_buffers(sock: socket.socket) -> socket.socket:
    _set_buffers(sock)
    sock.setblocking(False)
    return sock


def _set_buffers(sock: socket.socket) -> None:
    """Make them small: the kernel would take megabytes before a relay has to wait."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, 65_536)


async def start_forwarder() -> tuple[socket.socket, socket.socket]:
    """A Forwarder of the registry between a client and a holder."""
    loop = asyncio.get_running_loop()
    client, inner = map(_small_buffers, socket.socketpair())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        forwarder = Forwarder(set())
        url = parse_url(f"http://127.0.0.1:{listener.getsockname()[1]}", frozenset({"http"}))
        await forwarder.connect(url, {}, 10)
        outer = cast(asyncio.Transport, forwarder._holder.transport).get_extra_info("socket")
        _set_buffers(outer)
        holder = _small_buffers((await loop.sock_accept(listener))[0])
    transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, inner)
    forwarder.open(transport, ServiceRequest("GET", "/", "", {}, head=_HEAD), b"")
    await _skip_head(holder)
    return client, holder


async def start_carry() -> tuple[socket.socket, socket.socket]:
    """The tunnel of the network proxy, over the same kind of transports."""
    client, inner = map(_small_buffers, socket.socketpair())
    outer, holder = map(_small_buffers, socket.socketpair())
    streams = [TransportStream(*await asyncio.open_connection(sock=one)) for one in (inner, outer)]
    task = asyncio.get_running_loop().create_task(carry(streams[0], streams[1], _HEAD))
    _carrying.add(task)
    task.add_done_callback(_carrying.discard)
    await _skip_head(holder)
    return client, holder


async def _skip_head(holder: socket.socket) -> None:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += await asyncio.get_running_loop().sock_recv(holder, 1)


BYTE_RELAYS: dict[str, StartRelay] = {"forwarder": start_forwarder, "carry": start_carry}
