"""The WebSocket listener: upgrade, frames, keep-alive and back-pressure of each connection."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import cast

from exec_server.errors import ProtocolError
from exec_server.rpc.stream import MessageReceiver, MessageStream
from exec_server.transports.auth import Authenticator
from exec_server.transports.frames import (
    MESSAGE_BYTES,
    SENT_FRAME_BYTES,
    Event,
    FrameReader,
    Opcode,
    close_answer,
    close_payload,
    frame_header,
    text_frame,
)
from exec_server.transports.http_head import (
    HEAD_BYTES,
    HttpRefusal,
    RequestHead,
    check_browser,
    check_upgrade,
    parse_head,
    refusal_answer,
    upgrade_answer,
)
from exec_server.transports.room import Room
from exec_server.transports.wakefulness import Wakefulness

log = logging.getLogger(__name__)

# Open sockets, upgraded or not. Beyond it a new one is answered 503, and is hung up on without
# an answer when even those who wait for theirs are many.
MAX_CONNECTIONS = 4096
REFUSED_CONNECTIONS = 256
# From accept to a complete upgrade request; clients give up after 10 s themselves.
HANDSHAKE_SECONDS = 10.0
# Unsent bytes at which output is no longer read from children, and at which it is again.
SEND_HIGH_BYTES = 524_288
SEND_LOW_BYTES = 131_072
# Shorter messages, such as most answers, are written at once. Longer ones, such as output, are
# gathered for as long as they come in a row, and written together: a call for each of them
# would take most of a stream's time. Not more than stays in a processor's cache.
DIRECT_BYTES = 4096
GATHERED_BYTES = 65_536
# As often as the reference. A peer that has not answered by the next ping is gone.
PING_SECONDS = 30.0
# How long a peer has to show that it lives when somebody wants its session.
PROBE_SECONDS = 3.0
# How long a peer may take to answer our close frame, or to take a last answer.
CLOSE_SECONDS = 2.0
# The same when the whole server ends, which should not take longer than a blink.
FAREWELL_SECONDS = 0.25
# Messages above LARGE_BYTES must find room here before more of them is read, whoever sends
# them, so that many clients together cannot make the server hold more than this.
LARGE_BYTES = 1_048_576
RECEIVING_BYTES = 4 * MESSAGE_BYTES
# A large message that makes no progress gives its room back, and so does one that trickles
# while others wait for room.
STALL_SECONDS = 30.0
TRICKLE_BYTES_PER_SECOND = 262_144
# Events handled in a row before other connections get their turn.
BURST = 64
_TICK_SECONDS = 5.0

GOING_AWAY = 1001
POLICY_VIOLATION = 1008


@dataclass(frozen=True, slots=True)
class Settings:
    """What is the same for all connections of a listener."""

    receiver: Callable[[MessageStream], MessageReceiver]
    authenticate: Authenticator | None = None
    allowed_hosts: frozenset[str] | None = None
    room: Room = field(default_factory=lambda: Room(RECEIVING_BYTES))
    wakefulness: Wakefulness = field(default_factory=Wakefulness)


class WebSocketStream(asyncio.Protocol):
    """One accepted socket, from its first byte; a MessageStream once it is upgraded."""

    is_strict = False

    def __init__(self, settings: Settings, streams: set[WebSocketStream]) -> None:
        self._settings = settings
        self._streams = streams
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self.origin = ""
        self._descriptor = -1
        self._head = b""
        self._frames: FrameReader | None = None  # from the upgrade on
        self._receiver: MessageReceiver | None = None
        self._timer: asyncio.TimerHandle | None = None  # handshake, then probe, then close
        self._closing = False
        self._deaf = False  # what still arrives is dropped unseen
        self._lost = False
        self._receiving = True
        self._backlog = False  # there may be events among the bytes that we have
        self._reserved = 0
        self._reserved_at = 0.0
        self._waiting_for_room = False
        self._slow = False
        self._answered = False  # a message was written at once
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        self._pong: bytes | None = None
        self._parts_turn: asyncio.Lock | None = None
        self._streaming = False
        self._behind_parts: list[bytes] = []
        self._behind_parts_bytes = 0
        self._writable: asyncio.Future[None] | None = None
        self._last_heard = self._loop.time()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self._pinged: float | None = None  # when the oldest unanswered ping was sent

    # ---- the socket -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(SEND_HIGH_BYTES, SEND_LOW_BYTES)
        self.origin = _origin(transport.get_extra_info("peername"))
        self._streams.add(self)
        if len(self._streams) > MAX_CONNECTIONS + REFUSED_CONNECTIONS:
            self.abort("too many connections")
            return
        if len(self._streams) > MAX_CONNECTIONS:
            self._refuse(HttpRefusal(503, "too many connections"))
            return
        raw = transport.get_extra_info("socket")
        self._descriptor = raw.fileno()
        if raw.family != socket.AF_UNIX:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._timer = self._loop.call_later(HANDSHAKE_SECONDS, self.abort, "no upgrade request")

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._last_heard = self._loop.time()
        self._pinged = None
        if self._frames is None:
            self._upgrade(data)
        else:
            if self._timer is not None and not self._closing:
                self._timer.cancel()  # the probed peer lives
                self._timer = None
                self._update_reading()
            message = self._frames.whole_message(data) if self._receiving else None
            if message is not None and not self._closing:
                assert self._receiver is not None
                self._answered = False
                self._receiver.message_received(message)
                if self._answered:
                    self._settings.wakefulness.extend()
                return
            self._frames.feed(data)
            if self._closing or not self._backlog:
                self._deliver()

    def eof_received(self) -> bool:
        self._hang_up()
        return False  # the transport closes itself: half of a link is of no use to anybody

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.discard(self)
        self.gone.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
        self._closing = True
        self._release_room()
        self._wake_writer()
        self._lose()

    def _lose(self) -> None:
        if not self._lost:
            self._lost = True
            if self._receiver is not None:
                self._receiver.link_lost()

    def abort(self, why: str) -> None:
        log.info("%s: cut off: %s", self.origin, why)
        self._transport.abort()

    # ---- the upgrade ------------------------------------------------------------------

    def _upgrade(self, data: bytes) -> None:
        """Answer the requests that have arrived, up to the one that makes this a WebSocket."""
        self._head += data
        while self._frames is None and not self._deaf:
            head, end, rest = self._head.partition(b"\r\n\r\n")
            if not end:
                if len(self._head) > HEAD_BYTES:
                    self._refuse(HttpRefusal(431))
                return
            self._head = rest
            self._answer_request(head)

    def _answer_request(self, head: bytes) -> None:
        request = None
        try:
            request = parse_head(head)
            check_browser(request, self._settings.allowed_hosts)
            check_upgrade(request)
            if self._settings.authenticate is not None:
                self._settings.authenticate(request.headers)
        except HttpRefusal as refusal:
            self._refuse(refusal, request)
            return
        assert self._timer is not None
        self._timer.cancel()
        self._timer = None
        self._transport.write(upgrade_answer(request))
        self._frames = FrameReader()
        self._receiver = self._settings.receiver(self)
        rest, self._head = self._head, b""
        if rest:
            self._frames.feed(rest)
            self._deliver()

    def _refuse(self, refusal: HttpRefusal, request: RequestHead | None = None) -> None:
        """Answer; whoever asked properly may ask again, as long as the handshake may take."""
        if refusal.status >= 400:
            log.info("%s: refused: %s", self.origin, refusal)
        self._transport.write(refusal_answer(refusal, request))
        # Somebody who asks again and again without reading the answers has had his chance.
        if request is None or not request.keeps_alive() or self._slow:
            # What the peer still sends is read and dropped until it hangs up: closing a socket
            # with unread bytes resets it, and the reset could overtake our answer.
            self._transport.write_eof()
            self._deaf = True
            self._hang_up()

    # ---- receiving --------------------------------------------------------------------

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
                    break
                if self._reserved:
                    self._release_room()
                self._handle(event)
                turns -= 1
            else:
                self._set_backlog(backlog=True)
                if self._receiving:
                    self._loop.call_soon(self._continue)  # after the other connections
                return
        except ProtocolError as error:
            log.info("%s: %s", self.origin, error)
            self._deaf = True
            self.close(error.close_code, error.reason)
            return
        if not self._closing:
            self._reserve_room(frames.announced())

    def _set_backlog(self, *, backlog: bool) -> None:
        """Read only when all is handed over: each read brings more than a receiver may take."""
        if backlog != self._backlog:
            self._backlog = backlog
            self._update_reading()

    def _handle(self, event: Event) -> None:
        if event.opcode is Opcode.TEXT or event.opcode is Opcode.BINARY:
            if not self._closing:
                assert self._receiver is not None
                self._receiver.message_received(event.payload)
        elif event.opcode is Opcode.PING:
            if self._slow:
                self._pong = event.payload  # only the last one, however many there are
            elif not self._closing:
                self._write_frame(Opcode.PONG, event.payload)
        elif event.opcode is Opcode.CLOSE:
            if not self._closing:
                self._write_frame(Opcode.CLOSE, close_answer(event.payload))
                self._hang_up()
            self._deaf = True
            self._transport.close()

    def hold(self, *, receiving: bool) -> None:
        if receiving == self._receiving:
            return
        self._receiving = receiving
        if receiving:
            # Not at once: whoever lets us go on may be in the middle of something.
            self._loop.call_soon(self._continue)
        self._update_reading()

    def _continue(self) -> None:
        if (self._receiving or self._closing) and not self._deaf:
            self._deliver()

    def _update_reading(self) -> None:
        if self._transport.is_closing():
            return
        wanted = self._receiving and not self._waiting_for_room and not self._backlog
        if wanted or self._closing:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _reserve_room(self, size: int) -> None:
        """Read more of a large message only when there is room for all of it."""
        if size <= LARGE_BYTES or self._reserved or self._waiting_for_room:
            return
        self._reserved = size
        self._reserved_at = self._loop.time()
        if not self._settings.room.take(size, self._room_granted):
            self._waiting_for_room = True
            self._update_reading()

    def _room_granted(self) -> None:
        self._waiting_for_room = False
        self._last_heard = self._reserved_at = self._loop.time()
        self._update_reading()

    def _release_room(self) -> None:
        if self._waiting_for_room:
            self._settings.room.cancel(self._room_granted)
            self._waiting_for_room = False
        elif self._reserved:
            self._settings.room.give_back(self._reserved)
        self._reserved = 0

    # ---- sending ----------------------------------------------------------------------

    def send(self, message: bytes) -> None:
        if self._closing:
            return
        if self._streaming:
            self._behind_parts.append(message)
            self._behind_parts_bytes += len(message)
        elif len(message) > SENT_FRAME_BYTES:
            self._write_fragments(message)
        elif len(message) > DIRECT_BYTES or self._gathered:
            self._gather(text_frame(message))
        else:
            self._answered = True
            self._write(text_frame(message))

    def _gather(self, frame: bytes) -> None:
        if not self._gathered:
            self._loop.call_soon(self._flush)
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
        if not self._transport.get_write_buffer_size() and not self._transport.is_closing():
            try:
                sent = os.write(self._descriptor, data)
            except OSError:
                sent = 0  # full, or broken, which the transport will find out too
            if sent == len(data):
                return
            data = data[sent:]
        self._transport.write(data)

    def _write_frame(self, opcode: Opcode, payload: bytes, *, final: bool = True) -> None:
        self._flush()
        self._transport.write(frame_header(opcode, len(payload), final=final) + payload)

    def _write_fragments(self, message: bytes) -> None:
        opcode = Opcode.TEXT
        for start in range(0, len(message), SENT_FRAME_BYTES):
            piece = message[start : start + SENT_FRAME_BYTES]
            final = start + SENT_FRAME_BYTES >= len(message)
            self._write_frame(opcode, piece, final=final)
            opcode = Opcode.CONTINUATION

    async def send_parts(self, parts: AsyncIterator[bytes], size: int) -> None:
        """Send one message as fragments; other messages wait until it is complete."""
        if self._parts_turn is None:
            self._parts_turn = asyncio.Lock()
        async with self._parts_turn:
            self._streaming = True
            self._tell_slow()
            opcode = Opcode.TEXT
            try:
                async for part in parts:
                    await self._wait_writable()
                    if self._closing:
                        return
                    self._write_frame(opcode, part, final=False)
                    opcode = Opcode.CONTINUATION
                self._write_frame(opcode, b"")
            except BaseException:
                if opcode is Opcode.CONTINUATION:
                    self.abort("a message could not be completed")  # the client has half of it
                raise
            finally:
                self._streaming = False
                self._send_held_back()

    def _send_held_back(self) -> None:
        held, self._behind_parts = self._behind_parts, []
        self._behind_parts_bytes = 0
        for message in held:
            self.send(message)
        self._tell_ready()

    async def _wait_writable(self) -> None:
        while self._slow and not self._closing:
            self._writable = self._loop.create_future()
            await self._writable

    def _wake_writer(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    def unsent(self) -> int:
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
        if self._receiver is not None and not self._closing:
            self._receiver.sending_slow()

    def _tell_ready(self) -> None:
        if self._slow or self._streaming or self._closing:
            return
        if self._pong is not None:
            self._write_frame(Opcode.PONG, self._pong)
            self._pong = None
        if self._receiver is not None:
            self._receiver.sending_ready()

    # ---- liveness and the end ---------------------------------------------------------

    def tick(self, now: float) -> None:
        """Ping a quiet peer, and give up one that did not answer or stalls a large message."""
        if self._frames is None or self._closing:
            return
        if self._reserved and not self._waiting_for_room and self._receiving:
            patience = STALL_SECONDS + self._reserved / TRICKLE_BYTES_PER_SECOND
            trickles = self._settings.room.is_wanted and now - self._reserved_at > patience
            if trickles or now - self._last_heard > STALL_SECONDS:
                self.close(POLICY_VIOLATION, "message stalled")
                return
        if self._slow or not self._receiving or self._waiting_for_room:
            # It cannot get our ping, or we do not read its answer. That is no sign of death.
            self._pinged = None
        elif self._pinged is not None:
            if now - self._pinged >= PING_SECONDS:
                self.abort("no answer to a ping")
        elif now - self._last_heard >= PING_SECONDS:
            self._pinged = now
            self._write_frame(Opcode.PING, b"")

    def probe(self) -> None:
        if self._closing or self._timer is not None:
            return
        self._write_frame(Opcode.PING, b"")
        self._transport.resume_reading()
        self._timer = self._loop.call_later(
            PROBE_SECONDS, self.abort, "its session is wanted elsewhere and it is silent"
        )

    def close(self, code: int, reason: str) -> None:
        if self._closing:
            return
        if self._frames is None:
            self._closing = True
            self._transport.close()
            return
        self._write_frame(Opcode.CLOSE, close_payload(code, reason))
        # The peer sees that there is no more to come. Its own frames are read and dropped until
        # it hangs up, for the reason given in _refuse.
        self._transport.write_eof()
        self._hang_up()

    def _hang_up(self) -> None:
        """The link is over for the receiver; the peer has a moment to take our last words."""
        if self._closing:
            return
        self._closing = True
        self._release_room()
        self._update_reading()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(CLOSE_SECONDS, self._transport.abort)
        self._wake_writer()
        self._loop.call_soon(self._lose)


def _origin(peer: tuple[str, int] | None) -> str:
    # A peer that has hung up already has no address any more.
    host, port = peer[:2] if peer is not None else ("unknown", 0)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return f"websocket JSON-RPC message from exec-server websocket {address}"


class WebSocketListener:
    """A bound socket and its connections."""

    def __init__(self, bound: socket.socket, settings: Settings) -> None:
        self._socket = bound
        self._settings = settings
        self._streams: set[WebSocketStream] = set()
        self._server: asyncio.Server | None = None
        self._ticker: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: WebSocketStream(self._settings, self._streams), sock=self._socket
        )
        self._tick()

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for stream in list(self._streams):
            stream.tick(now)
        self._ticker = loop.call_later(_TICK_SECONDS, self._tick)

    async def close(self) -> None:
        """Stop accepting, tell all peers that we go away, and hang up."""
        assert self._server is not None
        assert self._ticker is not None
        self._ticker.cancel()
        self._server.close()
        for stream in list(self._streams):
            stream.close(GOING_AWAY, "server is shutting down")
        waits = [stream.gone for stream in self._streams]
        if waits:
            await asyncio.wait(waits, timeout=FAREWELL_SECONDS)
        for stream in list(self._streams):
            stream.abort("server is shutting down")
