"""Plain JSON-RPC over a WebSocket that we opened: one message stream, text out, any kind in."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Sequence

from exec_server.rpc.stream import MessageReceiver, MessageStream
from exec_server.transports.client_socket import ClientSocket, connect
from exec_server.transports.frames import MESSAGE_BYTES

# How long a peer has to show that it lives when somebody wants its session.
PROBE_SECONDS = 3.0


class DialedStream:
    """A MessageStream over a ClientSocket; `ended` gets the reason when the link is gone."""

    is_strict = False

    def __init__(
        self,
        socket: ClientSocket,
        receiver: Callable[[MessageStream], MessageReceiver],
        *,
        origin: str,
        ping_seconds: float | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._origin = origin
        self._ping_seconds = ping_seconds
        self._ping_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._pinged = False
        self._heard = False  # something has come since the last ping
        self._slow = False
        self._receiving = True
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self._receiver = receiver(self)
        self._ping_later()

    # ---- what a connection asks for ---------------------------------------------------

    @property
    def origin(self) -> str:
        return self._origin

    def send(self, message: bytes) -> None:
        self._socket.send(message, is_text=True)

    async def send_parts(self, parts: AsyncIterator[bytes], size: int) -> None:
        await self._socket.send_parts(parts, is_text=True)

    def unsent(self) -> int:
        return self._socket.unsent()

    def hold(self, *, receiving: bool) -> None:
        self._receiving = receiving
        # A peer that is being probed must be heard.
        if receiving or self._probe_timer is None:
            self._socket.hold(receiving=receiving)

    def probe(self) -> None:
        if self._socket.is_closing or self._probe_timer is not None:
            return
        self._socket.ping()
        self._socket.hold(receiving=True)
        self._probe_timer = self._loop.call_later(
            PROBE_SECONDS, self._socket.abort, "its session is wanted elsewhere and it is silent"
        )

    def close(self, code: int, reason: str) -> None:
        self._socket.close(code, reason)

    # ---- what the socket tells --------------------------------------------------------

    def message_received(self, message: bytes, *, is_text: bool) -> None:
        self._note_life()
        self._receiver.message_received(message)

    def pong_received(self) -> None:
        self._note_life()

    def sending_slow(self) -> None:
        self._slow = True
        self._receiver.sending_slow()

    def sending_ready(self) -> None:
        self._slow = False
        self._receiver.sending_ready()

    def socket_lost(self, reason: str) -> None:
        for timer in (self._ping_timer, self._probe_timer):
            if timer is not None:
                timer.cancel()
        self._receiver.link_lost()
        self.ended.set_result(reason)

    # ---- liveness ---------------------------------------------------------------------

    def _note_life(self) -> None:
        self._heard = True
        if self._probe_timer is not None:
            self._probe_timer.cancel()
            self._probe_timer = None
            self._socket.hold(receiving=self._receiving)

    def _ping_later(self) -> None:
        if self._ping_seconds is not None:
            self._ping_timer = self._loop.call_later(self._ping_seconds, self._check_life)

    def _check_life(self) -> None:
        """Ping, and give up a peer that has been silent since the last ping."""
        if self._socket.is_closing:
            return
        if self._slow or not self._receiving:
            # It cannot get our ping, or we do not read its answer. That is no sign of death.
            self._pinged = False
        elif self._pinged and not self._heard:
            self._socket.abort("no answer to a ping")
            return
        else:
            self._pinged = True
            self._heard = False
            self._socket.ping()
        self._ping_later()


async def open_stream(
    url: str,
    receiver: Callable[[MessageStream], MessageReceiver],
    *,
    origin: str,
    headers: Sequence[tuple[str, str]] = (),
    tls: ssl.SSLContext | None = None,
    ping_seconds: float | None = None,
    message_bytes: int = MESSAGE_BYTES,
) -> DialedStream:
    """Open a WebSocket and put a receiver on it; raises ConnectFailed, is cancelled safely."""
    made: list[DialedStream] = []

    def make_user(socket: ClientSocket) -> DialedStream:
        made.append(DialedStream(socket, receiver, origin=origin, ping_seconds=ping_seconds))
        return made[0]

    await connect(url, make_user, headers=headers, tls=tls, message_bytes=message_bytes)
    return made[0]
