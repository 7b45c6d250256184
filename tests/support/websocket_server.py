"""A WebSocket server over transports in memory: its connections and their receivers."""

from __future__ import annotations

from typing import Any

from exec_server.net.stream import MessageStream
from exec_server.net.websocket.frames import (
    Event,
    FrameReader,
    Opcode,
    close_payload,
)
from exec_server.net.websocket.server import (
    Settings,
    WebSocketStream,
)
from tests.support.memory_transport import MemoryTransport
from tests.support.raw_links import frame_bytes

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
        self.settings = Settings(self._make_receiver)
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
