"""An HTTP balancer as it stands in front of a site: tries the next node, and answers 502 itself."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Iterator

import uvloop

_BAD_GATEWAY = b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_REQUEST_BYTES = 131_072


class Balancer:
    """Passes each connection on to one of its nodes, in turn; runs in a thread."""

    def __init__(self) -> None:
        self.nodes: list[int] = []  # ports of nodes; changed by tests at any time
        self.captured: list[bytes] | None = None  # all bytes in both directions, if a list
        self._open: set[asyncio.StreamWriter] = set()
        self.port = 0
        self._turn = itertools.count()
        self._loop = uvloop.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._end.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await task

    def start(self) -> None:
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def cut(self) -> None:
        """Abort all connections at once."""
        done = threading.Event()

        def abort() -> None:
            for writer in list(self._open):
                writer.transport.abort()
            done.set()

        self._loop.call_soon_threadsafe(abort)
        done.wait()

    def _capture(self, data: bytes) -> bytes:
        if self.captured is not None:
            self.captured.append(data)
        return data

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await self._balance(reader, writer)
        self._open.discard(writer)
        writer.close()

    async def _balance(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        for line in request.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                request += await reader.readexactly(min(int(line[15:]), _REQUEST_BYTES))
        self._capture(request)
        nodes = list(self.nodes)
        first = next(self._turn)
        for number in range(len(nodes)):
            port = nodes[(first + number) % len(nodes)]
            # Also for POST: a request without an answer is repeated on another node.
            with contextlib.suppress(OSError):
                node_reader, node_writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    node_writer.write(request)
                    answer = await node_reader.read(65_536)
                    if answer:
                        writer.write(self._capture(answer))
                        await self._copy_both(reader, writer, node_reader, node_writer)
                        return
                finally:
                    node_writer.close()
        writer.write(_BAD_GATEWAY)
        await writer.drain()

    async def _copy_both(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        node_reader: asyncio.StreamReader,
        node_writer: asyncio.StreamWriter,
    ) -> None:
        async with asyncio.TaskGroup() as tasks:
            ways = [
                tasks.create_task(self._copy(reader, node_writer)),
                tasks.create_task(self._copy(node_reader, writer)),
            ]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(262_144):
                writer.write(self._capture(data))
                await writer.drain()


@contextlib.contextmanager
def start_balancer() -> Iterator[Balancer]:
    balancer = Balancer()
    balancer.start()
    try:
        yield balancer
    finally:
        balancer.stop()
