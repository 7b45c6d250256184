"""ClientStream: JSON-RPC over a WebSocket that we opened; sends text, accepts text and binary."""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import AsyncIterator, Sequence

from exec_server.net.liveness import Action, KeepAlive, Probe, Watchdog
from exec_server.net.stream import JudgingReceiver, ReceiverFactory
from exec_server.net.websocket.client import ClientSocket, connect
from exec_server.net.websocket.frames import MESSAGE_BYTES

# How long a peer has to show that it is alive when another connection asks for its session.
PROBE_SECONDS = 3.0


class ClientStream:
    """A MessageStream over a ClientSocket; `ended` gets the reason when the link is gone."""

    is_strict = False

    def __init__(
        self,
        socket: ClientSocket,
        receiver: ReceiverFactory,
        *,
        origin: str,
        ping_seconds: float | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._origin = origin
        self._is_full = False
        self._is_paused = False
        period = math.inf if ping_seconds is None else ping_seconds
        self._keep_alive = KeepAlive(self._loop.time(), period, period)
        self._watchdog = Watchdog(self._check_peer)
        self._probe = Probe(PROBE_SECONDS, socket.abort)
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self._receiver = receiver(self)
        if isinstance(self._receiver, JudgingReceiver):
            socket.on_useless = self._receiver.useless_received
        if ping_seconds is not None:
            self._watchdog.start(ping_seconds)

    # ---- requests of the receiver -----------------------------------------------------

    @property
    def origin(self) -> str:
        return self._origin

    def send(self, message: bytes) -> None:
        self._socket.send(message, is_text=True)

    def send_binary(self, head: bytes, data: bytes) -> None:
        self._socket.send(b"%b%b" % (head, data), is_text=False)

    async def send_parts(self, parts: AsyncIterator[bytes], size: int) -> None:
        await self._socket.send_parts(parts, is_text=True)

    def unsent(self) -> int:
        return self._socket.unsent()

    def pause_reading(self) -> None:
        self._is_paused = True
        # A probed peer is read: its answer is the proof that it is alive.
        if not self._probe.is_active:
            self._socket.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        self._socket.resume_reading()

    def probe(self) -> None:
        if not self._socket.is_closing and not self._probe.is_active:
            self._socket.ping()
            self._socket.resume_reading()
            self._probe.start()

    def close(self, code: int, reason: str) -> None:
        self._socket.close(code, reason)

    # ---- events of the socket ---------------------------------------------------------

    def message_received(self, message: bytes, *, is_text: bool) -> None:
        self._keep_alive.answered()
        if self._probe.is_active:
            self._probe_passed()
        self._receiver.message_received(message)

    def pong_received(self) -> None:
        self._keep_alive.answered()
        if self._probe.is_active:
            self._probe_passed()

    def pause_writing(self) -> None:
        self._is_full = True
        self._receiver.pause_writing()

    def resume_writing(self) -> None:
        self._is_full = False
        self._receiver.resume_writing()

    def socket_lost(self, reason: str) -> None:
        self._watchdog.cancel()
        self._probe.cancel()
        self._receiver.connection_lost()
        self.ended.set_result(reason)

    # ---- liveness ---------------------------------------------------------------------

    def _probe_passed(self) -> None:
        self._probe.cancel()
        if self._is_paused:
            self._socket.pause_reading()

    def _check_peer(self) -> float | None:
        if self._socket.is_closing:
            return None
        now = self._loop.time()
        can_answer = not (self._is_full or self._is_paused)
        action = self._keep_alive.check(now, can_answer=can_answer)
        if action is Action.GIVE_UP:
            self._socket.abort("no answer to a ping")
            return None
        if action is Action.PING:
            self._socket.ping()
        return self._keep_alive.next_check() - now


async def open_stream(
    url: str,
    receiver: ReceiverFactory,
    *,
    origin: str,
    headers: Sequence[tuple[str, str]] = (),
    tls: ssl.SSLContext | None = None,
    ping_seconds: float | None = None,
    message_bytes: int = MESSAGE_BYTES,
) -> ClientStream:
    """Open a WebSocket for a receiver; raises ConnectFailed. Cancelling leaves no socket behind."""
    made: list[ClientStream] = []

    def make_user(socket: ClientSocket) -> ClientStream:
        made.append(ClientStream(socket, receiver, origin=origin, ping_seconds=ping_seconds))
        return made[0]

    await connect(url, make_user, headers=headers, tls=tls, message_bytes=message_bytes)
    return made[0]
