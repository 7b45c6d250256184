"""Connected pairs of `proxy.stream.TransportStream` without a socket."""

from __future__ import annotations

import asyncio
from typing import Any

from exec_server.proxy.stream import TransportStream


class MemoryTransport(asyncio.Transport):
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
    transports = [MemoryTransport(), MemoryTransport()]
    streams = []
    for index, (reader, transport) in enumerate(zip(readers, transports, strict=True)):
        transport.other = readers[1 - index]
        protocol = asyncio.StreamReaderProtocol(reader)
        streams.append(
            TransportStream(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
        )
    return streams[0], streams[1]
