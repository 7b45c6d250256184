"""One relay stream after its handshake: messages to frames, frames to messages."""

from __future__ import annotations

from collections.abc import Iterator

from exec_server.errors import RelayError
from exec_server.relay.frames import Frame, data_frame, stream_prefix
from exec_server.relay.noise import Ciphers
from exec_server.relay.records import (
    MESSAGE_BYTES,
    MessageAssembler,
    RecordSplitter,
    ReorderWindow,
    length_prefix,
    split_records,
    with_length_prefix,
)

_LAST_SEQ = 0xFFFF_FFFF


class Channel:
    """An encrypted stream; a method that raises RelayError has ended it."""

    message_bytes = MESSAGE_BYTES

    def __init__(self, stream_id: str, ciphers: Ciphers) -> None:
        self.stream_id = stream_id
        self._sending, self._receiving = ciphers
        self.prefix = stream_prefix(stream_id)
        self._seq = 0
        self._window = ReorderWindow()
        self._assembler = MessageAssembler()

    def receive(self, frame: Frame) -> list[bytes]:
        """Return the messages that a data frame completes."""
        if frame.is_segment:
            return []  # dropped as by the reference: the stream keeps waiting for this number
        return self.receive_record(frame.seq, frame.payload)

    def receive_record(self, seq: int, record: bytes) -> list[bytes]:
        """Return the messages that an encrypted record completes."""
        if self._window.take(seq):  # fast path: the next record, and none waits for it
            return self._assembler.feed(self._receiving.open(record))
        messages: list[bytes] = []
        for each in self._window.push(seq, record):
            messages += self._assembler.feed(self._receiving.open(each))
        return messages

    @property
    def incoming_size(self) -> int:
        """The size of the incomplete message, 0 if there is none or it is not known."""
        return self._assembler.incoming_size

    def drop_incoming(self) -> None:
        """Free the memory of incomplete messages: no more frames are received."""
        self._window, self._assembler = ReorderWindow(), MessageAssembler()

    def records(self, message: bytes) -> Iterator[bytes | memoryview]:
        """Split a message into records to seal."""
        return split_records(with_length_prefix(message))

    def one_record(self, message: bytes) -> bytes:
        """The record of a message that fits into one; faster than `records`."""
        return with_length_prefix(message)

    def splitter(self, size: int) -> RecordSplitter:
        """Return a splitter for a message of `size` bytes that is passed in parts."""
        return RecordSplitter(size, start=length_prefix(size))

    def seal(self, record: bytes | memoryview) -> bytes:
        """Encrypt a record into the next frame of the stream."""
        seq = self._seq
        if seq > _LAST_SEQ:
            raise RelayError("stream is exhausted")
        self._seq = seq + 1
        return data_frame(self.prefix, seq, self._sending.seal(record))
