"""One stream of a relay as a MessageStream, whoever holds the socket below it.

Theory of operation. The socket is shared, so neither direction may ever wait for one stream.
What we send goes out at once while the socket takes it; otherwise each stream queues its own,
and the socket's owner takes a frame of each in turn. What arrives while our side does not want
it is kept, within limits; a peer that goes beyond them loses its stream, and only that.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Protocol

from exec_server.errors import InternalError, RelayError
from exec_server.relay.records import ONE_RECORD_BYTES, Cutter
from exec_server.rpc.stream import MessageReceiver, MessageStream
from exec_server.transports.room import Room

log = logging.getLogger(__name__)

# Messages that wait because the receiver is busy, beside those that it has queued itself. As
# many as the reference queues in all; one more ends the stream.
QUEUED_MESSAGES = 128
# What a stream may hold of incoming messages, whole or not, without asking. More is taken from
# a room that all streams share, so that many together cannot make us hold more than that; a
# stream that finds it full ends.
FREE_BYTES = 1_048_576
RECEIVING_BYTES = 4 * 64 * 1_048_576
# A large message that makes no progress for so long gives its room back by ending its stream.
STALL_SECONDS = 30.0
# Unsent bytes at which output is no longer read from children, and at which it is again.
SEND_HIGH_BYTES = 524_288
SEND_LOW_BYTES = 131_072
# How long a peer has to say anything when somebody wants its session. A relay has no pings for
# one stream, and a client that comes back has lost the old one.
PROBE_SECONDS = 3.0


class AnyChannel(Protocol):
    """Messages to frames, encrypted or, for older peers, not."""

    stream_id: str
    message_bytes: int

    @property
    def announced(self) -> int: ...

    def pieces(self, message: bytes) -> Iterator[bytes | memoryview]: ...

    def cutter(self, size: int) -> Cutter: ...

    def seal(self, piece: bytes | memoryview) -> bytes: ...


class Outlet(Protocol):
    """The socket's owner, seen from one of its streams."""

    is_slow: bool

    def send_frame(self, frame: bytes) -> None: ...

    def take_turns(self, stream: RelayStream) -> None:
        """Call `send_next` when it is this stream's turn, until it has no more."""
        ...

    def end_stream(self, stream_id: str) -> None:
        """Forget the stream and tell the peer."""
        ...


class RelayStream:
    """A MessageStream; also the receiver of what the socket's owner takes from frames."""

    is_strict = True

    def __init__(
        self,
        outlet: Outlet,
        channel: AnyChannel,
        receiver: Callable[[MessageStream], MessageReceiver],
        room: Room,
    ) -> None:
        self.origin = f"JSON-RPC message from relay stream {channel.stream_id}"
        self._loop = asyncio.get_running_loop()
        self._outlet = outlet
        self._channel = channel
        self._room = room
        self._ended = False
        # Receiving.
        self._receiving = True
        self._incoming: deque[bytes] = deque()
        self._incoming_bytes = 0
        self._reserved = 0
        self._last_heard = self._loop.time()
        self._probe: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        # Sending.
        self._outgoing: deque[tuple[bytes | memoryview, Iterator[bytes | memoryview]]] = deque()
        self._takes_turns = False
        self._unsent = 0
        self._slow = False
        self._parts_turn = asyncio.Lock()  # messages that come in parts, one after the other
        self._behind_parts: list[bytes] | None = None
        self._behind_parts_bytes = 0
        self._sendable: asyncio.Future[None] | None = None
        self._receiver = receiver(self)

    # ---- receiving --------------------------------------------------------------------

    def messages_received(self, messages: list[bytes]) -> None:
        if self._ended:
            return
        self._last_heard = self._loop.time()
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None
        for message in messages:
            if self._receiving and not self._incoming:
                self._receiver.message_received(message)
                if self._ended:
                    return
            elif len(self._incoming) == QUEUED_MESSAGES:
                raise RelayError("too many messages wait")
            else:
                self._incoming.append(message)
                self._incoming_bytes += len(message)
        self._reserve(self._incoming_bytes + self._channel.announced)

    def _reserve(self, size: int) -> None:
        """Hold as much of the shared room as `size` needs; RelayError if there is not so much."""
        wanted = max(0, size - FREE_BYTES)
        if wanted > self._reserved:
            if not self._room.take_now(wanted - self._reserved):
                raise RelayError("no room for a large message")
        elif wanted < self._reserved:
            self._room.give_back(self._reserved - wanted)
        self._reserved = wanted
        if wanted and self._stall_timer is None:
            self._stall_timer = self._loop.call_later(STALL_SECONDS, self._check_progress)

    def _check_progress(self) -> None:
        self._stall_timer = None
        if not self._reserved:
            return
        quiet = self._loop.time() - self._last_heard
        if quiet >= STALL_SECONDS and self._receiving:
            self.close(0, "message stalled")
        else:
            wait = STALL_SECONDS - quiet if self._receiving else STALL_SECONDS
            self._stall_timer = self._loop.call_later(wait, self._check_progress)

    def hold(self, *, receiving: bool) -> None:
        if receiving != self._receiving:
            self._receiving = receiving
            if receiving:
                self._loop.call_soon(self._continue)

    def _continue(self) -> None:
        """Hand over what has waited, as far as it is wanted."""
        while self._incoming and self._receiving and not self._ended:
            message = self._incoming.popleft()
            self._incoming_bytes -= len(message)
            self._receiver.message_received(message)
        if not self._ended:
            self._reserve(self._incoming_bytes + self._channel.announced)

    # ---- sending ----------------------------------------------------------------------

    def send(self, message: bytes) -> None:
        if self._ended:
            return
        if self._behind_parts is not None:
            self._behind_parts.append(message)
            self._behind_parts_bytes += len(message)
            return
        try:
            pieces = self._channel.pieces(message)
            first = next(pieces)
            if self._takes_turns or self._outlet.is_slow or len(message) > ONE_RECORD_BYTES:
                self._enqueue(first, pieces, len(message))
            else:
                self._outlet.send_frame(self._channel.seal(first))
        except RelayError as error:
            self.close(0, str(error))

    def _enqueue(
        self, first: bytes | memoryview, more: Iterator[bytes | memoryview], size: int
    ) -> None:
        self._outgoing.append((first, more))
        self._unsent += size
        if not self._takes_turns:
            self._takes_turns = True
            self._outlet.take_turns(self)
        if self._unsent > SEND_HIGH_BYTES and not self._slow:
            self._slow = True
            self._tell_slow()

    def send_next(self) -> bool:
        """Send one frame; returns whether there are more to send."""
        if not self._outgoing:
            return False  # lost meanwhile
        piece, more = self._outgoing[0]
        try:
            self._outlet.send_frame(self._channel.seal(piece))
        except RelayError as error:
            self._outgoing.clear()
            self.close(0, str(error))
            return False
        self._unsent = max(0, self._unsent - len(piece))
        following = next(more, None)
        if following is None:
            self._outgoing.popleft()
        else:
            self._outgoing[0] = (following, more)
        if not self._outgoing:
            self._unsent = 0  # prefixes were not counted
            if self._ended:
                self._outlet.end_stream(self._channel.stream_id)
                return False
        if self._unsent <= SEND_LOW_BYTES:
            self._wake_sender()
            if self._slow:
                self._slow = False
                self._tell_ready()
        self._takes_turns = bool(self._outgoing)
        return self._takes_turns

    async def send_parts(self, parts: AsyncIterator[bytes], size: int) -> None:
        """Send one message as it is made; its length has to be known because it goes first."""
        if size > self._channel.message_bytes:
            raise InternalError(
                f"the answer has {size} bytes; a relay carries {self._channel.message_bytes}"
            )
        async with self._parts_turn:
            self._behind_parts = []
            self._tell_slow()
            try:
                await self._send_parts(parts, size)
            except BaseException:
                self.close(0, "a message was cut off")  # the peer has half of it
                raise
            finally:
                held, self._behind_parts = self._behind_parts, None
                self._behind_parts_bytes = 0
                for message in held:
                    self.send(message)
                if not self._slow:
                    self._tell_ready()

    async def _send_parts(self, parts: AsyncIterator[bytes], size: int) -> None:
        cutter = self._channel.cutter(size)
        async for part in parts:
            for record in cutter.feed(part):
                self._enqueue(record, iter(()), len(record))
            await self._wait_sendable()
            if self._ended:
                return
        rest = cutter.finish()
        if rest is None:
            self.close(0, "a message was cut off")
        elif rest:
            self._enqueue(rest, iter(()), len(rest))

    async def _wait_sendable(self) -> None:
        while self._unsent > SEND_LOW_BYTES and not self._ended:
            self._sendable = self._loop.create_future()
            await self._sendable

    def _wake_sender(self) -> None:
        if self._sendable is not None and not self._sendable.done():
            self._sendable.set_result(None)

    def unsent(self) -> int:
        return self._unsent + self._behind_parts_bytes

    def _tell_slow(self) -> None:
        if not self._ended:
            self._receiver.sending_slow()

    def _tell_ready(self) -> None:
        if not self._ended and self._behind_parts is None:
            self._receiver.sending_ready()

    # ---- the end ----------------------------------------------------------------------

    def probe(self) -> None:
        if self._probe is None and not self._ended:
            reason = "its session is wanted elsewhere and it is silent"
            self._probe = self._loop.call_later(PROBE_SECONDS, self.close, 0, reason)

    def close(self, code: int, reason: str) -> None:
        """End the stream after what was sent; the peer sees a reset, which tells no reason."""
        if self._ended:
            return
        log.info("%s: ends: %s", self.origin, reason)
        self._give_up()
        self._loop.call_soon(self._receiver.link_lost)
        if not self._outgoing:
            self._outlet.end_stream(self._channel.stream_id)

    def stream_lost(self) -> None:
        """The peer or the socket is gone."""
        self._outgoing.clear()
        if not self._ended:
            self._give_up()
            self._receiver.link_lost()

    def _give_up(self) -> None:
        self._ended = True
        self._incoming.clear()
        self._room.give_back(self._reserved)
        self._reserved = 0
        for timer in (self._probe, self._stall_timer):
            if timer is not None:
                timer.cancel()
        self._wake_sender()
