"""The WebSocket listener: upgrade, frames, keep-alive and back-pressure of each connection."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from exec_server.errors import ProtocolError
from exec_server.rpc.stream import MessageReceiver, MessageStream
from exec_server.transports.auth import Authenticator
from exec_server.transports.framed_socket import (
    CLOSE_SECONDS,
    DIRECT_BYTES,
    FramedSocket,
)
from exec_server.transports.frames import (
    MESSAGE_BYTES,
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
# As often as the reference. A peer that has not answered by the next ping is gone.
PING_SECONDS = 30.0
# How long a peer has to show that it lives when somebody wants its session.
PROBE_SECONDS = 3.0
# How long peers may take to hang up when the server ends, which should be done in a blink.
FAREWELL_SECONDS = 0.25
# Messages above LARGE_BYTES must find room here before more of them is read, whoever sends
# them, so that many clients together cannot make the server hold more than this.
LARGE_BYTES = 1_048_576
RECEIVING_BYTES = 4 * MESSAGE_BYTES
# A large message that makes no progress gives its room back, and so does one that trickles
# while others wait for room.
STALL_SECONDS = 30.0
TRICKLE_BYTES_PER_SECOND = 262_144
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


class WebSocketStream(FramedSocket):
    """One accepted socket, from its first byte; a MessageStream once it is upgraded."""

    is_strict = False

    def __init__(self, settings: Settings, streams: set[WebSocketStream]) -> None:
        super().__init__()
        self._settings = settings
        self._streams = streams
        self.origin = ""
        self._head = b""
        self._receiver: MessageReceiver | None = None  # from the upgrade on
        self._timer: asyncio.TimerHandle | None = None  # handshake, then probe, then close
        self._lost = False
        self._reserved = 0
        self._reserved_at = 0.0
        self._waiting_for_room = False
        self._answered = False  # a message was written at once
        self._last_heard = self._loop.time()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self._pinged: float | None = None  # when the oldest unanswered ping was sent

    # ---- the socket -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
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
        self._heard()
        if self._frames is None:
            self._upgrade(data)
            return
        message = self._frames.whole_message(data) if self._receiving else None
        if message is not None and not self._closing:
            assert self._receiver is not None
            self._answered = False
            self._receiver.message_received(message)
            if self._answered:
                self._settings.wakefulness.extend()
            return
        self._feed(data)

    def _heard(self) -> None:
        self._last_heard = self._loop.time()
        self._pinged = None
        if self._timer is not None and self._frames is not None and not self._closing:
            self._timer.cancel()  # the probed peer lives
            self._timer = None
            self._update_reading()

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
        self._receiver = self._producer = self._settings.receiver(self)
        rest, self._head = self._head, b""
        if rest:
            self._feed(rest)

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

    def _handle(self, event: Event) -> None:
        if self._reserved:
            self._release_room()
        if event.opcode is Opcode.TEXT or event.opcode is Opcode.BINARY:
            if not self._closing:
                assert self._receiver is not None
                self._receiver.message_received(event.payload)
        elif event.opcode is Opcode.PING:
            if not self._closing:
                self._answer_ping(event.payload)
        elif event.opcode is Opcode.CLOSE:
            if not self._closing:
                self._write_frame(Opcode.CLOSE, close_answer(event.payload))
                self._hang_up()
            self._deaf = True
            self._transport.close()

    def _violated(self, error: ProtocolError) -> None:
        log.info("%s: %s", self.origin, error)
        self.close(error.close_code, error.reason)

    def _wants_more(self) -> bool:
        return super()._wants_more() and not self._waiting_for_room

    def _drained(self) -> None:
        if not self._closing:
            assert self._frames is not None
            self._reserve_room(self._frames.announced())

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
        if len(message) > DIRECT_BYTES or self._gathered or self._streaming or self._closing:
            self._send_message(Opcode.TEXT, message)
        else:
            self._answered = True
            self._write(text_frame(message))

    async def send_parts(self, parts: AsyncIterator[bytes], size: int) -> None:
        await self._send_in_parts(Opcode.TEXT, parts)

    def _send(self, opcode: Opcode, message: bytes) -> None:
        if not self._gathered:
            self._loop.call_soon(self._flush)
        self._gather(text_frame(message))

    def _frame(self, opcode: Opcode, payload: bytes, *, final: bool = True) -> bytes:
        return frame_header(opcode, len(payload), final=final) + payload

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
