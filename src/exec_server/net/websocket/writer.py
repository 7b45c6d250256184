"""FrameWriter: writes frames to a transport, at once or gathered."""

from __future__ import annotations

import asyncio
import socket

# Shorter messages, such as most answers, are written at once. Longer ones are gathered while they
# come in a row and are written together, because a system call for each of them would take most
# of a stream's time. As many bytes are gathered as one read of a full pipe makes.
DIRECT_BYTES = 4096
GATHERED_BYTES = 262_144
# Pieces that the kernel takes in one call (IOV_MAX).
MAX_PIECES = 1024


class _BorrowedSocket(socket.socket):
    """The socket of a transport, which alone closes it."""

    def __del__(self) -> None:
        self.detach()


class FrameWriter:
    """Frames to one transport, in order; those in `gathered` go before any other."""

    __slots__ = (
        "_loop",
        "_socket",
        "_transport",
        "gathered",
        "gathered_bytes",
        "is_flush_scheduled",
        "is_holding",
    )

    def __init__(self, transport: asyncio.Transport, descriptor: int) -> None:
        """`descriptor` is that of the transport's socket, -1 if there is TLS in between."""
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._socket = _BorrowedSocket(fileno=descriptor) if descriptor >= 0 else None
        self.gathered: list[bytes] = []
        self.gathered_bytes = 0
        self.is_flush_scheduled = False
        self.is_holding = False  # short messages are gathered too, until `stop_holding`

    def _is_idle(self) -> bool:
        """Whether the socket may be written to directly."""
        transport = self._transport
        return (
            self._socket is not None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()
        )

    def write(self, data: bytes) -> None:
        """Write at once; the caller has seen that nothing is gathered."""
        # Not through the transport if its queue is empty: the transport would write later, and
        # piece by piece. A closing transport may close the descriptor, whose number the kernel
        # may then give to another file.
        transport = self._transport
        if transport.is_closing():
            return
        if self._socket is not None and not transport.get_write_buffer_size():
            try:
                sent = self._socket.send(data)
            except OSError:
                sent = 0  # the buffer is full, or the transport will meet the same error
            if sent == len(data):
                return
            transport.write(memoryview(data)[sent:])
        else:
            transport.write(data)

    def write_in_order(self, data: bytes) -> None:
        """Write at once, after the gathered frames."""
        self.flush()
        self.write(data)

    def gather(self, frame: bytes, body: bytes = b"", tail: bytes = b"") -> None:
        """Write with the frames that follow, at the latest in the next iteration of the loop.

        A long frame may be given in three pieces, which are not joined.
        """
        self.gathered.append(frame)
        if body:
            self.gathered += (body, tail)
        self.gathered_bytes += len(frame) + len(body) + len(tail)
        if self.gathered_bytes >= GATHERED_BYTES:
            self.flush()
        else:
            self.schedule_flush()

    def schedule_flush(self) -> None:
        if not self.is_flush_scheduled:
            self.is_flush_scheduled = True
            self._loop.call_soon(self._flush_scheduled)

    def _flush_scheduled(self) -> None:
        self.is_flush_scheduled = False
        self.flush()

    def flush(self) -> None:
        """Write the gathered frames."""
        if not self.gathered:
            return
        pieces, size = self.gathered, self.gathered_bytes
        self.gathered, self.gathered_bytes = [], 0
        if self._is_idle() and len(pieces) <= MAX_PIECES:
            assert self._socket is not None
            try:
                sent = self._socket.sendmsg(pieces)
            except OSError:
                sent = 0  # as in `write`
            if sent < size:
                self._transport.write(memoryview(b"".join(pieces))[sent:])
        else:
            self.write(b"".join(pieces))

    def stop_holding(self) -> None:
        """Write what was gathered while messages were delivered that came in one read."""
        self.is_holding = False
        self.flush()

    def discard(self) -> None:
        """Forget the gathered frames."""
        self.gathered.clear()
        self.gathered_bytes = 0

    def unsent(self) -> int:
        """Bytes that the kernel has not taken."""
        return self._transport.get_write_buffer_size() + self.gathered_bytes
