"""StdioStream: one connection on stdin and stdout, one message per line."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import threading
from collections.abc import Callable
from typing import Protocol, cast

from exec_server.net.lines import SEND_HIGH_BYTES, SEND_LOW_BYTES, LineStream
from exec_server.net.liveness import CheckTimer, TransferProgress
from exec_server.net.stream import MessageReceiver, MessageStream

log = logging.getLogger(__name__)

# After the end of stdin, a reader of stdout that takes no bytes for this long gets no more.
FLUSH_SECONDS = 1.0
_COPY_BYTES = 65_536


class StdioReceiver(MessageReceiver, Protocol):
    """A MessageReceiver that can finish its work after the last message."""

    def eof_received(self) -> None:
        """No more messages arrive: answer the earlier ones, then close the stream."""


class StdioStream(LineStream, asyncio.Protocol):
    """The parent program's link; `ended` is done when stdin has ended and the stream is closed."""

    _receiver: StdioReceiver  # from `open` on

    def __init__(self, receiver: Callable[[MessageStream], StdioReceiver]) -> None:
        super().__init__()
        self._make_receiver = receiver
        self._stdin: asyncio.ReadTransport | None = None
        self._stdout = _StdoutWriter(self)
        self._progress = TransferProgress(FLUSH_SECONDS)  # of the reader, after the end of stdin
        self._taken_before = 0
        self._watchdog = CheckTimer(self._check_reader)
        self._is_eof = False
        self._is_one_socket = False
        self.ended: asyncio.Future[None] = self._loop.create_future()

    async def open(self, stdin: int, stdout: int) -> None:
        """Take over two descriptors."""
        self._is_one_socket = _are_one_socket(stdin, stdout)
        if self._is_one_socket:
            os.close(stdout)
            self._deliver_to(self._make_receiver(self))
            await self._loop.connect_accepted_socket(lambda: self, socket.socket(fileno=stdin))
            return
        await self._stdout.open(stdout)
        self._deliver_to(self._make_receiver(self))
        pollable = _pollable(stdin)
        await self._loop.connect_read_pipe(lambda: self, os.fdopen(pollable, "rb", buffering=0))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._stdin = cast(asyncio.ReadTransport, transport)
        if self._is_one_socket:
            self._stdout.use(cast(asyncio.WriteTransport, transport))
        self._update_reading()

    def data_received(self, data: bytes) -> None:
        self._bytes_received(data)

    def _update_reading(self) -> None:
        if self._stdin is None or self._stdin.is_closing() or self._is_eof:
            return
        if self._inbox.is_flowing or self._is_closed:  # if closed, to notice the end of stdin
            self._stdin.resume_reading()
        else:
            self._stdin.pause_reading()

    def eof_received(self) -> bool:
        """End of stdin. All lines are delivered: stdin is not read while lines are buffered."""
        if not self._is_eof:
            self._is_eof = True
            if self._is_closed:
                self.ended.set_result(None)
            else:
                self._receiver.eof_received()
                self._progress.touch(self._loop.time())
                self._watchdog.start(FLUSH_SECONDS)
        return True  # a socket may still be written to

    def connection_lost(self, exc: Exception | None) -> None:
        self.eof_received()
        if self._is_one_socket:
            self._stdout.connection_lost(exc)

    def _write(self, data: bytes) -> None:
        self._stdout.write(data)

    def unsent(self) -> int:
        return self._stdout.unsent() + self._outbox.queued_bytes

    def probe(self) -> None:
        """No second connection can ask for the session of this one."""

    def _check_reader(self) -> float | None:
        """After the end of stdin: close the stream if its reader takes nothing."""
        if self._is_closed:
            return None
        now, taken = self._loop.time(), self._stdout.taken()
        if taken > self._taken_before or not self._outbox.is_full:
            self._progress.touch(now)
        self._taken_before = taken
        remaining = self._progress.remaining(now)
        if remaining > 0:
            return remaining
        self.close(0, "stdin has ended and stdout is not read")
        return None

    def close(self, code: int, reason: str) -> None:
        """Send and deliver nothing more; the server ends when stdin does."""
        if self._is_closed:
            return
        log.info("stdio connection ends: %s", reason)
        self._end()
        self._watchdog.cancel()
        self._update_reading()
        if self._is_eof:
            self.ended.set_result(None)

    async def flush(self) -> None:
        """Wait until all sent messages are written, or their reader takes nothing."""
        await self._stdout.flush()


class _StdoutWriter(asyncio.BaseProtocol):
    """stdout: a pipe, socket or terminal with back-pressure, or a file."""

    def __init__(self, stream: StdioStream) -> None:
        self._stream = stream
        self._transport: asyncio.WriteTransport | None = None
        self._file: int | None = None  # a file or /dev/null: takes everything, cannot be polled
        self._written = 0
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def open(self, descriptor: int) -> None:
        if not _can_be_polled(descriptor):
            self._file = descriptor
            return
        loop = asyncio.get_running_loop()
        file = os.fdopen(descriptor, "wb", buffering=0)
        transport, _ = await loop.connect_write_pipe(lambda: self, file)
        self.use(transport)

    def use(self, transport: asyncio.WriteTransport) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(SEND_HIGH_BYTES, SEND_LOW_BYTES)

    def write(self, data: bytes) -> None:
        if self._file is not None:
            os.write(self._file, data)
        elif self._transport is not None:
            self._written += len(data)
            self._transport.write(data)

    def pause_writing(self) -> None:
        self._stream.pause_writing()

    def resume_writing(self) -> None:
        self._stream.resume_writing()

    def unsent(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def taken(self) -> int:
        """Bytes that the reader, or the kernel for it, has taken so far."""
        return self._written - self.unsent()

    async def flush(self) -> None:
        if self._transport is None:
            return
        self._transport.close()  # it writes its buffer first
        taken = -1
        while not self._closed.done() and self.taken() > taken:
            taken = self.taken()
            await asyncio.wait([self._closed], timeout=FLUSH_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self._closed.done():
            self._closed.set_result(None)
        self._stream.close(0, "stdout is closed")


def _are_one_socket(first: int, second: int) -> bool:
    """Whether both are the same socket, as sshd and inetd set it up."""
    one, other = os.fstat(first), os.fstat(second)
    return stat.S_ISSOCK(one.st_mode) and (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


def _can_be_polled(descriptor: int) -> bool:
    mode = os.fstat(descriptor).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)


def _pollable(descriptor: int) -> int:
    """The descriptor itself, or a pipe that a thread copies it into if it cannot be polled."""
    if _can_be_polled(descriptor):
        return descriptor
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    threading.Thread(target=_copy, args=(descriptor, write_end), daemon=True).start()
    return read_end


def _copy(source: int, target: int) -> None:
    try:
        while data := os.read(source, _COPY_BYTES):
            view = memoryview(data)
            while view:
                view = view[os.write(target, view) :]
    except OSError:
        pass  # the read end is closed
    finally:
        os.close(target)
