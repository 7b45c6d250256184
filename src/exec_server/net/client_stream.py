"""ClientStream: JSON-RPC over a WebSocket that we opened; sends text, accepts text and binary."""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
from collections.abc import AsyncIterator, Sequence

from exec_server.errors import ConnectFailed
from exec_server.host.event_loop import GuardedTasks
from exec_server.net.liveness import Action, CheckTimer, KeepAlive, Probe
from exec_server.net.stream import JudgingReceiver, MessageStream, ReceiverFactory
from exec_server.net.websocket.client import ClientSocket, connect
from exec_server.net.websocket.frames import MESSAGE_BYTES

# How long a peer has to show that it is alive when another connection asks for its session.
PROBE_SECONDS = 3.0

log = logging.getLogger(__name__)

# How long the destination may take to open a WebSocket; then the stream ends.
CONNECT_SECONDS = 10.0


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
        self.origin = origin
        self._is_full = False
        self._is_paused = False
        period = math.inf if ping_seconds is None else ping_seconds
        self._keep_alive = KeepAlive(self._loop.time(), period, period)
        self._watchdog = CheckTimer(self._check_peer)
        self._probe = Probe(PROBE_SECONDS, socket.abort)
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self._receiver = receiver(self)
        if isinstance(self._receiver, JudgingReceiver):
            socket.on_useless = self._receiver.useless_received
        if ping_seconds is not None:
            self._watchdog.start(ping_seconds)

    def send(self, message: bytes) -> None:
        self._socket.send(message, is_text=True)

    def send_binary(self, head: bytes, data: bytes) -> None:
        self._socket.send_binary(head, data)

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


def forwarder(url: str, tls: ssl.SSLContext | None, tasks: GuardedTasks) -> ReceiverFactory:
    """A factory of receivers that join streams to the destination; dials on `tasks`."""
    return lambda stream: _FromClient(stream, url, tls, tasks)


class _FromClient:
    """The receiver of a stream: passes its messages to the destination."""

    def __init__(
        self, stream: MessageStream, url: str, tls: ssl.SSLContext | None, tasks: GuardedTasks
    ) -> None:
        self._stream = stream
        self._socket: ClientSocket | None = None
        stream.pause_reading()  # until the destination is connected
        self._dialling = tasks.create_task(
            self._dial(url, tls), lambda: stream.close(0, "internal error")
        )

    async def _dial(self, url: str, tls: ssl.SSLContext | None) -> None:
        stream = self._stream
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                self._socket = await connect(url, lambda _: _FromDestination(stream), tls=tls)
        except (ConnectFailed, TimeoutError) as error:
            log.error("the destination cannot be reached: %s", str(error) or "timed out")
            stream.close(0, "the destination cannot be reached")
        else:
            stream.resume_reading()

    def message_received(self, message: bytes) -> None:
        assert self._socket is not None
        self._socket.send(message, is_text=False)

    def pause_writing(self) -> None:
        if self._socket is not None:
            self._socket.pause_reading()

    def resume_writing(self) -> None:
        if self._socket is not None:
            self._socket.resume_reading()

    def connection_lost(self) -> None:
        self._dialling.cancel()
        if self._socket is not None:
            self._socket.abort("the client is gone")


class _FromDestination:
    """The user of the destination's socket: passes its messages to the client."""

    def __init__(self, stream: MessageStream) -> None:
        self._stream = stream

    def message_received(self, message: bytes, *, is_text: bool) -> None:
        if message:
            self._stream.send(message)
        else:
            self._stream.close(0, "the destination sent an empty message")

    def pong_received(self) -> None:
        """No pings are sent to the destination."""

    def pause_writing(self) -> None:
        self._stream.pause_reading()

    def resume_writing(self) -> None:
        self._stream.resume_reading()

    def socket_lost(self, reason: str) -> None:
        self._stream.close(0, f"the destination hung up: {reason}")
