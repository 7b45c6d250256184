"""A web server on loopback whose every byte the test decides; it records its requests."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.support.client import DEFAULT_TIMEOUT, scaled


@dataclass(frozen=True)
class Request:
    """A request; header names as they were written."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]


class Step:
    """Something that happens between the bytes of an answer."""

    def __init__(self, name: str) -> None:
        self.name = name


WAIT = Step("wait")  # until the test calls `go`
HANG_UP = Step("hang up")
WATCH = Step("watch")  # for the end of the connection, which the test can wait for

_STALL_SECONDS = 1.0


@dataclass
class Flood:
    """So many bytes; `stalled` when the peer has stopped taking them for a while."""

    size: int
    sent: int = 0
    stalled: threading.Event = field(default_factory=threading.Event)

    async def pour(self, writer: asyncio.StreamWriter) -> None:
        block = bytes(65_536)
        while self.sent < self.size:
            writer.write(block[: self.size - self.sent])
            self.sent += len(block[: self.size - self.sent])
            waiting = asyncio.get_running_loop().call_later(_STALL_SECONDS, self.stalled.set)
            try:
                await writer.drain()
            finally:
                waiting.cancel()


Answer = tuple[Any, ...]  # bytes, Steps and Floods


def reply(status: int, body: bytes = b"", *headers: str) -> bytes:
    """A whole answer with a length."""
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


class Origin:
    """Answers each path with its prepared answer, all others with 200 and `ok`."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.requests: list[Request] = []
        self.hung_up = threading.Event()  # by a peer that was watched
        self._came = threading.Event()
        self._answers: dict[str, Answer] = {}
        self._tls = tls
        self._ready = threading.Event()
        self._handlers: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    def on(self, path: str, *answer: Any) -> str:
        """Answer requests for this path so from now on; returns its URL."""
        self._answers[path] = answer
        return self.url + path

    def go(self) -> None:
        """Let the answers go on that wait."""
        self._loop.call_soon_threadsafe(self._go.set)

    def taken(self) -> list[Request]:
        """The requests since the last call."""
        requests, self.requests = self.requests, []
        return requests

    def wait_for_request(self) -> None:
        """Wait for the first request."""
        assert self._came.wait(scaled(DEFAULT_TIMEOUT))

    def open(self) -> None:
        self._thread.start()
        assert self._ready.wait(scaled(DEFAULT_TIMEOUT))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(scaled(DEFAULT_TIMEOUT))
        assert not self._thread.is_alive()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop, self._go = asyncio.Event(), asyncio.Event()
        listener = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = listener.sockets[0].getsockname()[1]
        self.url = f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"
        self._ready.set()
        await self._stop.wait()
        listener.close()
        for task in list(self._handlers):
            task.cancel()
        if self._handlers:
            await asyncio.wait(self._handlers)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, asyncio.CancelledError, OSError):
            pass  # it has hung up, or we have
        finally:
            self._handlers.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        request = await _read(reader)
        self.requests.append(request)
        self._came.set()
        path = request.line.split(" ")[1]
        for part in self._answers.get(path, (reply(200, b"ok"),)):
            if isinstance(part, bytes):
                writer.write(part)
                await writer.drain()
            elif isinstance(part, Flood):
                await part.pour(writer)
            elif part is WAIT:
                await self._go.wait()
            elif part is WATCH:
                await reader.read(1)
                self.hung_up.set()
            else:
                return False
        return True


async def _read(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    line, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
    headers = [(name, value[1:]) for name, _, value in (text.partition(":") for text in lines)]
    named = dict(headers)
    if named.get("transfer-encoding") == "chunked":
        body = b""
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    else:
        body = await reader.readexactly(int(named.get("content-length", "0")))
    return Request(line, headers, body)


@contextlib.contextmanager
def running(tls: ssl.SSLContext | None = None) -> Iterator[Origin]:
    """An origin that is gone afterwards, with all its connections."""
    origin = Origin(tls)
    origin.open()
    try:
        yield origin
    finally:
        origin.close()
