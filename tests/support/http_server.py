"""A server on loopback that answers with given bytes and records its requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

Answer = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True)
class Request:
    """A request, and the number of its connection."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes
    connection: int

    def header(self, name: str) -> str | None:
        return dict(self.headers).get(name)


@dataclass
class HttpServer:
    """Gives its answers in order, the last one again and again."""

    answers: list[Answer] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        try:
            while True:
                self.requests.append(await _read(reader, number))
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                if isinstance(answer, bytes):
                    writer.write(answer)
                else:
                    await answer(writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def _read(reader: asyncio.StreamReader, number: int) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
    headers = [
        (name.lower(), value.strip()) for name, _, value in (x.partition(":") for x in lines)
    ]
    size = int(dict(headers).get("content-length", "0"))
    return Request(first, headers, await reader.readexactly(size), number)


@contextlib.asynccontextmanager
async def serving(*answers: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[HttpServer]:
    """A server that is gone afterwards, with all its connections."""
    server = HttpServer(list(answers))
    handlers: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        try:
            await server.serve(reader, writer)
        except asyncio.CancelledError:
            pass  # the stream's own callback would complain about it
        finally:
            handlers.discard(task)

    listener = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)
    scheme = "http" if tls is None else "https"
    server.url = f"{scheme}://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        for task in list(handlers):
            task.cancel()
        if handlers:
            await asyncio.wait(handlers)


def answer(status: int, body: bytes | dict[str, Any] = b"", *headers: str) -> bytes:
    """A whole answer."""
    if isinstance(body, dict):
        body = json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} Reason", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


async def silence(writer: asyncio.StreamWriter) -> None:
    """Never answer."""
    await asyncio.get_running_loop().create_future()


async def hang_up(writer: asyncio.StreamWriter) -> None:
    """End the connection instead of an answer."""
    writer.close()
    await writer.wait_closed()
    raise ConnectionResetError
