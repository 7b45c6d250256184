"""A TCP proxy in a thread of its own, which can be cut while an adapter uses it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit


class Proxy:
    """Passes bytes on to a server until it is cut; then it refuses connections, until `mend`."""

    def __init__(self, url: str) -> None:
        self._place = urlsplit(url)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._ends: set[asyncio.StreamWriter] = set()
        self._is_open = True
        self._cuts_next = False
        self.url = ""

    @contextlib.contextmanager
    def running(self) -> Iterator[Proxy]:
        thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        thread.start()
        self._ready.wait()
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._stop.set)
            thread.join()
            self._loop.close()

    def cut(self) -> None:
        """Reset all connections now, and refuse new ones."""
        self._loop.call_soon_threadsafe(self._cut)

    def cut_next(self) -> None:
        """Do so when the client sends its next message."""
        self._cuts_next = True

    def mend(self) -> None:
        """Accept connections again."""
        self._cuts_next = False
        self._is_open = True

    def _cut(self) -> None:
        self._is_open = False
        for end in tuple(self._ends):
            end.transport.abort()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        self._cut()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._is_open:
            writer.transport.abort()
            return
        place = self._place
        far_reader, far_writer = await asyncio.open_connection(place.hostname, place.port)
        ends = {writer, far_writer}
        self._ends |= ends
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pass_on(reader, far_writer, is_request=True))
            tasks.create_task(self._pass_on(far_reader, writer, is_request=False))
        self._ends -= ends

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_request: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                if is_request and self._cuts_next:
                    self._cut()
                    return
                writer.write(data)
                await writer.drain()
        writer.close()
