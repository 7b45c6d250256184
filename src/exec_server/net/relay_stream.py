"""RelayStream: one stream of a relay as a MessageStream, for both roles.

Streams share a socket, so neither direction may ever wait for one stream: each queues its own
frames, and the carrier sends one of each in turn. Messages for a paused receiver are queued within
limits; a peer that goes beyond them loses its stream, and only that one.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from exec_server.errors import InternalError, RelayError
from exec_server.host.event_loop import guarded_call
from exec_server.net.inbox import ByteBudget, Inbox, Reservation
from exec_server.net.liveness import Action, CheckTimer, KeepAlive, Probe, TransferProgress
from exec_server.net.outbox import Outbox
from exec_server.net.stream import ReceiverFactory
from exec_server.net.websocket.client import ClientSocket
from exec_server.relay.records import ONE_RECORD_BYTES, Channel, RecordSplitter

log = logging.getLogger(__name__)

# Messages queued while the receiver is paused, beside those that it has queued itself. As many as
# the reference queues in all; one more ends the stream.
QUEUED_MESSAGES = 128
# Bytes of incoming messages, complete or not, that a stream holds without asking. More is taken
# from a budget that all streams share, so that many streams together cannot make us hold more; a
# stream that finds the budget spent ends.
FREE_BYTES = 1_048_576
RECEIVING_BYTES = 4 * 64 * 1_048_576
# A large message that makes no progress for this long ends its stream, which frees its bytes.
STALL_SECONDS = 30.0
# Unsent bytes at which the producer is asked to stop, and at which to go on.
SEND_HIGH_BYTES = 524_288
SEND_LOW_BYTES = 131_072
# How long a peer has to send anything when another connection asks for its session. A relay has no
# pings for one stream, and a client that resumes its session has lost the old stream.
PROBE_SECONDS = 3.0

# As often as the reference; no second ping while an answer is outstanding.
PING_SECONDS = 30.0
# Without a pong for this long after a ping, the peer is gone. The same for a peer that takes no
# bytes from the send buffer.
PONG_SECONDS = 60.0
WRITE_SECONDS = 60.0
# Frames sent in a row before the event loop runs other callbacks.
BURST = 32


class RelayStream:
    """A MessageStream; the link calls `messages_received` and `stream_lost`."""

    is_strict = True

    def __init__(
        self,
        carrier: RelaySocket,
        channel: Channel,
        receiver: ReceiverFactory,
        budget: ByteBudget,
        set_reading: Callable[[bool], None] | None = None,
    ) -> None:
        """`set_reading` pauses and resumes the socket, if it has no other stream."""
        self.origin = f"JSON-RPC message from relay stream {channel.stream_id}"
        self.stream_id = channel.stream_id
        self._loop = asyncio.get_running_loop()
        self._carrier = carrier
        self._channel = channel
        self._set_reading = set_reading
        self._is_ended = False
        # Receiving.
        self._queue: deque[bytes] = deque()
        self._queue_bytes = 0
        self._reservation = Reservation(budget, lambda: None)
        self._progress = TransferProgress(STALL_SECONDS)
        self._stall_watchdog = CheckTimer(self._check_progress)
        self._probe = Probe(PROBE_SECONDS, lambda reason: self.close(0, reason))
        # Sending.
        self._frames: deque[tuple[bytes | memoryview, Iterator[bytes | memoryview]]] = deque()
        self._is_scheduled = False
        self._unsent = 0
        self._outbox = Outbox(self._break_off)
        self._inbox: Inbox[bytes] = Inbox(
            self._next_message, self._deliver, self._update_reading, burst=QUEUED_MESSAGES
        )
        self.receiver = receiver(self)  # it may pause the stream at once
        self._outbox.producer = self.receiver

    def messages_received(self, messages: list[bytes]) -> None:
        if self._is_ended:
            return
        if self._probe.is_active:
            self._probe.cancel()
        for message in messages:
            if self._inbox.is_flowing:
                self.receiver.message_received(message)
                if self._is_ended:
                    return
            elif len(self._queue) == QUEUED_MESSAGES:
                raise RelayError("too many messages wait")
            else:
                self._queue.append(message)
                self._queue_bytes += len(message)
        if not (self._queue_bytes or self._reservation.size or self._channel.incoming_size):
            return  # fast path: nothing is held
        if not self._reserve():
            raise RelayError("no room for a large message")
        if self._reservation.size:
            self._progress.touch(self._loop.time())
            self._stall_watchdog.start(STALL_SECONDS)

    def _reserve(self) -> bool:
        return self._reservation.resize(
            max(0, self._queue_bytes + self._channel.incoming_size - FREE_BYTES)
        )

    def _check_progress(self) -> float | None:
        if not self._reservation.size:
            return None
        now = self._loop.time()
        if self._inbox.is_paused:
            self._progress.touch(now)  # the peer cannot be blamed
        remaining = self._progress.remaining(now)
        if remaining > 0:
            return remaining
        self.close(0, "message stalled")
        return None

    def _next_message(self) -> bytes | None:
        if not self._queue:
            return None
        message = self._queue.popleft()
        self._queue_bytes -= len(message)
        self._reserve()
        return message

    def _deliver(self, message: bytes) -> None:
        self.receiver.message_received(message)

    def pause_reading(self) -> None:
        self._inbox.pause()

    def resume_reading(self) -> None:
        self._inbox.resume()

    def _update_reading(self) -> None:
        if self._set_reading is not None and not self._is_ended:
            self._set_reading(self._inbox.is_flowing)

    def send(self, message: bytes) -> None:
        self._outbox.send(message, self._write_message)

    def _write_message(self, message: bytes) -> None:
        try:
            if self._is_scheduled or self._carrier.is_full or len(message) > ONE_RECORD_BYTES:
                records = self._channel.records(message)
                self._enqueue(next(records), records, len(message))
            else:
                self._carrier.send_frame(self._channel.seal(self._channel.one_record(message)))
        except RelayError as error:
            self.close(0, str(error))

    async def send_parts(self, parts: AsyncIterator[bytes], size: int) -> None:
        """Send one message in parts; its size has to be known because it is sent first."""
        if size > self._channel.message_bytes:
            raise InternalError(
                f"the answer has {size} bytes; a relay carries {self._channel.message_bytes}"
            )
        await self._outbox.send_parts(parts, _RecordWriter(self, self._channel.splitter(size)))

    def write_record(self, record: bytes) -> None:
        """Send a part of a message that is as large as a record."""
        self._enqueue(record, iter(()), len(record))

    def _enqueue(
        self, first: bytes | memoryview, more: Iterator[bytes | memoryview], size: int
    ) -> None:
        self._frames.append((first, more))
        self._unsent += size
        if not self._is_scheduled:
            self._is_scheduled = True
            self._carrier.schedule(self)
        if self._unsent > SEND_HIGH_BYTES and not self._outbox.is_full:
            self._outbox.pause_writing()

    def send_next(self) -> bool:
        """Send one frame; returns whether there are more to send."""
        if not self._frames:
            return False  # the stream was lost meanwhile
        record, more = self._frames[0]
        try:
            self._carrier.send_frame(self._channel.seal(record))
        except RelayError as error:
            self._frames.clear()
            self.close(0, str(error))
            return False
        self._unsent = max(0, self._unsent - len(record))
        next_record = next(more, None)
        if next_record is None:
            self._frames.popleft()
        else:
            self._frames[0] = (next_record, more)
        if not self._frames:
            self._unsent = 0  # length prefixes were not counted
            if self._is_ended:
                self._forget()
                return False
        if self._unsent <= SEND_LOW_BYTES and self._outbox.is_full:
            self._outbox.resume_writing()
        self._is_scheduled = bool(self._frames)
        return self._is_scheduled

    def unsent(self) -> int:
        return self._unsent + self._outbox.queued_bytes

    def probe(self) -> None:
        if not self._is_ended:
            self._probe.start()

    def _break_off(self) -> None:
        self.close(0, "a message could not be completed")

    def close(self, code: int, reason: str) -> None:
        """End the stream after the queued frames; the peer sees a reset without a reason."""
        if self._is_ended:
            return
        log.info("%s: ends: %s", self.origin, reason)
        self._end()
        self._loop.call_soon(self.receiver.connection_lost)
        if not self._frames:
            self._forget()

    def fail(self) -> None:
        """End the stream at once, without its queued frames: one of them could not be sent."""
        self._frames.clear()
        self.close(0, "internal error")

    def _forget(self) -> None:
        self._carrier.end_stream(self._channel.stream_id)
        self._channel.drop_incoming()

    def stream_lost(self) -> None:
        """The peer or the socket is gone."""
        self._frames.clear()
        self._channel.drop_incoming()
        if not self._is_ended:
            self._end()
            self.receiver.connection_lost()

    def _end(self) -> None:
        self._is_ended = True
        self._inbox.close()
        self._outbox.close()
        self._queue.clear()
        self._reservation.release()
        self._probe.cancel()
        self._stall_watchdog.cancel()


class _RecordWriter:
    """Writes one message in parts as records; an outbox.PartWriter."""

    def __init__(self, stream: RelayStream, splitter: RecordSplitter) -> None:
        self._stream = stream
        self._splitter = splitter

    def write(self, part: bytes) -> None:
        for record in self._splitter.feed(part):
            self._stream.write_record(record)

    def finish(self) -> None:
        rest = self._splitter.finish()
        if rest is None:
            self._stream.close(0, "a message had not the announced size")
        elif rest:
            self._stream.write_record(rest)


class RelaySocket(ABC):
    """The carrier of the streams on one ClientSocket: fair sending, keep-alive, deadlines.

    `ended` gets the reason once the socket is lost, after `streams_lost` was called.
    """

    def __init__(self, socket: ClientSocket) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self.is_full = False  # the send buffer is above its high mark
        self.is_paused = False  # the socket is not read, so no pong can be expected
        self._unsent_before = 0
        self._sending: deque[RelayStream] = deque()  # at most as many as there are streams
        self._is_pumping = False
        self._write_progress = TransferProgress(WRITE_SECONDS)
        self._write_watchdog = CheckTimer(self._check_writing)
        self._keep_alive = KeepAlive(self._loop.time(), PING_SECONDS, PONG_SECONDS)
        self._ping_watchdog = CheckTimer(self._check_peer)
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

    def send_frame(self, frame: bytes) -> None:
        self._socket.send(frame, is_text=False)

    def schedule(self, stream: RelayStream) -> None:
        """Call `send_next` of a stream, in turn with the others, until it has no more frames."""
        self._sending.append(stream)
        self._pump()

    def _pump(self) -> None:
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
