"""FramedSocket: what both ends of a WebSocket do alike once it is open.

Bytes become events, and these are handed over as far as they are wanted; messages become frames,
gathered or at once, whole or in parts. The upgrade, the masks, who gets a message and how a
connection ends are the business of the two ends: `websocket` and `client_socket`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Protocol, cast

from exec_server.errors import ProtocolError
from exec_server.transports.frames import SENT_FRAME_BYTES, Event, FrameReader, Opcode

# Unsent bytes at which the producer is asked to stop, and at which to go on.
SEND_HIGH_BYTES = 524_288
SEND_LOW_BYTES = 131_072
# Shorter messages, such as most answers, are written at once. Others are gathered as long as
# they come in a row and are written together, for a call for each of them would take most of a
# stream's time. Not more than stays in a processor's cache.
DIRECT_BYTES = 4096
GATHERED_BYTES = 65_536
# How long a peer may take to answer our close frame, or to take a last answer, and to hang up.
CLOSE_SECONDS = 2.0
# Events handled in a row before others get their turn.
BURST = 64


class Producer(Protocol):
    """Who makes what is sent."""

    def sending_slow(self) -> None:
        """The peer does not take what we send: stop producing."""
        ...

    def sending_ready(self) -> None:
        """It has taken nearly everything."""
        ...


class FramedSocket(asyncio.Protocol):
    """A base for both ends; it has an event loop's socket and nothing else."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._descriptor = -1  # stays so if there is TLS between us and the socket
        self._frames: FrameReader | None = None  # from the upgrade on
        self._producer: Producer | None = None  # from then on too
        self._closing = False
        self._deaf = False  # what still arrives is dropped unseen
        self._receiving = True
        self._backlog = False  # there may be events among the bytes that we have
        self._slow = False
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        self._pong: bytes | None = None
        self._parts_turn: asyncio.Lock | None = None
        self._streaming = False
        self._behind_parts: list[tuple[Opcode, bytes]] = []
        self._behind_parts_bytes = 0
        self._writable: asyncio.Future[None] | None = None

    # ---- what the two ends do differently ---------------------------------------------

    def _heard(self) -> None:
        """More of a long frame has come."""

    def _handle(self, event: Event) -> None:
        """This has come, and is wanted, or we are closing."""
        raise NotImplementedError

    def _drained(self) -> None:
        """All that has come is handed over."""

    def _wants_more(self) -> bool:
        return self._receiving and not self._backlog

    def _violated(self, error: ProtocolError) -> None:
        """The peer broke the rules of WebSockets: end it."""
        raise NotImplementedError

    def _frame(self, opcode: Opcode, payload: bytes, *, final: bool = True) -> bytes:
        raise NotImplementedError

    def _send(self, opcode: Opcode, message: bytes) -> None:
        """Send a message that fits into a frame."""
        raise NotImplementedError

    def abort(self, why: str) -> None:
        """Drop the connection without a close frame."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(SEND_HIGH_BYTES, SEND_LOW_BYTES)

    # ---- receiving --------------------------------------------------------------------

    def _feed(self, data: bytes) -> None:
        """Take bytes of frames, and hand over what they make whole."""
        assert self._frames is not None
        self._frames.feed(data)
        if self._closing or not self._backlog:
            self._deliver()
        if self._frames.is_long and not self._deaf:
            self._receive_by(_Landing(self, self._frames))

    def landed(self, *, is_whole: bool) -> None:
        """More of a long frame has come."""
        if self._deaf:
            return
        self._heard()
        if self._closing or not self._backlog:
            self._deliver()
        if is_whole:
            self._receive_by(self)

    def _receive_by(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)
        if not self._transport.is_closing():
            # uvloop looks at the protocol only when it begins to read.
            self._transport.pause_reading()
            self._update_reading()

    def _deliver(self) -> None:
        """Hand over what has arrived, as far as it is wanted."""
        frames = self._frames
        assert frames is not None
        turns = BURST
        try:
            while self._closing or (self._receiving and turns):
                event = frames.next_event()
                if event is None:
                    self._set_backlog(backlog=False)
                    self._drained()
                    return
                self._handle(event)
                turns -= 1
        except ProtocolError as error:
            self._deaf = True
            self._violated(error)
            return
        self._set_backlog(backlog=True)
        if self._receiving:
            self._loop.call_soon(self._continue)  # after the others

    def _set_backlog(self, *, backlog: bool) -> None:
        """Read only when all is handed over: each read brings more than a receiver may take."""
        if backlog != self._backlog:
            self._backlog = backlog
            self._update_reading()

    def hold(self, *, receiving: bool) -> None:
        """Stop or go on taking messages from the peer."""
        if receiving == self._receiving:
            return
        self._receiving = receiving
        if receiving:
            # Not at once: whoever lets us go on may be in the middle of something. And nothing
            # is read before, for that could be the end, which would overtake what we have.
            self._backlog = True
            self._loop.call_soon(self._continue)
        self._update_reading()

    def _continue(self) -> None:
        if (self._receiving or self._closing) and not self._deaf:
            self._deliver()

    def _update_reading(self) -> None:
        if self._transport.is_closing():
            return
        if self._closing or self._wants_more():
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _answer_ping(self, payload: bytes) -> None:
        if self._slow:
            self._pong = payload  # only the last one, however many there are
        else:
            self._write_frame(Opcode.PONG, payload)

    # ---- sending ----------------------------------------------------------------------

    def _send_message(self, opcode: Opcode, message: bytes) -> None:
        """Send a message after those sent before. Never waits; watch `unsent`."""
        if self._closing:
            return
        if self._streaming:
            self._behind_parts.append((opcode, message))
            self._behind_parts_bytes += len(message)
        elif len(message) > SENT_FRAME_BYTES:
            self._write_fragments(opcode, message)
        else:
            self._send(opcode, message)

    def _gather(self, frame: bytes) -> None:
        self._gathered.append(frame)
        self._gathered_bytes += len(frame)
        if self._gathered_bytes >= GATHERED_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Write what was gathered; before anything else is written."""
        if self._gathered:
            frames = b"".join(self._gathered)
            self._gathered.clear()
            self._gathered_bytes = 0
            self._write(frames)

    def _write(self, data: bytes) -> None:
        # Without the transport's own queue if that is empty: it would write later, and piece
        # by piece. A closing transport may close the descriptor, and its number become a
        # stranger's.
        if self._transport.is_closing():
            return
        if self._descriptor >= 0 and not self._transport.get_write_buffer_size():
            try:
                sent = os.write(self._descriptor, data)
            except OSError:
                sent = 0  # full, or broken, which the transport will find out too
            if sent == len(data):
                return
            self._transport.write(memoryview(data)[sent:])
        else:
            self._transport.write(data)

    def _write_frame(self, opcode: Opcode, payload: bytes, *, final: bool = True) -> None:
        self._flush()
        self._write(self._frame(opcode, payload, final=final))

    def _write_fragments(self, opcode: Opcode, message: bytes) -> None:
        for start in range(0, len(message), SENT_FRAME_BYTES):
            piece = message[start : start + SENT_FRAME_BYTES]
            self._write_frame(opcode, piece, final=start + SENT_FRAME_BYTES >= len(message))
            opcode = Opcode.CONTINUATION

    async def _send_in_parts(self, opcode: Opcode, parts: AsyncIterator[bytes]) -> None:
        """Send one message as fragments; other messages wait until it is complete.

        Cancelled, or left by an exception of `parts`, it ends the connection: half a message
        cannot be taken back.
        """
        if self._parts_turn is None:
            self._parts_turn = asyncio.Lock()
        async with self._parts_turn:
            self._streaming = True
            self._tell_slow()
            try:
                async for part in parts:
                    await self._wait_writable()
                    if self._closing:
                        return
                    self._write_frame(opcode, part, final=False)
                    opcode = Opcode.CONTINUATION
                if not self._closing:
                    self._write_frame(opcode, b"")
            except BaseException:
                if opcode is Opcode.CONTINUATION:
                    self.abort("a message could not be completed")
                raise
            finally:
                self._streaming = False
                self._send_held_back()

    def _send_held_back(self) -> None:
        held, self._behind_parts = self._behind_parts, []
        self._behind_parts_bytes = 0
        for opcode, message in held:
            self._send_message(opcode, message)
        self._tell_ready()

    async def _wait_writable(self) -> None:
        while self._slow and not self._closing:
            self._writable = self._loop.create_future()
            await self._writable

    def _wake_writer(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    def unsent(self) -> int:
        """Bytes that the peer has not taken yet."""
        queued = self._transport.get_write_buffer_size()
        return queued + self._gathered_bytes + self._behind_parts_bytes

    def pause_writing(self) -> None:
        self._slow = True
        self._tell_slow()

    def resume_writing(self) -> None:
        self._slow = False
        self._wake_writer()
        self._tell_ready()

    def _tell_slow(self) -> None:
        if self._producer is not None and not self._closing:
            self._producer.sending_slow()

    def _tell_ready(self) -> None:
        if self._slow or self._streaming or self._closing:
            return
        if self._pong is not None:
            self._write_frame(Opcode.PONG, self._pong)
            self._pong = None
        if self._producer is not None:
            self._producer.sending_ready()


class _Landing(asyncio.BufferedProtocol):
    """Stands in for a socket while it receives the rest of a long frame, where that belongs.

    Not all the time, though it could: for short messages it takes longer.
    """

    def __init__(self, owner: FramedSocket, frames: FrameReader) -> None:
        self._frames = frames
        self._owner = owner

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._frames.landing()

    def buffer_updated(self, nbytes: int) -> None:
        self._owner.landed(is_whole=self._frames.landed(nbytes))

    def eof_received(self) -> bool | None:
        return self._owner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._owner.pause_writing()

    def resume_writing(self) -> None:
        self._owner.resume_writing()
