"""Stream: both directions of one proxy connection: `SocketStream`, and with TLS `TransportStream`.

A SocketStream has no event loop transport: a proxy forwards at once, so its buffers gain nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from typing import Final, Protocol

from exec_server.net.socket_options import reset_on_close

# Bytes that are read at once, and so the most that a connection buffers in each direction. It is
# not read while they wait for the other end.
BUFFER_BYTES: Final = 262_144
_CLOSED: Final = "the connection was closed"


class Stream(Protocol):
    """Both directions of a connection; one task receives, and one sends."""

    async def receive(self, limit: int = BUFFER_BYTES) -> bytes:
        """The next bytes, at most so many; empty at the end. Raises OSError."""

    async def send(self, data: bytes) -> None:
        """Send all bytes; waits while the other end does not read. Raises OSError."""

    @property
    def local_address(self) -> tuple[str, int]:
        """The address and port of this end."""

    @property
    def is_closed(self) -> bool:
        """Whether `close` or `abort` was called."""

    def write_eof(self) -> None:
        """End the direction in which bytes are sent."""

    def close(self) -> None:
        """Close both directions; bytes that were sent still arrive."""

    def abort(self) -> None:
        """Close both directions so that the other end sees an error."""


class SocketStream:
    """A stream over a connected socket, which it owns."""

    def __init__(self, sock: socket.socket) -> None:
        """In the event loop; the socket does not block."""
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._is_watched = False  # the loop calls `_wake_reader`
        self._has_waited = True  # before the last bytes, or there were none yet
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    @classmethod
    async def connect(cls, address: str, port: int) -> SocketStream:
        """A connection to a numeric address; raises OSError."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        stream = cls(sock)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = sock.connect_ex((address, port))
            if code == errno.EINPROGRESS:
                stream._watch()  # before the writer: changing what is watched costs less
                await stream._writable()
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
        except BaseException:
            stream.close()
            raise
        return stream

    async def receive(self, limit: int = BUFFER_BYTES) -> bytes:
        if not self._has_waited:
            # A busy connection must not keep the event loop from the others.
            await asyncio.sleep(0)
        self._has_waited = False
        while True:
            # Always before waiting: a reset that has come with the last bytes is not told again.
            try:
                return self._socket.recv(limit)
            except BlockingIOError:
                await self._readable()
                self._has_waited = True

    async def _readable(self) -> None:
        self._watch()
        self._reader = self._loop.create_future()
        await self._reader

    def _watch(self) -> None:
        if not self._is_watched:
            self._check_open()
            self._loop.add_reader(self._socket, self._wake_reader)
            self._is_watched = True

    def _wake_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is None or reader.done():
            # Nothing reads now. The socket is watched until this happens, because the next read
            # mostly follows at once, and each change costs a system call.
            self._loop.remove_reader(self._socket)
            self._is_watched = False
        else:
            reader.set_result(None)

    async def send(self, data: bytes) -> None:
        try:
            count = self._socket.send(data)
        except BlockingIOError:
            count = 0
        rest = memoryview(data)[count:]
        while rest:
            await self._writable()
            with contextlib.suppress(BlockingIOError):
                rest = rest[self._socket.send(rest) :]

    async def _writable(self) -> None:
        self._check_open()
        self._writer = self._loop.create_future()
        self._loop.add_writer(self._socket, self._wake_writer)
        await self._writer

    def _wake_writer(self) -> None:
        self._loop.remove_writer(self._socket)
        writer, self._writer = self._writer, None
        if writer is not None and not writer.done():
            writer.set_result(None)

    def write_eof(self) -> None:
        with contextlib.suppress(OSError):  # the other end has reset the connection
            self._socket.shutdown(socket.SHUT_WR)

    @property
    def local_address(self) -> tuple[str, int]:
        address, port, *_ = self._socket.getsockname()
        return address, port

    @property
    def is_closed(self) -> bool:
        return self._socket.fileno() < 0

    def detach(self) -> socket.socket:
        """The socket for another owner; nothing may be waiting for it."""
        self._unwatch()
        return socket.socket(fileno=self._socket.detach())

    def close(self) -> None:
        if self.is_closed:
            return
        self._unwatch()
        self._socket.close()
        for waiter in (self._reader, self._writer):
            if waiter is not None and not waiter.done():
                waiter.set_exception(ConnectionAbortedError(_CLOSED))

    def abort(self) -> None:
        if not self.is_closed:
            reset_on_close(self._socket)
        self.close()

    def _check_open(self) -> None:
        if self.is_closed:
            raise ConnectionAbortedError(_CLOSED)

    def _unwatch(self) -> None:
        if self._is_watched:
            self._loop.remove_reader(self._socket)
            self._is_watched = False
        if self._writer is not None:
            self._loop.remove_writer(self._socket)


class TransportStream:
    """A stream over a transport of the event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def receive(self, limit: int = BUFFER_BYTES) -> bytes:
        return await self.reader.read(limit)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    @property
    def local_address(self) -> tuple[str, int]:
        address, port, *_ = self.writer.get_extra_info("sockname")
        return address, port

    @property
    def is_closed(self) -> bool:
        return self.writer.transport.is_closing()

    def write_eof(self) -> None:
        if self.writer.can_write_eof() and not self.is_closed:
            self.writer.write_eof()

    def close(self) -> None:
        self.writer.close()

    def abort(self) -> None:
        self.writer.transport.abort()


async def carry(inner: Stream, outer: Stream, early: bytes = b"") -> None:
    """Carry bytes both ways until both have ended; `early` are bytes that the inner one has sent.

    The end of one direction leaves the other one open. An error resets both.
    """
    is_whole = False
    try:
        if early:
            await outer.send(early)
        async with asyncio.TaskGroup() as pumps:
            pumps.create_task(_pump(inner, outer))
            await _pump(outer, inner)
        is_whole = True
    except* OSError:
        pass
    finally:
        for stream in (inner, outer):
            if is_whole:
                stream.close()
            else:
                stream.abort()


async def _pump(source: Stream, target: Stream) -> None:
    while data := await source.receive():
        await target.send(data)
    target.write_eof()
