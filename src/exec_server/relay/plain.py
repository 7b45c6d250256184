"""The older form of the relay: frames with bare JSON-RPC messages, not encrypted.

A stream begins with its first data frame. Numbers are written and not looked at; a message may
come in segments. Spoken only where it was asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Protocol

from exec_server.errors import RelayError
from exec_server.relay.active import ActiveStreams, Receiver
from exec_server.relay.frames import Frame, Kind, data_frame, decode, stream_prefix
from exec_server.relay.records import MESSAGE_BYTES, Cutter
from exec_server.relay.streams import Attempt

log = logging.getLogger(__name__)

_SEQ_MASK = 0xFFFF_FFFF


class PlainChannel:
    """One stream: each message is the payload of a frame."""

    message_bytes = MESSAGE_BYTES

    def __init__(self, stream_id: str) -> None:
        self.stream_id = stream_id
        self._prefix = stream_prefix(stream_id)
        self._seq = 0
        self._segments = bytearray()
        self._next_segment = 0

    def receive(self, frame: Frame) -> list[bytes]:
        """The message that a data frame completes."""
        if frame.segment_count <= 1:
            return [frame.payload]
        if frame.segment_index == 0:
            self._segments.clear()
        elif frame.segment_index != self._next_segment:
            raise RelayError("segments out of order")
        if len(self._segments) + len(frame.payload) > MESSAGE_BYTES:
            raise RelayError("message is too long")
        self._segments += frame.payload
        self._next_segment = frame.segment_index + 1
        if self._next_segment < frame.segment_count:
            return []
        message = bytes(self._segments)
        self._segments.clear()
        self._next_segment = 0
        return [message]

    @property
    def announced(self) -> int:
        """What is held of a message whose size is not known yet."""
        return len(self._segments)

    def pieces(self, message: bytes) -> Iterator[bytes | memoryview]:
        if not 0 < len(message) <= MESSAGE_BYTES:
            raise RelayError(f"message of {len(message)} bytes")
        return iter((message,))

    def cutter(self, size: int) -> Cutter:
        """A message that comes in parts has to be collected: a frame carries all of it."""
        assert size > 0
        return Cutter(size, start=b"", record_bytes=size)

    def seal(self, piece: bytes | memoryview) -> bytes:
        seq, self._seq = self._seq, self._seq + 1 & _SEQ_MASK
        return data_frame(self._prefix, seq, bytes(piece))


class Owner(Protocol):
    """The link, seen from here."""

    def send_frame(self, frame: bytes) -> None: ...

    def stream_opened(self, channel: PlainChannel) -> Receiver: ...


class PlainStreams:
    """The streams of one rendezvous connection."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._active = ActiveStreams(owner.send_frame)

    def frame_received(self, data: bytes) -> None:
        try:
            frame = decode(data)
        except RelayError as error:
            log.debug("dropped a frame: %s", error)
            return
        if frame.kind is Kind.RESET:
            self._active.drop(frame.stream_id)
        elif frame.kind is Kind.DATA and not self._active.deliver(frame):
            self._open(frame)

    def _open(self, frame: Frame) -> None:
        """Begin a stream with its first frame."""
        if self._active.is_full:
            self._active.refuse(frame.stream_id)
            return
        channel = PlainChannel(frame.stream_id)
        self._active.add(channel, self._owner.stream_opened(channel))
        self._active.deliver(frame)

    def settle(self, attempt: Attempt, *, is_valid: bool) -> None:
        """There is nothing to validate without a handshake."""

    def end(self, stream_id: str) -> None:
        """Forget a stream and tell its peer."""
        self._active.end(stream_id)

    def lose_all(self) -> None:
        """The link is gone, and all streams with it."""
        self._active.lose_all()
