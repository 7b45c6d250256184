"""The historical form of the relay: frames with bare JSON-RPC messages, not encrypted.

A stream begins with its first data frame. Sequence numbers are sent and ignored; a message may be
sent in segments. Used only with `--relay-security plain`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from exec_server.errors import RelayError
from exec_server.relay.frames import Frame, Kind, data_frame, stream_prefix
from exec_server.relay.multiplexer import PendingHandshake, StreamReceiver, StreamTable
from exec_server.relay.records import MESSAGE_BYTES, RecordSplitter

_SEQ_MASK = 0xFFFF_FFFF


class PlainChannel:
    """One stream; each message is the payload of a frame."""

    message_bytes = MESSAGE_BYTES

    def __init__(self, stream_id: str) -> None:
        self.stream_id = stream_id
        self.prefix = stream_prefix(stream_id)
        self._seq = 0
        self._segments = bytearray()
        self._next_segment = 0

    def receive(self, frame: Frame) -> list[bytes]:
        """Return the message that a data frame completes."""
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

    def receive_record(self, seq: int, record: bytes) -> list[bytes]:
        """Return the message of a frame that is no segment."""
        return [record]

    @property
    def incoming_size(self) -> int:
        """The bytes held of an incomplete message, whose size is not known."""
        return len(self._segments)

    def drop_incoming(self) -> None:
        """Free the memory of an incomplete message: no more frames are received."""
        self._segments = bytearray()

    def records(self, message: bytes) -> Iterator[bytes | memoryview]:
        if not 0 < len(message) <= MESSAGE_BYTES:
            raise RelayError(f"message of {len(message)} bytes")
        return iter((message,))

    def one_record(self, message: bytes) -> bytes:
        """The record of a short message."""
        return b"".join(self.records(message))

    def splitter(self, size: int) -> RecordSplitter:
        """Return a splitter that collects the whole message, because one frame carries it."""
        assert size > 0
        return RecordSplitter(size, start=b"", record_bytes=size)

    def seal(self, record: bytes | memoryview) -> bytes:
        seq, self._seq = self._seq, self._seq + 1 & _SEQ_MASK
        return data_frame(self.prefix, seq, bytes(record))


class PlainRelayLink(Protocol):
    """The operations of a link that the multiplexer needs."""

    def send_frame(self, frame: bytes) -> None: ...

    def stream_opened(self, channel: PlainChannel) -> StreamReceiver: ...


class PlainMultiplexer:
    """The executor's streams on one link."""

    def __init__(self, link: PlainRelayLink) -> None:
        self._link = link
        self._streams = StreamTable(link.send_frame)

    def frame_received(self, data: bytes) -> None:
        frame = self._streams.frame_received(data)
        if frame is not None and frame.kind is Kind.DATA:
            self._open(frame)

    def _open(self, frame: Frame) -> None:
        """Open a stream with its first frame."""
        if self._streams.is_full:
            self._streams.send_reset(frame.stream_id)
            return
        channel = PlainChannel(frame.stream_id)
        self._streams.add(channel, self._link.stream_opened(channel))
        self._streams.deliver(frame)

    def finish_handshake(self, handshake: PendingHandshake, *, is_valid: bool) -> None:
        """Do nothing: streams have no handshake."""

    def end(self, stream_id: str) -> None:
        """Remove a stream and send its peer a reset."""
        self._streams.end(stream_id)

    def link_lost(self) -> None:
        """Tell all streams that the link is lost."""
        self._streams.link_lost()
