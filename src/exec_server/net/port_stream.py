"""PortStream: one forwarded connection: credit, half-close and resets, without a socket.

- An end sends and reads only as many bytes as the other end has given credit for, so a slow stream
  neither fills memory nor delays others. Bytes that a socket has taken give new credit.
- The end of a socket's input closes one direction. After both, the socket is closed when it has
  taken the remaining bytes. A broken socket resets the stream, and a reset stream its socket.
"""

from __future__ import annotations

import enum
from typing import Protocol

# Bytes on their way in one direction of a stream: 5 MB/s at a round trip of 50 ms. A stream whose
# socket does not take them keeps them in memory.
WINDOW_BYTES = 262_144
# Credit is given in steps of this size, so that few messages are needed for it.
CREDIT_BYTES = WINDOW_BYTES // 4
# Bytes in one message: in base64 the message is below the 32 KiB that the server decodes without
# another thread.
CHUNK_BYTES = 24_000


class StreamSocket(Protocol):
    """The socket of this end; its reading is paused at first."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def write(self, data: bytes) -> None: ...

    def write_eof(self) -> None:
        """Close the writing direction after the bytes written before."""

    def unwritten(self) -> int:
        """Bytes that the kernel has not taken yet."""

    def close(self) -> None:
        """Close after the bytes written before; `PortStream.socket_lost` follows."""

    def abort(self) -> None:
        """Reset the connection at once; `PortStream.socket_lost` follows."""


class StreamPeer(Protocol):
    """The way to the other end of a stream."""

    def send_data(self, chunk: bytes) -> None: ...

    def send_credit(self, count: int) -> None: ...

    def send_end(self) -> None: ...

    def send_reset(self, reason: str) -> None: ...

    def closed(self) -> None:
        """The socket is closed: nothing of the stream is left at this end."""


class PortStreamState(enum.Enum):
    OPEN = enum.auto()
    END_SENT = enum.auto()
    END_RECEIVED = enum.auto()
    CLOSED = enum.auto()  # ended in both directions, or reset


# A missing key is an event that is too late, or an error of the other end.
_TRANSITIONS = {
    (PortStreamState.OPEN, "send end"): PortStreamState.END_SENT,
    (PortStreamState.OPEN, "receive end"): PortStreamState.END_RECEIVED,
    (PortStreamState.END_RECEIVED, "send end"): PortStreamState.CLOSED,
    (PortStreamState.END_SENT, "receive end"): PortStreamState.CLOSED,
}


class PortStream:
    """One end of a stream; it sends nothing before it gets credit."""

    def __init__(
        self, socket: StreamSocket, peer: StreamPeer, *, is_link_paused: bool = False
    ) -> None:
        self._socket = socket
        self._peer = peer
        self._state = PortStreamState.OPEN
        self._credit = 0  # bytes that the other end takes
        self._window = WINDOW_BYTES  # bytes that the other end may send
        self._unreturned = 0  # received bytes that were not credited again
        self._held = bytearray()  # bytes read without credit
        self._is_eof = False  # of the socket
        self._is_link_paused = is_link_paused
        self._is_reading = False

    @property
    def is_closed(self) -> bool:
        return self._state is PortStreamState.CLOSED

    @property
    def readable_bytes(self) -> int:
        """How many bytes to read from the socket at a time."""
        return min(self._credit, CHUNK_BYTES) or CHUNK_BYTES

    def data_read(self, data: bytes) -> None:
        self._held += data
        self._send_held()

    def eof_read(self) -> None:
        self._is_eof = True
        self._is_reading = False
        self._send_held()

    def socket_lost(self, reason: str) -> None:
        """The socket is closed; called exactly once, whatever closed it."""
        if self._state is not PortStreamState.CLOSED:
            self._state = PortStreamState.CLOSED
            self._peer.send_reset(reason)
        self._held.clear()
        self._peer.closed()

    def data_received(self, chunk: bytes) -> None:
        if self._state is PortStreamState.CLOSED:
            return
        if (self._state, "receive end") not in _TRANSITIONS:
            self._fail("data after the end of the stream")
        elif len(chunk) > self._window:
            self._fail("more data than there was credit for")
        else:
            self._window -= len(chunk)
            self._unreturned += len(chunk)
            self._socket.write(chunk)
            self.return_credit()

    def credit_received(self, count: int) -> None:
        self._credit += count
        self._send_held()

    def end_received(self) -> None:
        if (self._state, "receive end") in _TRANSITIONS:
            self._advance("receive end")
            if self._state is not PortStreamState.CLOSED:
                self._socket.write_eof()

    def reset_received(self) -> None:
        self.abort()

    def pause_reading(self) -> None:
        """Read nothing from the socket: the link to the other end is congested."""
        self._is_link_paused = True
        self._update_reading()

    def resume_reading(self) -> None:
        self._is_link_paused = False
        self._update_reading()

    def abort(self) -> None:
        """Reset the socket without telling the other end, which knows or is gone."""
        if self._state is not PortStreamState.CLOSED:
            self._state = PortStreamState.CLOSED
            self._is_reading = False
            self._socket.abort()

    def reset(self, reason: str) -> None:
        """Reset both ends."""
        if self._state is not PortStreamState.CLOSED:
            self._fail(reason)

    def _fail(self, reason: str) -> None:
        self._peer.send_reset(reason)
        self.abort()

    def _send_held(self) -> None:
        if self._state is PortStreamState.CLOSED:
            return
        while self._held and self._credit:
            size = min(len(self._held), self._credit, CHUNK_BYTES)
            chunk = bytes(self._held[:size])
            del self._held[:size]
            self._credit -= size
            self._peer.send_data(chunk)
        if self._is_eof and not self._held and (self._state, "send end") in _TRANSITIONS:
            self._peer.send_end()
            self._advance("send end")
        self._update_reading()

    def _advance(self, event: str) -> None:
        self._state = _TRANSITIONS[self._state, event]
        if self._state is PortStreamState.CLOSED:
            self._socket.close()

    def return_credit(self) -> None:
        """Give credit for the bytes that the socket has taken; called when it has taken some."""
        taken = self._unreturned - self._socket.unwritten()
        if taken >= CREDIT_BYTES and (self._state, "receive end") in _TRANSITIONS:
            self._unreturned -= taken
            self._window += taken
            self._peer.send_credit(taken)

    def _update_reading(self) -> None:
        if self._is_eof or self._state is PortStreamState.CLOSED:
            return
        may_read = self._credit > 0 and not self._held and not self._is_link_paused
        if may_read != self._is_reading:
            self._is_reading = may_read
            if may_read:
                self._socket.resume_reading()
            else:
                self._socket.pause_reading()
