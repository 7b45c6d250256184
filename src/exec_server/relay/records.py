"""Messages to records and back: length prefixes, order, reassembly."""

from __future__ import annotations

from collections.abc import Iterator

from exec_server.errors import RelayError
from exec_server.relay.frames import Frame, data_frame, stream_prefix
from exec_server.relay.noise import Ciphers

# Plaintext of one data frame. Both sides rely on this limit.
RECORD_BYTES = 61_440
# The limit of the protocol for one message. A larger one ends the stream.
MESSAGE_BYTES = 64 * 1_048_576
# How far ahead of the next record another may arrive, and how many bytes may wait for a missing
# record. The numbers are those of the reference; beyond them the stream ends.
WINDOW = 64
WAITING_BYTES = 1_048_576

_PREFIX_BYTES = 4
# The largest message that fits into one record.
ONE_RECORD_BYTES = RECORD_BYTES - _PREFIX_BYTES
_LAST_SEQ = 0xFFFF_FFFF


def with_length_prefix(message: bytes) -> bytes:
    """A message after its length, ready to be split into records."""
    return length_prefix(len(message)) + message


def length_prefix(size: int) -> bytes:
    """The prefix of a message of `size` bytes; raises RelayError for a size out of range."""
    if not 0 < size <= MESSAGE_BYTES:
        raise RelayError(f"message of {size} bytes")
    return size.to_bytes(_PREFIX_BYTES, "big")


def split_records(data: bytes | bytearray) -> Iterator[bytes | memoryview]:
    """Split data into pieces of at most a record."""
    if len(data) <= RECORD_BYTES:
        yield bytes(data)
        return
    view = memoryview(data)
    for start in range(0, len(data), RECORD_BYTES):
        yield view[start : start + RECORD_BYTES]


class RecordSplitter:
    """Splits a message of a known size that is passed in parts."""

    def __init__(self, size: int, *, start: bytes, record_bytes: int = RECORD_BYTES) -> None:
        self._missing = size
        self._record_bytes = record_bytes
        self._waiting = bytearray(start)

    def feed(self, part: bytes) -> Iterator[bytes]:
        """Return the records that this part completes."""
        self._missing -= len(part)
        self._waiting += part
        while len(self._waiting) >= self._record_bytes:
            with memoryview(self._waiting) as view:
                record = bytes(view[: self._record_bytes])
            del self._waiting[: self._record_bytes]
            yield record

    def finish(self) -> bytes | None:
        """Return the last record, or None if the parts did not have the announced size."""
        return bytes(self._waiting) if self._missing == 0 else None


class ReorderWindow:
    """Puts encrypted records into the order of their numbers; later copies are dropped."""

    __slots__ = ("_next", "_waiting", "_waiting_bytes")

    def __init__(self) -> None:
        self._next = 0
        self._waiting: dict[int, bytes] = {}
        self._waiting_bytes = 0

    def take(self, seq: int) -> bool:
        """Count a record that is next, if none waits; False if it has to be pushed."""
        if seq != self._next or self._waiting:
            return False
        self._next = seq + 1
        return True

    def push(self, seq: int, record: bytes) -> list[bytes]:
        """Return the records that are next, in order; raises RelayError if too much has to wait."""
        if seq == self._next:
            self._next += 1
            return self._released([record]) if self._waiting else [record]
        if seq < self._next or seq in self._waiting:
            return []
        if seq - self._next > WINDOW:
            raise RelayError("record exceeds reorder window")
        if self._waiting_bytes + len(record) > WAITING_BYTES:
            raise RelayError("too many bytes wait for a missing record")
        self._waiting[seq] = record
        self._waiting_bytes += len(record)
        return []

    def _released(self, records: list[bytes]) -> list[bytes]:
        while self._next in self._waiting:
            record = self._waiting.pop(self._next)
            self._waiting_bytes -= len(record)
            self._next += 1
            records.append(record)
        return records


class MessageAssembler:
    """Assembles messages from decrypted records, wherever those were split."""

    __slots__ = ("_buffer", "incoming_size")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.incoming_size = 0  # of the incomplete message; 0 if there is none or it is not known

    def feed(self, record: bytes) -> list[bytes]:
        """Return the messages that this record completes."""
        if len(record) > RECORD_BYTES:
            raise RelayError("record is too long")
        if not self._buffer and len(record) > _PREFIX_BYTES:
            size = int.from_bytes(record[:_PREFIX_BYTES], "big")
            if size == len(record) - _PREFIX_BYTES:  # fast path: one whole message
                return [record[_PREFIX_BYTES:]]
        self._buffer += record
        if len(self._buffer) < self.incoming_size + _PREFIX_BYTES:
            return []
        return list(self._whole_messages())

    def _whole_messages(self) -> Iterator[bytes]:
        buffer, offset = self._buffer, 0
        self.incoming_size = 0
        while len(buffer) - offset >= _PREFIX_BYTES:
            size = int.from_bytes(buffer[offset : offset + _PREFIX_BYTES], "big")
            if not 0 < size <= MESSAGE_BYTES:
                raise RelayError(f"message of {size} bytes")
            end = offset + _PREFIX_BYTES + size
            if end > len(buffer):
                self.incoming_size = size
                break
            with memoryview(buffer) as view:
                message = bytes(view[offset + _PREFIX_BYTES : end])
            yield message
            offset = end
        del buffer[:offset]


class RelayChannel:
    """An encrypted stream after its handshake; a method that raises RelayError has ended it."""

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


class PlainChannel:
    """A historical stream, not encrypted; sequence numbers are sent, and ignored on receipt."""

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
        seq, self._seq = self._seq, self._seq + 1 & _LAST_SEQ
        return data_frame(self.prefix, seq, bytes(record))


Channel = RelayChannel | PlainChannel
