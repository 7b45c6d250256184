"""A forwarder that resets its connections in mid message, and an HTTP server to ask for bytes."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from random import Random

from soak.accounting import seeded_bytes

_READ_BYTES = 16_384


class Cutter:
    """Forwards connections to a server; resets the first ones after a random number of bytes."""

    def __init__(self, host: str, port: int, random: Random, cuts: int) -> None:
        self._target = host, port
        self._random = random
        self._cuts_left = cuts
        self.cuts = 0
        self.url = ""
        self._tasks: set[asyncio.Task[None]] = set()

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection until it ends or is cut."""
        own = asyncio.current_task()
        assert own is not None
        self._tasks.add(own)
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            budget = None
            if self._cuts_left:
                self._cuts_left -= 1
                # Beyond the handshake, whose loss a client reports instead of hiding it.
                budget = self._random.randint(3_000, 400_000)
            limit = _Budget(budget)
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(_carry(reader, far_writer, limit))
                    tasks.create_task(_carry(far_reader, writer, limit))
            except* (_Ended, OSError):
                pass
            self.cuts += limit.is_spent
            for each in (writer, far_writer):
                _reset(each)
        except (OSError, asyncio.CancelledError):
            _reset(writer)
        finally:
            self._tasks.discard(own)

    async def close(self) -> None:
        """End all connections."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


class _Ended(Exception):
    """One direction of a connection has ended, so the other one ends too."""


class _Budget:
    """Bytes that both directions of a connection may carry together; None: any number."""

    def __init__(self, left: int | None) -> None:
        self._left = left
        self.is_spent = False

    def take(self, count: int) -> int:
        """The number of these bytes that may be carried."""
        if self._left is None:
            return count
        taken = min(count, self._left)
        self._left -= taken
        self.is_spent = taken < count
        return taken


async def _carry(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: _Budget
) -> None:
    while data := await reader.read(_READ_BYTES):
        writer.write(data[: limit.take(len(data))])
        if limit.is_spent:
            break
        await writer.drain()
    raise _Ended


def _reset(writer: asyncio.StreamWriter) -> None:
    opened: socket.socket | None = writer.get_extra_info("socket")
    if opened is not None and opened.fileno() >= 0:
        with contextlib.suppress(OSError):
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextlib.asynccontextmanager
async def cutting(host: str, port: int, random: Random, cuts: int) -> AsyncIterator[Cutter]:
    """A forwarder during the block."""
    cutter = Cutter(host, port, random, cuts)
    listener = await asyncio.start_server(cutter.forward, "127.0.0.1", 0)
    cutter.url = f"ws://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield cutter
    finally:
        listener.close()
        await cutter.close()


@contextlib.asynccontextmanager
async def http_origin() -> AsyncIterator[str]:
    """An HTTP server: GET /length/SEED/SIZE, /chunked/SEED/SIZE, /cut/SEED/SIZE; gives its URL."""
    handlers: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own = asyncio.current_task()
        assert own is not None
        handlers.add(own)
        try:
            while True:
                await _answer(reader, writer)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, OSError):
            pass
        finally:
            handlers.discard(own)
            writer.close()

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        for task in list(handlers):
            task.cancel()
        if handlers:
            await asyncio.wait(handlers)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    _, form, seed, size = head.split(b" ", 2)[1].decode().split("/")
    body = seeded_bytes(int(seed), int(size))
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\n")
    if form == "chunked":
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        for start in range(0, len(body), 10_000):
            piece = body[start : start + 10_000]
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
    else:
        writer.write(b"content-length: %d\r\n\r\n" % len(body))
        writer.write(body if form == "length" else body[: len(body) // 2])
    await writer.drain()
    if form == "cut":
        _reset(writer)
        raise ConnectionResetError
