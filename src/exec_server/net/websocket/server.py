"""WebSocketStream: upgrade, messages, keep-alive and end of one connection of a listener."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Final, cast

import msgspec

from exec_server.errors import ProtocolError
from exec_server.host.event_loop import GuardedTasks, guarded_call
from exec_server.net.admission import Admission, peer_network
from exec_server.net.auth import Authenticator
from exec_server.net.http1 import HEAD_BYTES, TLS_HANDSHAKE
from exec_server.net.inbox import ByteBudget, Reservation
from exec_server.net.listen import BoundSocket
from exec_server.net.liveness import Action, KeepAlive, Probe, TransferProgress
from exec_server.net.socket_options import peer_user
from exec_server.net.stream import MessageReceiver, ReceiverFactory
from exec_server.net.tls_acceptor import ServerCertificate, TlsAcceptor
from exec_server.net.websocket.frames import (
    MESSAGE_BYTES,
    SENT_FRAME_BYTES,
    Event,
    FrameReader,
    Opcode,
    frame_header,
    text_frame,
    text_header,
)
from exec_server.net.websocket.handshake import (
    HttpRefusal,
    RequestHead,
    check_browser,
    check_upgrade,
    parse_head,
    refusal_answer,
    upgrade_answer,
)
from exec_server.net.websocket.socket import DIRECT_BYTES, Cause, FramedSocket, State
from exec_server.protocol.urls import host_port

# How long the loop polls after an answer. Clients that work through a list send the next request
# soon, and waking up takes longer than half an answer.
POLL_SECONDS: Final = 50e-6
# After so many polls in a row that no request ended, the loop sleeps: the client is slow, or
# another program needs the processor that the loop would keep busy.
VAIN_POLLS: Final = 4
# Answers after which one more poll is tried then.
RETRY_ANSWERS: Final = 64

log = logging.getLogger(__name__)

# From accept to a complete upgrade request; clients give up after 10 s themselves.
HANDSHAKE_SECONDS = 10.0
# Bytes that are read after a refused request, so that a client which is still sending gets the
# answer. A client that sends more is cut off.
REFUSED_BYTES = 262_144
# As often as the reference. A peer that has not answered by the next ping is gone.
PING_SECONDS = 30.0
# How long a peer has to show that it is alive when another connection asks for its session.
PROBE_SECONDS = 3.0
# Messages above LARGE_BYTES need a part of this budget before more of them is read, so that many
# clients together cannot make the server hold more.
LARGE_BYTES = 1_048_576
RECEIVING_BYTES = 4 * MESSAGE_BYTES
# A large message that makes no progress loses its part of the budget with its connection, and so
# does one that is slower than this rate while other messages wait for the budget.
STALL_SECONDS = 30.0
TRICKLE_BYTES_PER_SECOND = 262_144

GOING_AWAY = 1001
POLICY_VIOLATION = 1008


# How long peers may take to hang up when the server ends, which should be quick.
SHUTDOWN_GRACE_SECONDS = 0.25
# With the interval of `server.serve.SWEEP_SECONDS` less than the 10 s in which memory is returned.
_TICK_SECONDS = 3.0


class BusyPoll:
    """Keeps the event loop from sleeping for a moment, if there is more than one processor."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_affordable = len(os.sched_getaffinity(0)) > 1
        self._until = 0.0
        self._is_polling = False
        self._vain = 0  # polls without a request since the last one with a request
        self._unpolled = 0  # answers since the last poll

    def extend(self) -> None:
        """Poll from now on: a request was answered."""
        if self._is_polling:
            self._vain = 0
        elif self._may_poll():
            self._is_polling = True
            self._loop.call_soon(self._poll)
        else:
            return
        self._until = time.monotonic() + POLL_SECONDS

    def _may_poll(self) -> bool:
        if self._vain < VAIN_POLLS:
            return self._is_affordable
        self._unpolled += 1
        if self._unpolled < RETRY_ANSWERS:
            return False
        self._unpolled = 0
        return True

    def _poll(self) -> None:
        # While a callback is due the loop polls its descriptors without waiting.
        if time.monotonic() < self._until:
            self._loop.call_soon(self._poll)
        else:
            self._is_polling = False
            self._vain += 1


class WebSocketSettings(msgspec.Struct, frozen=True):
    """The settings that all connections of a listener share."""

    receiver: ReceiverFactory
    authenticate: Authenticator | None = None
    allowed_hosts: frozenset[str] | None = None
    admission: Admission = msgspec.field(default_factory=Admission)
    budget: ByteBudget = msgspec.field(default_factory=lambda: ByteBudget(RECEIVING_BYTES))
    busy_poll: BusyPoll = msgspec.field(default_factory=BusyPoll)


class WebSocketStream(asyncio.Protocol):
    """One accepted socket, from its first byte; a MessageStream once it is upgraded."""

    is_strict = False

    def __init__(self, settings: WebSocketSettings, streams: set[WebSocketStream]) -> None:
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self._busy_poll = settings.busy_poll
        self._streams = streams
        self.origin = ""
        self._head = b""
        self._receiver: MessageReceiver | None = None  # from the upgrade on
        self._wrote_message = False
        self._handshake_timer: asyncio.TimerHandle | None = None
        self._reservation = Reservation(settings.budget, self._budget_granted)
        self._reserved_at = 0.0
        self._progress = TransferProgress(STALL_SECONDS)  # of a large message
        self._keep_alive = KeepAlive(self._loop.time(), PING_SECONDS, PING_SECONDS)
        self._heard_at = 0.0  # when the last bytes arrived, if they did so since the last tick
        self._probe = Probe(PROBE_SECONDS, self.abort)
        self.closed: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        raw = transport.get_extra_info("socket")
        is_plain = transport.get_extra_info("ssl_object") is None
        self._transport = cast(asyncio.Transport, transport)
        self._frames = FrameReader()
        descriptor = raw.fileno() if is_plain else -1
        self._socket = FramedSocket(self, self._transport, descriptor, self._frames, _encode_frame)
        self._inbox, self._outbox = self._socket.inbox, self._socket.outbox
        self._writer = self._socket.writer
        uid = peer_user(raw) if raw.family == socket.AF_UNIX else None
        peer = transport.get_extra_info("peername")
        self.origin = _origin(peer, uid)
        self._streams.add(self)
        network = peer_network(peer[0]) if peer and uid is None else f"uid {uid}"
        self._settings.admission.pending.add(
            self, network, partial(self.abort, "too many connections without an upgrade request")
        )
        # Root may do everything anyway. The mode of the file keeps others away too, but it can be
        # changed, and a descriptor of a connected socket can be passed on.
        if uid is not None and uid not in (0, os.geteuid()):
            self._refuse(HttpRefusal(403, "the socket is for the user of the server only"))
            return
        if uid is None:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._handshake_timer = self._loop.call_later(
            HANDSHAKE_SECONDS, self.abort, "no upgrade request"
        )

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        if self._probe.is_active:
            self._probe_answered()
        receiver = self._receiver
        if receiver is not None and self._inbox.is_flowing:
            message = self._frames.whole_message(data)
            if message is not None:
                self._wrote_message = False
                receiver.message_received(message)
                if self._wrote_message:
                    self._busy_poll.extend()
                return
        if self._socket.state is State.CONNECTING:
            self._head += data
            self._next_request()
        else:
            self._socket.feed(data)
            self._reserve_budget()

    def bytes_received(self) -> None:
        self._heard_at = self._loop.time()
        if self._probe.is_active:
            self._probe_answered()
        self._reserve_budget()

    def _probe_answered(self) -> None:
        self._probe.cancel()
        self._socket.force_reading(is_forced=False)

    def eof_received(self) -> bool:
        self._end(Cause.EOF)
        return False  # the transport closes itself: half of a link is of no use

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.discard(self)
        self._settings.admission.remove(self)
        self.closed.set_result(None)
        self._head = b""
        self._cancel_handshake_timer()
        was_open = self._socket.lost()
        self._release()
        if was_open:
            self._notify_lost()

    def _cancel_handshake_timer(self) -> None:
        if self._handshake_timer is not None:
            self._handshake_timer.cancel()
            self._handshake_timer = None  # it takes memory

    def pause_writing(self) -> None:
        self._socket.pause_writing()

    def resume_writing(self) -> None:
        self._socket.resume_writing()

    def _next_request(self) -> None:
        """Answer the first request that has arrived; one of them makes this a WebSocket."""
        if self._socket.state is not State.CONNECTING:
            return
        head, end, rest = self._head.partition(b"\r\n\r\n")
        if head.startswith(TLS_HANDSHAKE):
            # Such a peer waits for an answer, and this one shows it that there is no TLS here.
            self._refuse(HttpRefusal(400, "this port has no TLS"))
        elif end:
            self._head = rest
            self._answer_request(head)
        elif len(self._head) > HEAD_BYTES:
            self._refuse(HttpRefusal(431))
        if self._socket.state is State.CONNECTING and not self._transport.is_closing():
            if end and rest:
                # One read may bring thousands of requests: other connections come first.
                self._transport.pause_reading()
                self._loop.call_soon(self._next_request)
            else:
                self._transport.resume_reading()

    def _answer_request(self, head: bytes) -> None:
        request = None
        try:
            request = parse_head(head)
            check_browser(request, self._settings.allowed_hosts)
            check_upgrade(request)
            if self._settings.authenticate is not None:
                self._settings.authenticate(request.headers)
            if not self._settings.admission.upgrade(self):
                raise HttpRefusal(503, "too many connections")
        except HttpRefusal as refusal:
            self._refuse(refusal, request)
            return
        self._cancel_handshake_timer()
        self._transport.write(upgrade_answer(request.headers))
        self._socket.change(Cause.UPGRADED)
        self._receiver = self._outbox.producer = self._settings.receiver(self)
        rest, self._head = self._head, b""
        if rest:
            self._socket.feed(rest)
            self._reserve_budget()

    def _refuse(self, refusal: HttpRefusal, request: RequestHead | None = None) -> None:
        """Answer; a client that keeps the connection alive may send another request."""
        if refusal.status >= 400:
            log.info("%s: refused: %s", self.origin, refusal)
        self._transport.write(refusal_answer(refusal, request))
        # Disconnect a peer that keeps sending requests without reading the responses.
        if request is None or not request.keeps_alive() or self._outbox.is_full:
            self._socket.end_writing()
            self._head = b""
            self._socket.discard(Cause.REFUSED, REFUSED_BYTES)

    def event_received(self, event: Event) -> None:
        if event.opcode is Opcode.TEXT or event.opcode is Opcode.BINARY:
            # Only here: a ping between two fragments leaves the incomplete message in memory.
            if self._reservation.size:
                self._release_budget()
            assert self._receiver is not None
            self._writer.is_holding = True  # the answers to pipelined requests share a write
            self._receiver.message_received(event.payload)
        elif event.opcode is Opcode.PING:
            self._socket.answer_ping(event.payload)
        elif event.opcode is Opcode.CLOSE:
            self._socket.answer_close(event.payload)
            self._closed_open()

    def protocol_failed(self, error: ProtocolError) -> None:
        log.info("%s: %s", self.origin, error)
        self._socket.end_writing()
        self._closed_open()

    def pause_reading(self) -> None:
        self._inbox.pause()

    def resume_reading(self) -> None:
        self._inbox.resume()

    def _reserve_budget(self) -> None:
        """Read more of a large message only when the budget covers all of it."""
        size = self._frames.announced()
        if size <= LARGE_BYTES:
            return
        now = self._loop.time()
        self._progress.touch(now)
        if self._inbox.is_flowing and not self._reservation.size:
            self._reserved_at = now
            self._reservation.acquire(size)
            if self._reservation.is_waiting:
                self._socket.block_reading(is_blocked=True)

    def _release_budget(self) -> None:
        was_waiting = self._reservation.is_waiting
        self._reservation.release()
        if was_waiting:
            self._socket.block_reading(is_blocked=False)

    def _budget_granted(self) -> None:
        self._reserved_at = now = self._loop.time()
        self._progress.touch(now)
        self._keep_alive.touch(now)
        self._socket.block_reading(is_blocked=False)

    def send(self, message: bytes) -> None:
        writer = self._writer
        if (
            len(message) > DIRECT_BYTES
            or writer.gathered
            or writer.is_holding
            or not self._outbox.is_idle
        ):
            self._outbox.send(message, self._write_long)
        else:
            self._wrote_message = True
            writer.write(text_frame(message))

    def send_pieces(self, head: bytes, body: bytes, tail: bytes) -> None:
        size = len(head) + len(body) + len(tail)
        if DIRECT_BYTES < size <= SENT_FRAME_BYTES and self._outbox.is_idle:
            self._writer.gather(text_header(size) + head, body, tail)
        else:
            self.send(head + body + tail)

    def send_binary(self, head: bytes, data: bytes) -> None:
        size = len(head) + len(data)
        if DIRECT_BYTES < size <= SENT_FRAME_BYTES and self._outbox.is_idle:
            self._writer.gather(frame_header(Opcode.BINARY, size) + head, data)
        else:
            self._outbox.send(head + data, self._write_binary)

    def _write_binary(self, message: bytes) -> None:
        writer = self._writer
        if len(message) > SENT_FRAME_BYTES:
            self._socket.write_fragments(Opcode.BINARY, message)
        elif len(message) > DIRECT_BYTES or writer.gathered or writer.is_holding:
            writer.gather(_encode_frame(Opcode.BINARY, message, True))
        else:
            writer.write(_encode_frame(Opcode.BINARY, message, True))

    def _write_long(self, message: bytes) -> None:
        if len(message) > SENT_FRAME_BYTES:
            self._socket.write_fragments(Opcode.TEXT, message)
        else:
            self._writer.gather(text_frame(message))

    async def send_parts(self, parts: AsyncIterator[bytes], size: int) -> None:
        await self._socket.send_parts(Opcode.TEXT, parts)

    def unsent(self) -> int:
        return self._socket.unsent()

    def tick(self, now: float) -> None:
        """Ping a quiet peer; end one that does not answer or that stalls a large message."""
        if self._socket.state is not State.OPEN:
            return
        if self._heard_at:
            self._keep_alive.touch(self._heard_at)
            self._heard_at = 0.0
        is_paused = self._inbox.is_paused
        is_waiting = self._reservation.is_waiting
        if self._reservation.size and not is_waiting and not is_paused and self._is_stalled(now):
            self.close(POLICY_VIOLATION, "message stalled")
            return
        can_answer = not (self._outbox.is_full or is_paused or is_waiting)
        action = self._keep_alive.check(now, can_answer=can_answer)
        if action is Action.GIVE_UP:
            self.abort("no answer to a ping")
        elif action is Action.PING:
            self._socket.write_frame(Opcode.PING, b"")

    def _is_stalled(self, now: float) -> bool:
        limit = STALL_SECONDS + self._reservation.size / TRICKLE_BYTES_PER_SECOND
        is_too_slow = self._settings.budget.has_waiters and now - self._reserved_at > limit
        return is_too_slow or self._progress.remaining(now) < 0

    def probe(self) -> None:
        if self._socket.state is State.OPEN and not self._probe.is_active:
            self._socket.write_frame(Opcode.PING, b"")
            self._socket.force_reading(is_forced=True)
            self._probe.start()

    def close(self, code: int, reason: str) -> None:
        if self._socket.state is State.CONNECTING:
            self._socket.discard(Cause.CLOSE_SENT)
            self._transport.close()
        elif self._socket.state is State.OPEN:
            self._socket.start_closing(code, reason)
            # The peer sees that no more frames follow. Its own are read and dropped until it
            # hangs up.
            self._socket.end_writing()
            self._closed_open()

    def abort(self, why: str) -> None:
        log.info("%s: cut off: %s", self.origin, why)
        self._end(Cause.ABORTED)
        self._transport.abort()

    def _end(self, cause: Cause) -> None:
        was_open = self._socket.state is State.OPEN
        self._socket.discard(cause)
        if was_open:
            self._closed_open()

    def _closed_open(self) -> None:
        """The state is no longer OPEN: the receiver is told after the caller has returned."""
        self._release()
        self._loop.call_soon(self._notify_lost)

    def _release(self) -> None:
        self._release_budget()
        self._probe.cancel()

    def _notify_lost(self) -> None:
        assert self._receiver is not None
        self._receiver.connection_lost()


def _encode_frame(opcode: Opcode, payload: bytes, final: bool) -> bytes:
    return frame_header(opcode, len(payload), final=final) + payload


def _origin(peer: tuple[str, int] | None, uid: int | None) -> str:
    # A peer that has hung up already has no address any more.
    host, port = peer[:2] if peer and uid is None else ("unknown", 0)
    address = host_port(host, port)
    if uid is not None:
        address = f"of uid {uid}"
    return f"websocket JSON-RPC message from exec-server websocket {address}"


class WebSocketListener:
    """Bound sockets and their connections, which share one set of limits."""

    def __init__(
        self,
        bound: Sequence[BoundSocket],
        settings: WebSocketSettings,
        tasks: GuardedTasks,
        certificate: ServerCertificate | None = None,
    ) -> None:
        """`certificate` is for the sockets with TLS, `tasks` runs their handshakes."""
        self._bound = bound
        self._settings = settings
        self._tasks = tasks
        self._certificate = certificate
        self._streams: set[WebSocketStream] = set()
        self._servers: list[asyncio.Server | TlsAcceptor] = []
        self._has_ended = False  # a stream, since the last tick
        self._ticker: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        for bound in self._bound:
            if bound.is_tls:
                assert self._certificate is not None
                acceptor = TlsAcceptor(
                    bound.socket, self._certificate, self._make_stream, self._tasks
                )
                acceptor.open()
                self._servers.append(acceptor)
            elif bound.socket.family == socket.AF_UNIX:
                self._servers.append(
                    await loop.create_unix_server(self._make_stream, sock=bound.socket)
                )
            else:
                self._servers.append(await loop.create_server(self._make_stream, sock=bound.socket))
        self._tick()

    def _make_stream(self) -> WebSocketStream:
        stream = WebSocketStream(self._settings, self._streams)
        stream.closed.add_done_callback(self._note_end)
        return stream

    def _note_end(self, _: asyncio.Future[None]) -> None:
        self._has_ended = True

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for stream in list(self._streams):
            if not guarded_call(stream.tick, now):
                guarded_call(stream.abort, "internal error")
        if self._certificate is not None:
            self._collect_ended()
        self._ticker = loop.call_later(_TICK_SECONDS, self._tick)

    def _collect_ended(self) -> None:
        """Free the connections that have ended since the last tick.

        The objects of a TLS connection refer to each other and hold what was received last,
        megabytes of it; automatic collections are rare here (see `cli.serve.run`).
        """
        if self._has_ended:
            gc.collect()
        self._has_ended = False

    async def close(self) -> None:
        """Stop accepting, send all peers a close frame, and hang up."""
        if self._ticker is not None:
            self._ticker.cancel()
        for server in self._servers:
            server.close()
        for bound in self._bound:
            bound.remove_file()
        for stream in list(self._streams):
            guarded_call(stream.close, GOING_AWAY, "server is shutting down")
        closed = [stream.closed for stream in self._streams]
        if closed:
            await asyncio.wait(closed, timeout=SHUTDOWN_GRACE_SECONDS)
        for stream in list(self._streams):
            guarded_call(stream.abort, "server is shutting down")
