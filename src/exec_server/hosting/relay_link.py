"""RelayLink: one WebSocket of the rendezvous, read and written in as few steps as possible.

A second frame loop beside `net.websocket.socket.FramedSocket`, for whole binary frames only: a read
of 16 frames of 1 KiB takes half as long as there (`python -m bench.alternatives`), and frames are
all that a node handles. A test holds both loops to the same messages, answers and errors. A read
may bring many thousands of tiny frames, so a link handles some and then yields to the event loop.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from exec_server.errors import ProtocolError
from exec_server.net.liveness import Action, KeepAlive
from exec_server.net.socket_options import reset_on_close
from exec_server.net.websocket.frames import (
    FRAGMENTS_IN_A_ROW,
    UNFINISHED,
    Event,
    FrameReader,
    Opcode,
    apply_mask,
    close_answer,
    close_payload,
    frame_header,
)
from exec_server.net.websocket.socket import Cause, FrameWriter, State, next_state
from exec_server.relay.frames import FRAME_BYTES

# As the peers do: a ping every 30 s, gone 60 s after a ping without a pong.
PING_SECONDS: Final = 30.0
PONG_SECONDS: Final = 60.0
# How long a peer may take to answer a close frame and to hang up.
CLOSE_SECONDS: Final = 2.0
# One read: as much as uvloop reads at once. An incomplete frame stands before it.
READ_BYTES: Final = 262_144
# Frames of one link that are handled before it is the turn of others: a few milliseconds. A full
# read has fewer of ordinary size. After a full read with some of them it is their turn too, since
# libuv would read up to 32 times in a row.
TURN_FRAMES: Final = 256
_FULL_READ_FRAMES: Final = 32

_BINARY: Final = 0x82  # the first byte of a message in one frame
_LONGEST_HEADER: Final = 14

# Received bytes are handled before the next read of any link, so one buffer is enough for all.
_buffer = bytearray(FRAME_BYTES + _LONGEST_HEADER + READ_BYTES)
_view = memoryview(_buffer)
# Links with gathered frames.
_unflushed: list[RelayLink] = []


class LinkEnd(Protocol):
    """The executor or client behind a link."""

    def frame_received(self, frame: bytes) -> None:
        """A binary message has arrived."""
        ...

    def bytes_read(self, count: int, messages: int, frames: int) -> None:
        """Bytes were received, or `frames` that waited are handled; `messages` were binary."""
        ...

    def text_received(self) -> None:
        """A text message has arrived, which no peer may send."""
        ...

    def writing_changed(self, *, is_paused: bool) -> None:
        """The unsent bytes have crossed the limit of the link, or have been sent."""
        ...

    def link_lost(self) -> None:
        """The link is gone, or is about to close: nothing more is delivered. Called once."""
        ...


class RelayLink(asyncio.BufferedProtocol):
    """One upgraded socket."""

    __slots__ = (
        "_close_timer",
        "_end",
        "_holds",
        "_incomplete",
        "_keep_alive",
        "_loop",
        "_pending",
        "_pong",
        "_reader",
        "_rest_waits",
        "_state",
        "_transport",
        "_turn",
        "_writer",
        "is_writing_paused",
        "token_id",
    )

    def __init__(self, transport: asyncio.Transport, token_id: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self.token_id = token_id
        is_plain = transport.get_extra_info("ssl_object") is None
        descriptor = transport.get_extra_info("socket").fileno() if is_plain else -1
        self._writer = FrameWriter(transport, descriptor)
        self._keep_alive = KeepAlive(self._loop.time(), PING_SECONDS, PONG_SECONDS)
        self._reader: FrameReader | None = None  # while frames take the slow path
        self._state = State.OPEN
        self._incomplete = b""  # the start of a frame; more if the rest of a read waits
        self._rest_waits = False  # for the next turn, here or in the reader
        self._turn: asyncio.Handle | None = None
        self._pending: list[bytes] = []  # gathered frames
        self._pong: bytes | None = None  # not sent yet, because the peer does not read
        self._holds = 0
        self._close_timer: asyncio.TimerHandle | None = None
        self.is_writing_paused = False

    def start(self, end: LinkEnd, first: bytes, unsent_bytes: int) -> None:
        """Deliver to `end` from now on, beginning with bytes that were read already."""
        self._end = end
        self._transport.set_write_buffer_limits(unsent_bytes, unsent_bytes // 4)
        # uvloop looks at the protocol only when it begins to read.
        self._transport.pause_reading()
        self._transport.set_protocol(self)
        for start in range(0, len(first), READ_BYTES):
            piece = first[start : start + READ_BYTES]
            self.get_buffer(-1)[: len(piece)] = piece
            self.buffer_updated(len(piece))
            if self._rest_waits:
                self._keep(first[start + READ_BYTES :])
                break
        self._update_reading()

    @property
    def is_open(self) -> bool:
        return self._state is State.OPEN

    def get_buffer(self, sizehint: int) -> memoryview:
        incomplete = self._incomplete
        size = len(incomplete)
        if size:
            _view[:size] = incomplete
        return _view[size : size + READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        end = len(self._incomplete) + nbytes
        self._incomplete = b""
        self._handle(end, nbytes)

    def _handle(self, end: int, nbytes: int) -> None:
        """Handle the frames in the buffer, of which `nbytes` were just received."""
        if self._state is not State.OPEN:
            self._find_close(end)
            return
        offset = messages = others = 0
        if self._reader is None:
            offset, messages = self._read_frames(end)
        if (offset < end or self._reader is not None) and self._state is State.OPEN:
            more, others = self._read_slowly(_view[offset:end])
            messages += more
        frames = messages + others
        self._end.bytes_read(nbytes, messages, frames)
        flush_links()
        if nbytes == READ_BYTES and frames > _FULL_READ_FRAMES and self._state is State.OPEN:
            self._rest_waits = True
        if self._rest_waits:
            self._update_reading()

    def _take_turn(self) -> None:
        self._turn = None
        is_held = self._holds and self._state is State.OPEN
        if self._transport.is_closing() or is_held or not self._rest_waits:
            return
        rest, self._incomplete = self._incomplete, b""
        _view[: len(rest)] = rest
        self._rest_waits = False
        self._handle(len(rest), 0)
        self._update_reading()

    def _keep(self, data: bytes) -> None:
        if self._reader is not None:
            self._reader.feed(data)
        else:
            self._incomplete += data

    def _read_frames(self, end: int) -> tuple[int, int]:
        """Deliver whole frames; the offset of the first byte that is not handled, and a count."""
        buffer, view, receive = _buffer, _view, self._end.frame_received
        offset = frames = 0
        while end - offset > 5 and buffer[offset] == _BINARY:
            size = buffer[offset + 1] ^ 0x80  # above 127 without a mask, which is an error
            mask = offset + 2
            if size > 125:
                if size == 126 and end - offset > 7:
                    size = buffer[mask] << 8 | buffer[mask + 1]
                    mask += 2
                elif size == 127 and end - offset > 13:
                    size = int.from_bytes(buffer[mask : mask + 8], "big")
                    mask += 8
                    if size > FRAME_BYTES:
                        return offset, frames
                elif size < 128:
                    break
                else:
                    return offset, frames
            start = mask + 4
            stop = start + size
            if stop > end:
                break
            receive(apply_mask(view[start:stop], buffer[mask:start]))
            frames += 1
            offset = stop
            if self._state is not State.OPEN:
                return end, frames
            if frames == TURN_FRAMES:
                self._rest_waits = True
                break
        else:
            is_error = end - offset > 1 and buffer[offset + 1] < 0x80
            if is_error or (offset < end and buffer[offset] != _BINARY):
                return offset, frames
        self._incomplete = bytes(view[offset:end])
        return end, frames

    def _read_slowly(self, data: memoryview) -> tuple[int, int]:
        """Deliver by the usual codec until the fast path can go on; counts messages and others."""
        reader = self._reader
        if reader is None:
            reader = self._reader = FrameReader(message_bytes=FRAME_BYTES)
        reader.feed(bytes(data))
        messages = frames = 0
        try:
            while self._state is State.OPEN and (event := reader.next_event()) is not None:
                messages += self._take(event)
                frames += FRAGMENTS_IN_A_ROW if event is UNFINISHED else 1
                if frames >= TURN_FRAMES:
                    self._rest_waits = self._state is State.OPEN
                    return messages, frames - messages
        except ProtocolError as error:
            self.close(error.close_code, error.reason)
        if self._state is State.OPEN:
            rest = reader.take_incomplete()
            if rest is not None:
                self._reader, self._incomplete = None, rest
        return messages, frames - messages

    def _take(self, event: Event) -> bool:
        if event.opcode is Opcode.BINARY:
            self._end.frame_received(event.payload)
            return True
        if event.opcode is Opcode.TEXT:
            self._end.text_received()
        elif event.opcode is Opcode.PING:
            self._answer_ping(event.payload)
        elif event.opcode is Opcode.PONG:
            self._keep_alive.answered()
        elif event.opcode is Opcode.CLOSE:
            self._answer_close(event.payload)
        return False

    def _answer_ping(self, payload: bytes) -> None:
        if self.is_writing_paused:
            self._pong = payload  # of many pings the last one is answered
        else:
            self._write_frame(Opcode.PONG, payload)

    def hold_reading(self) -> None:
        """Read no more until as many calls of `release_reading`."""
        self._holds += 1
        if self._holds == 1:
            self._update_reading()

    def release_reading(self) -> None:
        self._holds -= 1
        if not self._holds:
            self._update_reading()

    def _update_reading(self) -> None:
        if self._transport.is_closing():
            return
        # A closing link is read: unread bytes would reset it, before the peer has our last frame.
        is_held = self._holds and self._state is State.OPEN
        if is_held or self._rest_waits:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()
        if self._rest_waits and not is_held and self._turn is None:
            self._turn = self._loop.call_soon(self._take_turn)

    def send(self, frame: bytes) -> None:
        """Send a message with the others that this read has brought, or that follow at once."""
        pending = self._pending
        if not pending:
            _unflushed.append(self)
        pending.append(frame_header(Opcode.BINARY, len(frame)))
        pending.append(frame)

    def flush(self) -> None:
        if self._pending and self._state is State.OPEN:
            frames = b"".join(self._pending)
            self._pending.clear()  # first: writing may pause, which may send a frame
            self._writer.write(frames)

    def _write_frame(self, opcode: Opcode, payload: bytes) -> None:
        self._writer.write(frame_header(opcode, len(payload)) + payload)

    def unsent(self) -> int:
        return 0 if self._transport.is_closing() else self._transport.get_write_buffer_size()

    def pause_writing(self) -> None:
        self.is_writing_paused = True
        if self._state is State.OPEN:
            self._end.writing_changed(is_paused=True)

    def resume_writing(self) -> None:
        self.is_writing_paused = False
        if self._state is State.OPEN:
            if self._pong is not None:
                self._write_frame(Opcode.PONG, self._pong)
                self._pong = None
            self._end.writing_changed(is_paused=False)

    def tick(self, now: float) -> None:
        """Ping the peer; end one that does not answer."""
        if self._state is State.OPEN:
            can_answer = not (self._holds or self.is_writing_paused)
            action = self._keep_alive.check(now, can_answer=can_answer)
            if action is Action.GIVE_UP:
                self.abort()
            elif action is Action.PING:
                self._write_frame(Opcode.PING, b"")

    def close(self, code: int, reason: str) -> None:
        """Send a close frame; the link ends when the peer answers it, or hangs up."""
        if self._state is State.OPEN:
            self.flush()
            self._write_frame(Opcode.CLOSE, close_payload(code, reason))
            self._end_writing(Cause.CLOSE_SENT)

    def _answer_close(self, payload: bytes) -> None:
        self.flush()
        self._write_frame(Opcode.CLOSE, close_answer(payload))
        self._end_writing(Cause.CLOSE_RECEIVED)

    def _end_writing(self, cause: Cause) -> None:
        self._change(cause)
        self._close_timer = self._loop.call_later(CLOSE_SECONDS, self._transport.abort)
        if self._state is State.DISCARDING:
            self._transport.close()
        elif self._transport.can_write_eof():
            self._transport.write_eof()

    def _find_close(self, end: int) -> None:
        """Drop what arrives after our close frame, up to the peer's, which ends the link."""
        if self._state is State.CLOSING:
            if self._reader is None:
                self._reader = FrameReader(message_bytes=FRAME_BYTES)
            self._reader.feed(bytes(_view[:end]))
            try:
                for _ in range(TURN_FRAMES):
                    event = self._reader.next_event()
                    if event is None:
                        return
                    if event.opcode is Opcode.CLOSE:
                        self._change(Cause.CLOSE_RECEIVED)
                        self._transport.close()
                        return
            except ProtocolError:
                self._change(Cause.PROTOCOL_ERROR)
                self._transport.close()
                return
            self._rest_waits = True
            self._update_reading()

    def abort(self) -> None:
        """Drop the link without a close frame, and what is unsent with it."""
        self._change(Cause.ABORTED)
        # Otherwise the kernel would go on to offer the bytes that the peer does not take.
        raw = self._transport.get_extra_info("socket")
        if raw is not None:
            reset_on_close(raw)
        self._transport.abort()

    def eof_received(self) -> bool:
        self._change(Cause.EOF)
        return False  # the transport closes itself

    def connection_lost(self, exc: Exception | None) -> None:
        if self._close_timer is not None:
            self._close_timer.cancel()
        self._change(Cause.LOST)

    def _change(self, cause: Cause) -> None:
        was_open = self._state is State.OPEN
        self._state = next_state(self._state, cause) or self._state
        if was_open and self._state is not State.OPEN:
            self._pending.clear()
            self._incomplete = b""
            self._reader = None
            self._rest_waits = False
            self._update_reading()
            self._end.link_lost()


def flush_links() -> None:
    """Write all gathered frames."""
    while _unflushed:
        _unflushed.pop().flush()
