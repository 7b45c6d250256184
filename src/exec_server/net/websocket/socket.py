"""FramedSocket: the frames, the state and the flow of one WebSocket, for either of its ends.

Both ends have one: the server's connection in `server`, the client's in `client`. The ends own the
upgrade, the meaning of events and the way a connection ends; this is the part between them and
the transport. Receiving is an `Inbox`, sending an `Outbox` over a `FrameWriter`.
"""

from __future__ import annotations

import asyncio
import enum
import math
import socket
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from exec_server.errors import ProtocolError
from exec_server.net.inbox import BURST, Inbox
from exec_server.net.outbox import Outbox
from exec_server.net.websocket.frames import (
    SENT_FRAME_BYTES,
    Event,
    FrameReader,
    Opcode,
    close_answer,
    close_payload,
)

# Shorter messages, such as most answers, are written at once. Longer ones are gathered while they
# come in a row and are written together, because a system call for each of them would take most
# of a stream's time. As many bytes are gathered as one read of a full pipe makes.
DIRECT_BYTES = 4096
GATHERED_BYTES = 262_144
# Pieces that the kernel takes in one call (IOV_MAX).
MAX_PIECES = 1024
# Pieces of this size on average are queued as they are: copying them takes longer than passing
# them on one by one.
LONG_PIECE_BYTES = 32_768


# Unsent bytes at which the producer is asked to stop, and at which to go on.
SEND_HIGH_BYTES = 524_288
SEND_LOW_BYTES = 131_072
# How long a peer may take to answer our close frame, or to take a last answer, and to hang up.
CLOSE_SECONDS = 2.0

# Makes a frame of an opcode, a payload and FIN.
Encode = Callable[[Opcode, bytes, bool], bytes]


class State(enum.Enum):
    """The life of a WebSocket, for both ends."""

    CONNECTING = enum.auto()  # the upgrade is not complete
    OPEN = enum.auto()
    CLOSING = enum.auto()  # our close frame is sent: messages are dropped until the peer's arrives
    DISCARDING = enum.auto()  # received bytes are dropped until the connection is gone
    CLOSED = enum.auto()  # the connection is gone


class Cause(enum.Enum):
    UPGRADED = enum.auto()
    REFUSED = enum.auto()  # the upgrade
    CLOSE_SENT = enum.auto()
    CLOSE_RECEIVED = enum.auto()
    PROTOCOL_ERROR = enum.auto()
    EOF = enum.auto()
    ABORTED = enum.auto()
    LOST = enum.auto()  # the transport is closed


# A missing key changes nothing: the WebSocket is further already.
_TRANSITIONS = {
    (State.CONNECTING, Cause.UPGRADED): State.OPEN,
    (State.CONNECTING, Cause.REFUSED): State.DISCARDING,
    (State.CONNECTING, Cause.CLOSE_SENT): State.DISCARDING,
    (State.CONNECTING, Cause.EOF): State.DISCARDING,
    (State.CONNECTING, Cause.ABORTED): State.DISCARDING,
    (State.CONNECTING, Cause.LOST): State.CLOSED,
    (State.OPEN, Cause.CLOSE_SENT): State.CLOSING,
    (State.OPEN, Cause.CLOSE_RECEIVED): State.DISCARDING,
    (State.OPEN, Cause.PROTOCOL_ERROR): State.DISCARDING,
    (State.OPEN, Cause.EOF): State.DISCARDING,
    (State.OPEN, Cause.ABORTED): State.DISCARDING,
    (State.OPEN, Cause.LOST): State.CLOSED,
    (State.CLOSING, Cause.CLOSE_RECEIVED): State.DISCARDING,
    (State.CLOSING, Cause.PROTOCOL_ERROR): State.DISCARDING,
    (State.CLOSING, Cause.EOF): State.DISCARDING,
    (State.CLOSING, Cause.ABORTED): State.DISCARDING,
    (State.CLOSING, Cause.LOST): State.CLOSED,
    (State.DISCARDING, Cause.LOST): State.CLOSED,
}


def next_state(state: State, cause: Cause) -> State | None:
    """The state that follows, None if the cause changes nothing."""
    return _TRANSITIONS.get((state, cause))


class _BorrowedSocket(socket.socket):
    """The socket of a transport, which alone closes it."""

    def __del__(self) -> None:
        self.detach()


class FrameWriter:
    """Writes frames to one transport, at once or gathered; those in `gathered` go first."""

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
        if self._socket is None or len(pieces) > MAX_PIECES or self._transport.is_closing():
            self.write(b"".join(pieces))
            return
        sent = 0
        if self._is_idle():
            try:
                sent = self._socket.sendmsg(pieces)
            except OSError:
                pass  # as in `write`
        if sent < size:
            self._queue(pieces, size, sent)

    def _queue(self, pieces: list[bytes], size: int, sent: int) -> None:
        """Leave the rest to the transport; long pieces are not joined."""
        if size < LONG_PIECE_BYTES * len(pieces):
            self._transport.write(memoryview(b"".join(pieces))[sent:])
            return
        for piece in pieces:
            if sent < len(piece):
                self._transport.write(memoryview(piece)[sent:])
            sent = max(0, sent - len(piece))

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


class SocketEnd(Protocol):
    """The end of a WebSocket above a FramedSocket; also the asyncio protocol of its transport."""

    def event_received(self, event: Event) -> None:
        """A message or control frame has arrived, or many fragments; the state is OPEN."""

    def bytes_received(self) -> None:
        """A part of a long frame has arrived."""

    def protocol_failed(self, error: ProtocolError) -> None:
        """The peer broke the protocol; its close frame is sent, its later bytes are dropped."""

    def abort(self, why: str) -> None:
        """Drop the connection without a close frame."""

    def eof_received(self) -> bool: ...

    def connection_lost(self, exc: Exception | None) -> None: ...

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...


class FramedSocket:
    """Frames over one transport."""

    __slots__ = (
        "_close_timer",
        "_discardable",
        "_encode",
        "_end",
        "_is_blocked",
        "_is_forced",
        "_loop",
        "_pong",
        "_transport",
        "frames",
        "inbox",
        "outbox",
        "state",
        "writer",
    )

    def __init__(
        self,
        end: SocketEnd,
        transport: asyncio.Transport,
        descriptor: int,
        frames: FrameReader,
        encode: Encode,
    ) -> None:
        """`descriptor` is that of the transport's socket, -1 if there is TLS in between."""
        transport.set_write_buffer_limits(SEND_HIGH_BYTES, SEND_LOW_BYTES)
        self._loop = asyncio.get_running_loop()
        self._end = end
        self._transport = transport
        self._encode = encode
        self._is_blocked = False
        self._is_forced = False
        self._pong: bytes | None = None  # not sent yet, because the peer does not read
        self._close_timer: asyncio.TimerHandle | None = None
        self._discardable: float = math.inf  # bytes that are read and dropped before an abort
        self.state = State.CONNECTING
        self.frames = frames
        self.outbox = Outbox(self._break_off)
        self.writer = FrameWriter(transport, descriptor)
        self.inbox: Inbox[Event] = Inbox(
            self._next_event,
            end.event_received,
            self._update_reading,
            delivered=self.writer.stop_holding,
        )

    def change(self, cause: Cause) -> bool:
        """Enter the state that follows; False if the cause changes nothing."""
        state = next_state(self.state, cause)
        if state is None:
            return False
        self.state = state
        if state is not State.OPEN:
            self.inbox.close()
            self.outbox.close()
        if state is State.DISCARDING or state is State.CLOSED:
            self.frames.clear()
        self._update_reading()
        return True

    @property
    def _is_discarding(self) -> bool:
        return self.state is State.DISCARDING

    def feed(self, data: bytes) -> None:
        """Take received bytes and deliver the events that they complete."""
        if self._is_discarding:
            self._drop(len(data))
            return
        self.frames.feed(data)
        self._process()
        if self.frames.wants_direct_receive and not self._is_discarding:
            self._receive_by(_DirectReceiver(self, self._end))

    def bytes_written(self, count: int) -> None:
        """The transport has written bytes into the tail of the frame reader's buffer."""
        if self._is_discarding:
            self._drop(count)
            return
        is_whole = self.frames.bytes_written(count)
        self._process()
        if is_whole:
            self._receive_by(self._end)
        self._end.bytes_received()

    def _drop(self, count: int) -> None:
        self._discardable -= count
        if self._discardable < 0:
            self._end.abort("the peer does not stop sending")

    def _receive_by(self, protocol: object) -> None:
        self._transport.set_protocol(protocol)  # type: ignore[arg-type]
        if not self._transport.is_closing():
            # uvloop looks at the protocol only when it begins to read.
            self._transport.pause_reading()
            self._update_reading()

    def _process(self) -> None:
        if self.state is State.OPEN:
            self.inbox.deliver()
        elif self.state is State.CLOSING:
            self._find_close()

    def _next_event(self) -> Event | None:
        try:
            return self.frames.next_event()
        except ProtocolError as error:
            self.write_frame(Opcode.CLOSE, close_payload(error.close_code, error.reason))
            self.change(Cause.PROTOCOL_ERROR)
            self._limit_closing()
            self._end.protocol_failed(error)
            return None

    def _find_close(self) -> None:
        """Drop events up to the peer's close frame; other connections run between two bursts."""
        try:
            for _ in range(BURST):
                event = self.frames.next_event()
                if event is None:
                    self._update_reading()
                    return
                if event.opcode is Opcode.CLOSE:
                    self.change(Cause.CLOSE_RECEIVED)
                    self._transport.close()
                    return
        except ProtocolError:
            self.change(Cause.PROTOCOL_ERROR)
            return
        if not self._transport.is_closing():
            self._transport.pause_reading()
        self._loop.call_soon(self._process)

    def block_reading(self, *, is_blocked: bool) -> None:
        """Read nothing, whatever the receiver wants, until unblocked."""
        self._is_blocked = is_blocked
        self._update_reading()

    def force_reading(self, *, is_forced: bool) -> None:
        """Read although the receiver is paused; the messages wait."""
        self._is_forced = is_forced
        self._update_reading()

    def _update_reading(self) -> None:
        if self._transport.is_closing():
            return
        # In every state but OPEN received bytes are looked through or dropped: closing a socket
        # with unread bytes resets it, and the reset could overtake our last frame or answer.
        is_wanted = self.inbox.is_flowing and not self._is_blocked
        if self.state is not State.OPEN or self._is_forced or is_wanted:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def answer_ping(self, payload: bytes) -> None:
        if self.outbox.is_full:
            self._pong = payload  # of many pings the last one is answered
        else:
            self.write_frame(Opcode.PONG, payload)

    def write_frame(self, opcode: Opcode, payload: bytes, *, final: bool = True) -> None:
        self.writer.write_in_order(self._encode(opcode, payload, final))

    def write_fragments(self, opcode: Opcode, message: bytes) -> None:
        """Write a message that is too large for one frame."""
        for start in range(0, len(message), SENT_FRAME_BYTES):
            piece = message[start : start + SENT_FRAME_BYTES]
            self.write_frame(opcode, piece, final=start + SENT_FRAME_BYTES >= len(message))
            opcode = Opcode.CONTINUATION

    async def send_parts(self, opcode: Opcode, parts: AsyncIterator[bytes]) -> None:
        """Send one message as fragments; see Outbox.send_parts."""
        await self.outbox.send_parts(parts, _FragmentWriter(self, opcode))

    def _break_off(self) -> None:
        self._end.abort("a message could not be completed")

    def unsent(self) -> int:
        """Bytes that the peer has not taken yet."""
        return self.writer.unsent() + self.outbox.queued_bytes

    def pause_writing(self) -> None:
        self.outbox.pause_writing()

    def resume_writing(self) -> None:
        if self._pong is not None and self.state is State.OPEN:
            self.write_frame(Opcode.PONG, self._pong)
            self._pong = None
        self.outbox.resume_writing()

    def end_writing(self) -> None:
        """Show the peer that nothing follows; what it still sends is read and dropped."""
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()  # TLS: its end is sent, and received bytes are dropped

    def start_closing(self, code: int, reason: str) -> None:
        """Send a close frame; the connection ends with the peer's, or after CLOSE_SECONDS."""
        self.write_frame(Opcode.CLOSE, close_payload(code, reason))
        self.change(Cause.CLOSE_SENT)
        self._limit_closing()
        self._loop.call_soon(self._process)  # the peer's close frame may be buffered

    def answer_close(self, payload: bytes) -> None:
        """Answer the peer's close frame and hang up."""
        self.write_frame(Opcode.CLOSE, close_answer(payload))
        self.change(Cause.CLOSE_RECEIVED)
        self._limit_closing()
        self._transport.close()

    def discard(self, cause: Cause, limit: float = math.inf) -> None:
        """Send and deliver nothing more; drop received bytes until the connection is gone.

        A peer that sends more than `limit` bytes is cut off.
        """
        if self.change(cause):
            self._discardable = limit
            self._limit_closing()

    def _limit_closing(self) -> None:
        if self._close_timer is None:
            self._close_timer = self._loop.call_later(CLOSE_SECONDS, self._transport.abort)

    def lost(self) -> bool:
        """The transport is gone; returns whether the state was OPEN until now."""
        was_open = self.state is State.OPEN
        if self._close_timer is not None:
            self._close_timer.cancel()
        self.change(Cause.LOST)
        return was_open


class _FragmentWriter:
    """Writes one message as fragments; an outbox.PartWriter."""

    __slots__ = ("_opcode", "_socket")

    def __init__(self, socket: FramedSocket, opcode: Opcode) -> None:
        self._socket = socket
        self._opcode = opcode

    def write(self, part: bytes) -> None:
        self._socket.write_frame(self._opcode, part, final=False)
        self._opcode = Opcode.CONTINUATION

    def finish(self) -> None:
        self._socket.write_frame(self._opcode, b"")


class _DirectReceiver(asyncio.BufferedProtocol):
    """The transport's protocol while the rest of a long frame is received into its buffer.

    Not used for short messages: for those the plain protocol is faster.
    """

    def __init__(self, socket: FramedSocket, end: SocketEnd) -> None:
        self._socket = socket
        self.eof_received = end.eof_received  # type: ignore[method-assign]
        self.connection_lost = end.connection_lost  # type: ignore[method-assign]
        self.pause_writing = end.pause_writing  # type: ignore[method-assign]
        self.resume_writing = end.resume_writing  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._socket.frames.writable_tail()

    def buffer_updated(self, nbytes: int) -> None:
        self._socket.bytes_written(nbytes)
