"""A WebSocket that carries relay frames: keep-alive, deadlines, and turns between its streams."""

from __future__ import annotations

import asyncio
from collections import deque

from exec_server.transports.client_socket import ClientSocket
from exec_server.transports.relay_stream import RelayStream

# As often as the reference; no second one while an answer is outstanding.
PING_SECONDS = 30.0
# Without a pong for so long after a ping, the peer is gone. The same for a peer that takes
# nothing of what we send.
PONG_SECONDS = 60.0
WRITE_SECONDS = 60.0
# Frames sent in a row before anything else gets its turn.
BURST = 32


class RelaySocket:
    """The user of a ClientSocket, and the Outlet of the streams on it; a base for both roles."""

    def __init__(self, socket: ClientSocket) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self.is_slow = False
        self.is_held = False  # nothing is read, so no pong can be expected
        self._unsent_before = 0
        self._turns: deque[RelayStream] = deque()  # at most as many as there are streams
        self._pumping = False
        self._pong_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._ping_timer = self._loop.call_later(PING_SECONDS, self._ping)
        self.ended: asyncio.Future[str] = self._loop.create_future()

    # ---- sending ----------------------------------------------------------------------

    def send_frame(self, frame: bytes) -> None:
        self._socket.send(frame, is_text=False)

    def take_turns(self, stream: RelayStream) -> None:
        self._turns.append(stream)
        self._pump()

    def _pump(self) -> None:
        """Send a frame of each stream in turn, for as long as the socket takes them."""
        if self._pumping:
            return
        self._pumping = True
        burst = BURST
        while self._turns and not self.is_slow and burst:
            stream = self._turns.popleft()
            if stream.send_next():
                self._turns.append(stream)
            burst -= 1
        self._pumping = False
        if not burst and self._turns and not self.is_slow:
            self._loop.call_soon(self._pump)

    def sending_slow(self) -> None:
        self.is_slow = True
        if self._write_timer is None:
            self._unsent_before = self._socket.unsent()
            self._write_timer = self._loop.call_later(WRITE_SECONDS, self._check_writing)

    def sending_ready(self) -> None:
        self.is_slow = False
        if self._write_timer is not None:
            # It has taken nearly everything: what comes next has its own time.
            self._write_timer.cancel()
            self._write_timer = None
        self._pump()

    def _check_writing(self) -> None:
        self._write_timer = None
        if self.is_slow:
            if self._socket.unsent() >= self._unsent_before:
                self._socket.abort("write timeout")
            else:
                self.sending_slow()

    # ---- keep-alive -------------------------------------------------------------------

    def _ping(self) -> None:
        self._ping_timer = self._loop.call_later(PING_SECONDS, self._ping)
        if self._pong_timer is None and not self.is_held:
            self._socket.ping()
            self._pong_timer = self._loop.call_later(
                PONG_SECONDS, self._socket.abort, "pong timeout"
            )

    def pong_received(self) -> None:
        if self._pong_timer is not None:
            self._pong_timer.cancel()
            self._pong_timer = None

    def close(self, code: int, reason: str) -> None:
        """Hang up, telling the relay why."""
        self._socket.close(code, reason)

    def socket_lost(self, reason: str) -> None:
        for timer in (self._ping_timer, self._pong_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._turns.clear()
        self.streams_lost()
        if not self.ended.done():
            self.ended.set_result(reason)

    def streams_lost(self) -> None:
        """The socket is gone, and all that it carried."""
        raise NotImplementedError
