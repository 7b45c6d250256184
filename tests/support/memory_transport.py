"""Asyncio transports in memory: one whose peer is the test, and connected pairs of streams."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, cast

from exec_server.proxy.stream import TransportStream


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
