"""One WebSocket of the rendezvous: messages in, bounded sending out, and its faults.

Plain callbacks on the event loop; whoever owns the socket overrides `message`, `gone`,
`sending_slow` and `sending_ready`.
"""

from __future__ import annotations

import asyncio
from collections import deque

from picows import WSFrame, WSListener, WSMsgType, WSTransport

from tests.relay_service.envelope import Buffer

# Both ends of the relay refuse more, and no frame that they build is half as large.
RELAY_MESSAGE_BYTES = 262_144
# A bridge carries whole JSON-RPC messages.
BRIDGE_MESSAGE_BYTES = 64 * 1024 * 1024
# Unsent bytes of one socket. Above the first, the sockets that feed it are not read; below
# the second they are read again.
HIGH_WATER = 4 * 1024 * 1024
LOW_WATER = 1024 * 1024

REPLACED = 4001
UNSUPPORTED_DATA = 1003
POLICY_VIOLATION = 1008
MESSAGE_TOO_BIG = 1009
GOING_AWAY = 1001

TEXT, BINARY = WSMsgType.TEXT, WSMsgType.BINARY
_Unsent = tuple[WSMsgType, bytes, bool]


class Socket(WSListener):
    """An accepted WebSocket."""

    largest_message = RELAY_MESSAGE_BYTES

    def __init__(self) -> None:
        self.is_open = False
        self.answers_pings = True
        self.hears_pongs = True
        self.pings = 0
        self._transport: WSTransport | None = None
        self._parts = bytearray()
        self._started = WSMsgType.BINARY
        self._unread: set[str] = set()
        self._held: deque[_Unsent] | None = None
        self._held_bytes = 0
        self._buffer_full = False
        self._told_slow = False
        self._frozen = False
        self._pinged: float | None = None
        self._last_ping = 0.0

    # ---- for owners to override ---------------------------------------------------------

    def message(self, data: Buffer, kind: WSMsgType) -> None:
        """A whole message; a memoryview is valid until this returns."""

    def opened(self) -> None:
        """The socket can be used."""

    def gone(self) -> None:
        """The socket has ended; called once, also when this side ended it."""

    def sending_slow(self) -> None:
        """Too much is unsent."""

    def sending_ready(self) -> None:
        """The unsent has shrunk again."""

    # ---- receiving ----------------------------------------------------------------------

    def on_ws_connected(self, transport: WSTransport) -> None:
        self._transport = transport
        self.is_open = True
        self._last_ping = asyncio.get_running_loop().time()
        transport.underlying_transport.set_write_buffer_limits(HIGH_WATER, LOW_WATER)
        # Owners may have asked for it before there was a transport.
        if self._unread:
            transport.underlying_transport.pause_reading()
        self.opened()

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        # After a violation, a frame too large for instance, picows takes a moment to hang up
        # and goes on reading meanwhile.
        if transport.is_close_frame_sent:
            return
        kind = frame.msg_type
        if kind is WSMsgType.BINARY or kind is WSMsgType.TEXT:
            if frame.fin:
                if self.is_open and not self._frozen:
                    self.message(frame.get_payload_as_memoryview(), kind)
            else:
                self._started = kind
                self._parts += frame.get_payload_as_memoryview()
        elif kind is WSMsgType.CONTINUATION:
            self._continue(frame)
        else:
            self._control(transport, frame)

    def _continue(self, frame: WSFrame) -> None:
        self._parts += frame.get_payload_as_memoryview()
        if len(self._parts) > self.largest_message:
            self.close(MESSAGE_TOO_BIG, "message too big")
        elif frame.fin and self.is_open and not self._frozen:
            data, self._parts = bytes(self._parts), bytearray()
            self.message(data, self._started)

    def _control(self, transport: WSTransport, frame: WSFrame) -> None:
        if frame.msg_type is WSMsgType.PING:
            self.pings += 1
            if self.answers_pings and not self._frozen:
                transport.send_pong(frame.get_payload_as_bytes())
        elif frame.msg_type is WSMsgType.PONG:
            if self.hears_pongs:
                self._pinged = None
        elif frame.msg_type is WSMsgType.CLOSE:
            transport.send_close(frame.get_close_code(), frame.get_close_message())
            transport.disconnect()

    def on_ws_disconnected(self, transport: WSTransport) -> None:
        self._end()

    def _end(self) -> None:
        if self.is_open:
            self.is_open = False
            self._held = None
            self.gone()

    def hold_reading(self, reason: str) -> None:
        """Read nothing until every reason given is released."""
        if not self._unread and self._transport is not None:
            self._transport.underlying_transport.pause_reading()
        self._unread.add(reason)

    def release_reading(self, reason: str) -> None:
        self._unread.discard(reason)
        if not self._unread and self._transport is not None:
            self._transport.underlying_transport.resume_reading()

    @property
    def is_read(self) -> bool:
        return not self._unread

    # ---- sending ------------------------------------------------------------------------

    def send(self, data: Buffer, kind: WSMsgType = WSMsgType.BINARY, *, final: bool = True) -> None:
        """Send, or hold back if stalled; nothing if the socket has ended or is frozen."""
        if self._held is not None:
            self._held.append((kind, bytes(data), final))
            self._held_bytes += len(data)
            self._tell_owner()
        elif self.is_open and not self._frozen:
            assert self._transport is not None
            self._transport.send(kind, data, final)

    def pause_writing(self) -> None:
        self._buffer_full = True
        self._tell_owner()

    def resume_writing(self) -> None:
        self._buffer_full = False
        self._tell_owner()

    @property
    def is_slow(self) -> bool:
        return self._buffer_full or self._held_bytes > HIGH_WATER

    def _tell_owner(self) -> None:
        if self._told_slow == self.is_slow or not self.is_open:
            return
        self._told_slow = self.is_slow
        if self._told_slow:
            self.sending_slow()
        else:
            self.sending_ready()

    # ---- liveness and the end -----------------------------------------------------------

    def tick(self, now: float, ping_seconds: float, pong_seconds: float) -> None:
        """Ping, and give up a peer that does not answer."""
        if self._frozen or not self.is_open:
            return
        if self._pinged is not None:
            if now - self._pinged >= pong_seconds:
                self.abort()
        elif now - self._last_ping >= ping_seconds:
            assert self._transport is not None
            self._pinged = self._last_ping = now
            self._transport.send_ping()

    def close(self, code: int, reason: str = "") -> None:
        """Say goodbye and hang up."""
        if self._transport is not None and self.is_open:
            if not self._frozen:
                # Any number is a code on the wire; the stubs know only those with a name.
                self._transport.send_close(code, reason)  # type: ignore[arg-type]
            self._transport.disconnect()
            self._end()

    def abort(self) -> None:
        """Cut the connection without a word."""
        if self._transport is not None:
            self._transport.disconnect(graceful=False)
            self._end()

    # ---- faults -------------------------------------------------------------------------

    def freeze(self) -> None:
        """Half-open: the connection stays, nothing is read, answered or sent any more."""
        self._frozen = True
        self.hold_reading("frozen")

    def thaw(self) -> None:
        """Go on; messages sent in the meantime are lost."""
        self._frozen = False
        self.release_reading("frozen")

    def swallow_pings(self) -> None:
        """Neither answer pings nor take note of pongs; messages still pass."""
        self.answers_pings = self.hears_pongs = False

    def stall(self) -> None:
        """Hold back messages to send, and beyond a bound pause their sender."""
        if self._held is None:
            self._held = deque()

    def release(self) -> None:
        """Send the held back messages."""
        held, self._held, self._held_bytes = self._held, None, 0
        for kind, data, final in held or ():
            self.send(data, kind, final=final)
        self._tell_owner()

    def stall_for(self, seconds: float) -> None:
        self.stall()
        asyncio.get_running_loop().call_later(seconds, self.release)
