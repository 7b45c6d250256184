"""WebSocket ends in memory: a server with its receivers, and a client with its listener."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import uvloop

from exec_server.host.event_loop import GuardedTasks
from exec_server.net.listen import BoundSocket, TcpAddress
from exec_server.net.stream import MessageStream
from exec_server.net.websocket.client import ClientSocket, connect
from exec_server.net.websocket.frames import Event, FrameReader, Opcode, close_payload
from exec_server.net.websocket.server import WebSocketListener, WebSocketSettings, WebSocketStream
from tests.support.memory_transport import MemoryTransport
from tests.support.raw_links import DEFAULT_TIMEOUT, frame_bytes, scaled
from tests.support.raw_servers import open_sockets

UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
MIB = 1_048_576


class Receiver:
    """Writes down what a stream brings."""

    def __init__(self, stream: MessageStream) -> None:
        self.stream = stream
        self.seen: list[Any] = []
        self.replies: list[bytes] = []  # sent back, one for each message

    def message_received(self, message: bytes) -> None:
        self.seen.append(message)
        if self.replies:
            self.stream.send(self.replies.pop(0))

    def pause_writing(self) -> None:
        self.seen.append("pause")

    def resume_writing(self) -> None:
        self.seen.append("resume")

    def connection_lost(self) -> None:
        self.seen.append("lost")


class Server:
    """Connections that share settings, as those of a listener do."""

    def __init__(self) -> None:
        self.receivers: list[Receiver] = []
        self.settings = WebSocketSettings(self._make_receiver)
        self.streams: set[WebSocketStream] = set()

    def _make_receiver(self, stream: MessageStream) -> Receiver:
        self.receivers.append(Receiver(stream))
        return self.receivers[-1]

    def accept(self, **options: Any) -> tuple[WebSocketStream, MemoryTransport]:
        stream = WebSocketStream(self.settings, self.streams)
        return stream, MemoryTransport(stream, **options)

    def open(self) -> Connection:
        """An upgraded connection."""
        stream, transport = self.accept()
        transport.receive(UPGRADE)
        assert transport.take_written().startswith(b"HTTP/1.1 101 ")
        return Connection(stream, transport, self.receivers[-1])


class Connection:
    """A stream with its transport and its receiver."""

    def __init__(
        self, stream: WebSocketStream, transport: MemoryTransport, receiver: Receiver
    ) -> None:
        self.stream = stream
        self.transport = transport
        self.receiver = receiver
        self._frames = FrameReader(from_client=False)

    def receive(self, opcode: Opcode, payload: bytes = b"", *, fin: bool = True) -> None:
        self.transport.receive(frame_bytes(opcode, payload, fin=fin))

    def events(self) -> list[Event]:
        """The messages and control frames written since the last call."""
        self._frames.feed(self.transport.take_written())
        events = []
        while (event := self._frames.next_event()) is not None:
            events.append(event)
        return events


def text_event(message: bytes) -> Event:
    return Event(Opcode.TEXT, message)


def close_event(code: int, reason: str = "") -> Event:
    return Event(Opcode.CLOSE, close_payload(code, reason))


def large_frame(size: int = 2 * MIB) -> bytes:
    """A text message that needs a part of the budget."""
    return frame_bytes(Opcode.TEXT, b"x" * size)


# A WebSocket client in tests: its user, a listener that echoes, and a run without leaks.


class User:
    """Writes down what happens, and lets a test wait for it."""

    def __init__(self, opened: ClientSocket) -> None:
        self.socket = opened
        self.seen: list[tuple[Any, ...]] = []
        self._news = asyncio.Event()

    def _note(self, *what: Any) -> None:
        self.seen.append(what)
        self._news.set()

    def message_received(self, message: bytes, *, is_text: bool) -> None:
        self._note("text" if is_text else "binary", message)

    def pong_received(self) -> None:
        self._note("pong")

    def pause_writing(self) -> None:
        self._note("slow")

    def resume_writing(self) -> None:
        self._note("ready")

    def socket_lost(self, reason: str) -> None:
        self._note("lost", reason)

    async def until(self, kind: str, count: int = 1) -> list[tuple[Any, ...]]:
        """Everything seen, once there are so many of a kind."""
        async with asyncio.timeout(scaled(DEFAULT_TIMEOUT)):
            while sum(what[0] == kind for what in self.seen) < count:
                self._news.clear()
                await self._news.wait()
        return self.seen


def run_checked(body: Callable[[], Awaitable[None]]) -> None:
    """Run a test and see that it leaves no socket open."""

    async def checked() -> None:
        before = open_sockets()
        async with asyncio.timeout(scaled(2 * DEFAULT_TIMEOUT)):
            await body()
            while open_sockets() > before:
                await asyncio.sleep(0)

    uvloop.run(checked())


async def open_client(port: int, target: str = "/relay?role=test", **options: Any) -> User:
    users: list[User] = []

    def make_user(opened: ClientSocket) -> User:
        users.append(User(opened))
        return users[0]

    opened = await connect(f"ws://127.0.0.1:{port}{target}", make_user, **options)
    assert opened is users[0].socket
    assert users[0].seen == []
    return users[0]


async def end_client(user: User) -> None:
    user.socket.close(1000, "")
    await user.socket.closed
    await user.until("lost")


class Echo:
    """The receiver of a listener that sends everything back."""

    def __init__(self, stream: MessageStream) -> None:
        self._stream = stream

    def message_received(self, message: bytes) -> None:
        self._stream.send(message)

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def connection_lost(self) -> None: ...


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[int]:
    bound = BoundSocket(TcpAddress("ws", "127.0.0.1", 0))
    async with asyncio.TaskGroup() as tasks:
        listener = WebSocketListener([bound], WebSocketSettings(Echo), GuardedTasks(tasks))
        await listener.open()
        try:
            yield bound.socket.getsockname()[1]
        finally:
            await listener.close()
