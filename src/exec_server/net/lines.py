"""Messages as lines of text, without a pipe; `LineStream` serves both ends of standard streams."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable

from exec_server.errors import ProtocolError
from exec_server.net.inbox import Inbox
from exec_server.net.outbox import Outbox
from exec_server.net.stream import MessageReceiver

# The limit of the protocol, without the line end. A longer line ends the link.
LINE_BYTES = 64 * 1_048_576
# Unsent bytes at which the producer is asked to stop, and at which to go on.
SEND_HIGH_BYTES = 524_288
SEND_LOW_BYTES = 131_072

# Close codes as a WebSocket has them; a pipe carries none.
_INVALID_TEXT = 1007
_TOO_BIG = 1009


class LineSplitter:
    """Splits received bytes into lines without their ends, LF or CRLF; skips blank lines."""

    def __init__(self, line_bytes: int = LINE_BYTES, *, must_be_utf8: bool = True) -> None:
        self._line_bytes = line_bytes
        self._must_be_utf8 = must_be_utf8
        self._partial = bytearray()
        self._lines: deque[bytes] = deque()

    def feed(self, data: bytes) -> None:
        end = data.rfind(b"\n") + 1
        if not end:
            self._partial += data
        elif self._partial:
            self._partial += memoryview(data)[:end]
            self._lines += bytes(self._partial).split(b"\n")[:-1]
            self._partial = bytearray(data[end:])
        else:
            self._lines += data[:end].split(b"\n")[:-1]
            self._partial += memoryview(data)[end:]

    def next_line(self) -> bytes | None:
        """The next line, None if no line is complete; ProtocolError if it is not acceptable."""
        while self._lines:
            line = self._lines.popleft().removesuffix(b"\r")
            if len(line) > self._line_bytes:
                raise ProtocolError(_TOO_BIG, "line is too long")
            if not line.isascii() and self._must_be_utf8 and not _is_utf8(line):
                raise ProtocolError(_INVALID_TEXT, "line is not UTF-8")
            if line.strip():
                return line
        if len(self._partial) > self._line_bytes + 1:  # a CR may still be part of the line end
            raise ProtocolError(_TOO_BIG, "line is too long")
        return None

    def clear(self) -> None:
        """Forget all received bytes."""
        self._lines.clear()
        self._partial.clear()


class LineWriter:
    """Writes one message in parts as a line; an outbox.PartWriter."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self.write = write

    def finish(self) -> None:
        self.write(b"\n")


class LineStream(ABC):
    """A MessageStream with one message per line; subclasses have the pipes."""

    is_strict = False
    origin = "JSON-RPC message from exec-server stdio"
    _receiver: MessageReceiver  # set by `_deliver_to`

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lines = LineSplitter()
        self._inbox: Inbox[bytes] = Inbox(self._next_line, self._deliver, self._update_reading)
        self._outbox = Outbox(self._break_off)
        self._is_closed = False

    @abstractmethod
    def close(self, code: int, reason: str) -> None:
        """End the link; its text is for the log."""

    @abstractmethod
    def _write(self, data: bytes) -> None:
        """Write to the pipe, or drop the bytes if it is closed."""

    @abstractmethod
    def _update_reading(self) -> None:
        """Pause or resume the pipe."""

    def _deliver_to(self, receiver: MessageReceiver) -> None:
        self._receiver = self._outbox.producer = receiver

    def _bytes_received(self, data: bytes) -> None:
        if not self._is_closed:
            self._lines.feed(data)
            self._inbox.deliver()

    def _next_line(self) -> bytes | None:
        try:
            return self._lines.next_line()
        except ProtocolError as error:
            self.close(error.close_code, error.reason)
            return None

    def _deliver(self, line: bytes) -> None:
        self._receiver.message_received(line)

    def pause_reading(self) -> None:
        self._inbox.pause()

    def resume_reading(self) -> None:
        self._inbox.resume()

    def send(self, message: bytes) -> None:
        self._outbox.send(message, self._write_line)

    def _write_line(self, message: bytes) -> None:
        self._write(message + b"\n")

    async def send_parts(self, parts: AsyncIterator[bytes], size: int) -> None:
        await self._outbox.send_parts(parts, LineWriter(self._write))

    def pause_writing(self) -> None:
        self._outbox.pause_writing()

    def resume_writing(self) -> None:
        self._outbox.resume_writing()

    def _break_off(self) -> None:
        self.close(0, "a message could not be completed")

    def _end(self) -> None:
        self._is_closed = True
        self._lines.clear()
        self._inbox.close()
        self._outbox.close()
        self._loop.call_soon(self._receiver.connection_lost)


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True
