"""One connection on stdin and stdout: one message per line."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import threading
from collections.abc import AsyncIterator, Callable
from typing import cast

from exec_server.rpc.stream import MessageReceiver, MessageStream

log = logging.getLogger(__name__)

# The limit of the protocol, without the line end. A longer line ends the connection.
LINE_BYTES = 64 * 1_048_576
# Unsent bytes at which output is no longer read from children, and at which it is again.
SEND_HIGH_BYTES = 524_288
SEND_LOW_BYTES = 131_072
# How long the reader of stdout may take for what is still to be written when we end.
FLUSH_SECONDS = 1.0
_COPY_BYTES = 65_536


class StdioStream(asyncio.Protocol):
    """The link to the program that started us; a MessageStream."""

    is_strict = False
    origin = "JSON-RPC message from exec-server stdio"

    def __init__(self, receiver: Callable[[MessageStream], MessageReceiver]) -> None:
        self._loop = asyncio.get_running_loop()
        self._make_receiver = receiver
        self._receiver: MessageReceiver | None = None
        self._reading: asyncio.ReadTransport = cast(asyncio.ReadTransport, None)
        self._writer = _Writer(self)
        self._partial = bytearray()
        self._searched = 0
        self._lines: list[bytes] = []  # whole lines that nobody wants yet
        self._receiving = True
        self._closing = False
        self._is_one_socket = False
        self._parts_turn = asyncio.Lock()
        self._behind_parts: list[bytes] | None = None
        self.ended: asyncio.Future[None] = self._loop.create_future()

    async def open(self, stdin: int, stdout: int) -> None:
        """Take over two descriptors."""
        if _are_one_socket(stdin, stdout):
            os.close(stdout)
            self._receiver = self._make_receiver(self)
            both = socket.socket(fileno=stdin)
            self._is_one_socket = True
            await self._loop.connect_accepted_socket(lambda: self, both)
            return
        await self._writer.open(stdout)
        self._receiver = self._make_receiver(self)
        pollable = _pollable(stdin)
        await self._loop.connect_read_pipe(lambda: self, os.fdopen(pollable, "rb", buffering=0))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._reading = cast(asyncio.ReadTransport, transport)
        if self._is_one_socket:
            self._writer.use(cast(asyncio.WriteTransport, transport))

    # ---- receiving --------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        self._partial += data
        end = self._partial.find(b"\n", self._searched)
        if end < 0:
            self._searched = len(self._partial)
            if len(self._partial) > LINE_BYTES + 1:
                self.close(0, "line is too long")
            return
        *lines, rest = bytes(self._partial).split(b"\n")
        self._partial = bytearray(rest)
        self._searched = 0
        self._lines += lines
        self._deliver()

    def _deliver(self) -> None:
        lines, self._lines = self._lines, []
        for number, line in enumerate(lines):
            if self._closing:
                return
            if not self._receiving:
                self._lines = lines[number:]
                return
            self._take(line.removesuffix(b"\r"))

    def _take(self, line: bytes) -> None:
        assert self._receiver is not None
        if len(line) > LINE_BYTES:
            self.close(0, "line is too long")
        elif not line.isascii() and not _is_utf8(line):
            self.close(0, "line is not UTF-8")
        elif line.strip():
            self._receiver.message_received(line)

    def hold(self, *, receiving: bool) -> None:
        if receiving == self._receiving:
            return
        self._receiving = receiving
        if receiving:
            self._loop.call_soon(self._continue)
        else:
            self._reading.pause_reading()

    def _continue(self) -> None:
        if self._receiving and not self._closing:
            self._deliver()
        # Only when all is handed over: each read brings more than a receiver may take.
        if self._receiving and not self._closing:
            self._reading.resume_reading()

    def eof_received(self) -> bool:
        """End of stdin: the program that started us is done with us."""
        self.close(0, "stdin ended")
        if not self.ended.done():
            self.ended.set_result(None)
        return True  # a socket may still be written to

    def connection_lost(self, exc: Exception | None) -> None:
        self.eof_received()
        if self._is_one_socket:
            self._writer.connection_lost(exc)

    # Called only when stdin and stdout are one socket.

    def pause_writing(self) -> None:
        self._writer.pause_writing()

    def resume_writing(self) -> None:
        self._writer.resume_writing()

    # ---- sending ----------------------------------------------------------------------

    def send(self, message: bytes) -> None:
        if self._closing:
            return
        if self._behind_parts is not None:
            self._behind_parts.append(message)
        else:
            self._writer.write(message + b"\n")

    async def send_parts(self, parts: AsyncIterator[bytes], size: int) -> None:
        async with self._parts_turn:
            self._behind_parts = []
            self.writer_slow()
            try:
                async for part in parts:
                    await self._writer.wait_ready()
                    self._writer.write(part)
                self._writer.write(b"\n")
            finally:
                held, self._behind_parts = self._behind_parts, None
                for message in held:
                    self.send(message)
                if not self._writer.slow:
                    self.writer_ready()

    def unsent(self) -> int:
        return self._writer.unsent() + sum(map(len, self._behind_parts or ()))

    def writer_slow(self) -> None:
        if self._receiver is not None and not self._closing:
            self._receiver.sending_slow()

    def writer_ready(self) -> None:
        if self._receiver is not None and not self._closing and self._behind_parts is None:
            self._receiver.sending_ready()

    # ---- the end ----------------------------------------------------------------------

    def probe(self) -> None:
        """There is no second connection that could want this one's session."""

    def close(self, code: int, reason: str) -> None:
        """Stop talking; the process lives until stdin ends."""
        if self._closing:
            return
        self._closing = True
        log.info("stdio connection ends: %s", reason)
        self._partial.clear()
        self._reading.resume_reading()  # to notice its end
        self._loop.call_soon(self._lose)

    def _lose(self) -> None:
        assert self._receiver is not None
        self._receiver.link_lost()

    async def flush(self) -> None:
        """Wait until what was sent is written, or nobody seems to read it."""
        await self._writer.flush()


class _Writer(asyncio.BaseProtocol):
    """stdout, with back-pressure."""

    def __init__(self, stream: StdioStream) -> None:
        self._stream = stream
        self._transport: asyncio.WriteTransport | None = None
        self._file: int | None = None  # a file or /dev/null: written directly, it takes everything
        self._ready: asyncio.Future[None] | None = None
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.slow = False

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
            self._transport.write(data)

    def unsent(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def pause_writing(self) -> None:
        self.slow = True
        self._stream.writer_slow()

    def resume_writing(self) -> None:
        self.slow = False
        self._wake()
        self._stream.writer_ready()

    async def wait_ready(self) -> None:
        while self.slow:
            self._ready = asyncio.get_running_loop().create_future()
            await self._ready

    async def flush(self) -> None:
        if self._transport is not None:
            self._transport.close()  # which writes what is left before it is lost
            await asyncio.wait([self._gone], timeout=FLUSH_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self.slow = False
        self._transport = None
        if not self._gone.done():
            self._gone.set_result(None)
        self._wake()
        self._stream.close(0, "stdout is closed")

    def _wake(self) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


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
        pass  # nobody reads any more
    finally:
        os.close(target)
