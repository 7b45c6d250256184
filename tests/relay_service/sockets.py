"""The sockets of the rendezvous, with the faults of each: between a peer and the real service.

Frames of the peer are passed on as they came. Messages to the peer are recorded, and frame faults
apply to them. Everything runs in callbacks of the event loop, so a fault takes effect at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, cast

from exec_server.hosting.http_connection import TakeOver
from exec_server.hosting.http_messages import ServiceRequest
from exec_server.hosting.relay_link import READ_BYTES
from exec_server.net.websocket.frames import Opcode, apply_mask, close_payload, frame_header
from tests.relay_service.faults import TO_EXECUTOR, TO_HARNESS, Faults, relay_frame
from tests.relay_service.journal import Journal, Message

# Bytes that a stalled socket holds back before its senders are paused.
HIGH_WATER = 4 * 1024 * 1024
_FIN = 0x80


class WireFrame(NamedTuple):
    """A WebSocket frame; `raw` are all of its bytes."""

    first: int
    mask: bytes
    body: bytes
    raw: bytes

    @property
    def opcode(self) -> int:
        return self.first & 0x0F

    def payload(self) -> bytes:
        return bytes(apply_mask(memoryview(self.body), self.mask)) if self.mask else self.body


def take_frames(buffer: bytearray) -> Iterator[WireFrame]:
    """Remove whole frames from the start of the buffer."""
    while len(buffer) >= 2:
        size, start = buffer[1] & 0x7F, 2
        if size > 125:
            start = 4 if size == 126 else 10
            if len(buffer) < start:
                return
            size = int.from_bytes(buffer[2:start], "big")
        mask_end = start + (4 if buffer[1] & 0x80 else 0)
        end = mask_end + size
        if len(buffer) < end:
            return
        raw = bytes(buffer[:end])
        del buffer[:end]
        yield WireFrame(raw[0], raw[start:mask_end], raw[mask_end:], raw)


class FarEnd(Protocol):
    """The end to which a socket passes the frames of its peer."""

    def frame_received(self, frame: WireFrame) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...
    def lost(self) -> None:
        """The connection of the peer has ended; called once."""


class Sockets(set["Socket"]):
    """The open sockets of a service, and what they share."""

    def __init__(self, journal: Journal, faults: Faults) -> None:
        self.journal = journal
        self.faults = faults

    def executor(self, environment_id: str) -> Socket | None:
        found = (s for s in self if s.is_open and s.is_executor)
        return next((s for s in found if s.environment_id == environment_id), None)

    def harnesses(self, environment_id: str) -> list[Socket]:
        found = [s for s in self if s.is_open and not s.is_executor]
        return [s for s in found if s.environment_id == environment_id]

    def harness(self, stream_id: str) -> Socket | None:
        return next((s for s in self if s.is_open and s.stream_id == stream_id), None)


class Socket(asyncio.Protocol):
    """An accepted WebSocket."""

    def __init__(
        self, sockets: Sockets, transport: asyncio.Transport, role: str, environment_id: str
    ) -> None:
        self._sockets = sockets
        self.transport = transport
        self.is_executor = role == "environment"
        self.environment_id = environment_id
        self.stream_id: str | None = None  # of a client, once it has named one
        self.is_open = True
        self.pings = 0
        self.far: FarEnd
        self._direction = TO_EXECUTOR if self.is_executor else TO_HARNESS
        self._received = bytearray()
        self._unread: set[object] = set()
        self._held: deque[bytes] | None = None
        self._held_bytes = 0
        self._is_full = False
        self._is_slow = False
        self._is_frozen = False
        self._swallows_pings = False
        self._is_lost = False

    def start(self, first: bytes) -> None:
        """Read from now on, beginning with bytes that were received already."""
        self._sockets.add(self)
        self.transport.set_protocol(self)
        self._update_reading()
        self._received += first
        self._read()
        self._sockets.journal.changed()

    # ---- from the peer ------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._read()

    def _read(self) -> None:
        if self._is_frozen:
            return
        for frame in take_frames(self._received):
            if frame.opcode == Opcode.PING:
                self.pings += 1
            if self._swallows_pings and frame.opcode in (Opcode.PING, Opcode.PONG):
                continue
            if self.stream_id is None and not self.is_executor and frame.first == 0x82:
                named = relay_frame(frame.payload())
                self.stream_id = None if named is None else named.stream_id
            self.far.frame_received(frame)
        self._sockets.journal.changed()

    def hold_reading(self, reason: object) -> None:
        """Read nothing until every reason is released."""
        self._unread.add(reason)
        self._update_reading()

    def release_reading(self, reason: object) -> None:
        self._unread.discard(reason)
        self._update_reading()

    def _update_reading(self) -> None:
        if self.transport.is_closing():
            return
        if self._unread:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    @property
    def is_read(self) -> bool:
        return not self._unread

    # ---- to the peer --------------------------------------------------------------------

    @property
    def passes_bytes(self) -> bool:
        """Whether there is no need to look at messages."""
        watched = self._sockets.faults.frames.armed or self._sockets.journal.is_watched
        return not (watched or self._is_frozen or self._held is not None)

    def deliver(self, data: bytes, opcode: int = Opcode.BINARY, *, final: bool = True) -> None:
        """Send a message of the other side, unless a fault changes it."""
        sockets, frame = self._sockets, relay_frame(data) if opcode == Opcode.BINARY else None
        if sockets.journal.recording and self.is_open:
            name, kind = (frame.stream_id, frame.kind) if frame is not None else ("", None)
            sockets.journal.traffic.add(
                Message(self._direction, self.environment_id, data, name, kind)
            )
        outcome = sockets.faults.frames.apply(self._direction, frame, data)
        if outcome.seconds:
            self.stall_for(outcome.seconds)
        for one in outcome.frames:
            self.send(one, opcode, final=final)
        sockets.journal.changed()

    def send(self, data: bytes, opcode: int = Opcode.BINARY, *, final: bool = True) -> None:
        """Send a frame to the peer, or hold it back if stalled; nothing if frozen."""
        self.write(frame_header(Opcode(opcode), len(data), final=final) + data)

    def write(self, data: bytes) -> None:
        if self._held is not None:
            self._held.append(data)
            self._held_bytes += len(data)
            self._update_slow()
        elif not self._is_frozen:
            self.transport.write(data)

    def unsent(self) -> int:
        return self._held_bytes + self.transport.get_write_buffer_size()

    @property
    def holds_back(self) -> bool:
        return self._is_frozen or self._held is not None

    def pause_writing(self) -> None:
        self._is_full = True
        self._update_slow()

    def resume_writing(self) -> None:
        self._is_full = False
        self._update_slow()

    def _update_slow(self) -> None:
        is_slow = self._is_full or self._held_bytes > HIGH_WATER
        if is_slow != self._is_slow and not self._is_lost:
            self._is_slow = is_slow
            if is_slow:
                self.far.pause_writing()
            else:
                self.far.resume_writing()

    # ---- the end ------------------------------------------------------------------------

    def close(self, code: int, reason: str = "") -> None:
        """Send a close frame and hang up."""
        if not self._is_lost:
            self.send(close_payload(code, reason), Opcode.CLOSE)
            self.transport.close()
            self._lose()

    def abort(self) -> None:
        """Cut the connection without a close frame."""
        self.transport.abort()
        self._lose()

    def ends(self) -> None:
        """The other side has sent a close frame: the socket counts as closed."""
        self.is_open = False
        self._sockets.journal.changed()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose()
        self._sockets.discard(self)
        self._sockets.journal.changed()

    def _lose(self) -> None:
        if not self._is_lost:
            self._is_lost, self.is_open = True, False
            self._held, self._held_bytes = None, 0
            self.far.lost()
            self._sockets.journal.changed()

    # ---- faults -------------------------------------------------------------------------

    def freeze(self) -> None:
        """Half-open: the connection stays, nothing is read, answered or sent any more."""
        self._is_frozen = True
        self.hold_reading("frozen")

    def thaw(self) -> None:
        """Go on; messages sent in the meantime are lost."""
        self._is_frozen = False
        self.release_reading("frozen")
        self._read()

    def swallow_pings(self) -> None:
        """Pass on neither pings nor pongs of the peer; messages still pass."""
        self._swallows_pings = True

    def stall(self) -> None:
        """Hold back messages to send, and beyond a limit pause their sender."""
        if self._held is None:
            self._held = deque()

    def release(self) -> None:
        """Send the held back messages."""
        held, self._held, self._held_bytes = self._held, None, 0
        if self._is_lost:
            return
        for data in held or ():
            self.write(data)
        self._update_slow()

    def stall_for(self, seconds: float) -> None:
        self.stall()
        asyncio.get_running_loop().call_later(seconds, self.release)


class LinkTransport(asyncio.Transport):
    """The transport that a link of the real service gets; the far end of a socket."""

    def __init__(self, socket: Socket) -> None:
        super().__init__()
        self._socket = socket
        self._link: Any = None  # a RelayLink
        self._is_upgraded = False
        self._sent = bytearray()
        self._passed = bytearray()  # frames of the peer that the link has not read
        self._is_paused = False
        self._is_closing = False

    # ---- as far end ---------------------------------------------------------------------

    def frame_received(self, frame: WireFrame) -> None:
        self._passed += frame.raw
        self._feed()

    def _feed(self) -> None:
        while self._passed and not self._is_paused and not self._is_closing:
            piece = self._passed[:READ_BYTES]
            del self._passed[:READ_BYTES]
            self._link.get_buffer(-1)[: len(piece)] = piece
            self._link.buffer_updated(len(piece))

    def pause_writing(self) -> None:
        self._link.pause_writing()

    def resume_writing(self) -> None:
        self._link.resume_writing()

    def lost(self) -> None:
        self._is_closing = True
        self._link.connection_lost(None)

    # ---- as transport -------------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        # With TLS a link writes to its transport only, without it to the descriptor.
        return {"ssl_object": self, "socket": None}.get(
            name, self._socket.transport.get_extra_info(name, default)
        )

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._link = protocol

    def is_closing(self) -> bool:
        return self._is_closing or self._socket.transport.is_closing()

    def pause_reading(self) -> None:
        self._is_paused = True
        self._socket.hold_reading(self)

    def resume_reading(self) -> None:
        self._is_paused = False
        self._socket.release_reading(self)
        if self._passed:  # not at once: the link may be in the middle of a read
            asyncio.get_running_loop().call_soon(self._feed)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._socket.transport.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._socket.unsent()

    def write(self, data: Any) -> None:
        if not self._is_upgraded:
            self._is_upgraded = True
            self._socket.write(bytes(data))
        elif self._socket.passes_bytes and not self._sent and data[0] != 0x88:
            self._socket.transport.write(data)
        else:
            self._sent += data
            for frame in take_frames(self._sent):
                if frame.opcode == Opcode.BINARY:
                    self._socket.deliver(frame.body)
                    continue
                self._socket.write(frame.raw)
                if frame.opcode == Opcode.CLOSE:
                    self._socket.ends()

    def can_write_eof(self) -> bool:
        return self._socket.transport.can_write_eof() and not self._socket.holds_back

    def write_eof(self) -> None:
        self._socket.transport.write_eof()

    def close(self) -> None:
        self._socket.ends()
        self._socket.transport.close()

    def abort(self) -> None:
        self._socket.abort()


class WatchedUpgrade(NamedTuple):
    """An upgrade that the real service has granted, through a `Socket`. A front.TakeOver."""

    granted: TakeOver
    make_socket: Callable[[asyncio.Transport], Socket]

    def open(self, transport: asyncio.Transport, request: ServiceRequest, first: bytes) -> None:
        socket = self.make_socket(transport)
        socket.far = inner = LinkTransport(socket)
        self.granted.open(cast(asyncio.Transport, inner), request, b"")
        socket.start(first)

    def cancel(self) -> None:
        self.granted.cancel()
