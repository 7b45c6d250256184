"""RelaySocket: a WebSocket that carries relay frames of one or several streams."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque

from exec_server.host.event_loop import guarded_call
from exec_server.net.liveness import Action, KeepAlive, Progress, Watchdog
from exec_server.net.relay_stream import RelayStream
from exec_server.net.websocket.client import ClientSocket

log = logging.getLogger(__name__)

# As often as the reference; no second ping while an answer is outstanding.
PING_SECONDS = 30.0
# Without a pong for this long after a ping, the peer is gone. The same for a peer that takes no
# bytes from the send buffer.
PONG_SECONDS = 60.0
WRITE_SECONDS = 60.0
# Frames sent in a row before the event loop runs other callbacks.
BURST = 32


class RelaySocket(ABC):
    """The carrier of the streams on one ClientSocket: fair sending, keep-alive, deadlines.

    The links of both roles, `relay_client` and `relay_executor`, add their streams. `ended` gets
    the reason once the socket is lost, after `streams_lost` was called.
    """

    def __init__(self, socket: ClientSocket) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self.is_full = False  # the send buffer is above its high mark
        self.is_paused = False  # the socket is not read, so no pong can be expected
        self._unsent_before = 0
        self._sending: deque[RelayStream] = deque()  # at most as many as there are streams
        self._is_pumping = False
        self._write_progress = Progress(WRITE_SECONDS)
        self._write_watchdog = Watchdog(self._check_writing)
        self._keep_alive = KeepAlive(self._loop.time(), PING_SECONDS, PONG_SECONDS)
        self._ping_watchdog = Watchdog(self._check_peer)
        self._ping_watchdog.start(PING_SECONDS)
        self.ended: asyncio.Future[str] = self._loop.create_future()

    @abstractmethod
    def message_received(self, message: bytes, *, is_text: bool) -> None:
        """A message has arrived on the socket."""

    @abstractmethod
    def end_stream(self, stream_id: str) -> None:
        """Forget a stream and tell its peer."""

    @abstractmethod
    def streams_lost(self) -> None:
        """Tell all streams that the socket is lost."""

    # ---- sending ----------------------------------------------------------------------

    def send_frame(self, frame: bytes) -> None:
        self._socket.send(frame, is_text=False)

    def schedule(self, stream: RelayStream) -> None:
        """Call `send_next` of a stream, in turn with the others, until it has no more frames."""
        self._sending.append(stream)
        self._pump()

    def _pump(self) -> None:
        """Send one frame of each stream in turn while the socket takes them."""
        if self._is_pumping:
            return
        self._is_pumping = True
        burst = BURST
        while self._sending and not self.is_full and burst:
            self._send_next(self._sending.popleft())
            burst -= 1
        self._is_pumping = False
        if not burst and self._sending and not self.is_full:
            self._loop.call_soon(self._pump)

    def _send_next(self, stream: RelayStream) -> None:
        try:
            has_more = stream.send_next()
        except Exception:  # an edge: one stream must not stop the others
            log.exception("a relay stream failed unexpectedly")
            guarded_call(stream.fail)
        else:
            if has_more:
                self._sending.append(stream)

    def pause_writing(self) -> None:
        if not self.is_full:
            self.is_full = True
            self._unsent_before = self._socket.unsent()
            self._write_progress.touch(self._loop.time())
            self._write_watchdog.start(WRITE_SECONDS)

    def resume_writing(self) -> None:
        self.is_full = False
        self._write_watchdog.cancel()
        self._pump()

    def _check_writing(self) -> float | None:
        now, unsent = self._loop.time(), self._socket.unsent()
        if unsent < self._unsent_before:
            self._unsent_before = unsent
            self._write_progress.touch(now)
        remaining = self._write_progress.remaining(now)
        if remaining > 0:
            return remaining
        self._socket.abort("write timeout")
        return None

    # ---- receiving and keep-alive -----------------------------------------------------

    def pause_reading(self) -> None:
        self.is_paused = True
        self._keep_alive.answered()  # a pong that arrives now is not read
        self._socket.pause_reading()

    def resume_reading(self) -> None:
        self.is_paused = False
        self._keep_alive.answered()
        self._socket.resume_reading()

    def pong_received(self) -> None:
        self._keep_alive.answered()

    def _check_peer(self) -> float | None:
        now = self._loop.time()
        action = self._keep_alive.check(now, can_answer=not self.is_paused)
        if action is Action.GIVE_UP:
            self._socket.abort("pong timeout")
            return None
        if action is Action.PING:
            self._socket.ping()
        return self._keep_alive.next_check() - now

    # ---- the end ----------------------------------------------------------------------

    def close(self, code: int, reason: str) -> None:
        """Close the socket, telling the relay why."""
        self._socket.close(code, reason)

    def socket_lost(self, reason: str) -> None:
        self._write_watchdog.cancel()
        self._ping_watchdog.cancel()
        self._sending.clear()
        self.streams_lost()
        if not self.ended.done():
            self.ended.set_result(reason)
