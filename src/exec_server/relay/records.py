"""From messages to records and back: order, length prefixes, reassembly."""

from __future__ import annotations

from collections.abc import Iterator

from exec_server.errors import RelayError

# One record: what one data frame carries, before encryption. Both sides count on it.
RECORD_BYTES = 61_440
# The limit of the protocol for one message. A larger one ends the stream.
MESSAGE_BYTES = 64 * 1_048_576
# How far ahead of the next record another may arrive, and what may wait for it in total. The
# reference has the same numbers; beyond them the stream ends.
WINDOW = 64
WAITING_BYTES = 1_048_576

_PREFIX_BYTES = 4
# The largest message that fits into one record.
ONE_RECORD_BYTES = RECORD_BYTES - _PREFIX_BYTES


def framed(message: bytes) -> bytes:
    """A message behind its length, as it is cut into records."""
    return prefix(len(message)) + message


def prefix(size: int) -> bytes:
    """The length of a message of `size` bytes as it precedes it."""
    if not 0 < size <= MESSAGE_BYTES:
        raise RelayError(f"message of {size} bytes")
    return size.to_bytes(_PREFIX_BYTES, "big")


def cut(data: bytes | bytearray) -> Iterator[bytes | memoryview]:
    """Pieces of at most a record."""
    if len(data) <= RECORD_BYTES:
        yield bytes(data)
        return
    view = memoryview(data)
    for start in range(0, len(data), RECORD_BYTES):
        yield view[start : start + RECORD_BYTES]


class Cutter:
    """Cuts a message of a known size that comes in parts."""

    def __init__(self, size: int, *, start: bytes, record_bytes: int = RECORD_BYTES) -> None:
        self._missing = size
        self._record_bytes = record_bytes
        self._waiting = bytearray(start)

    def feed(self, part: bytes) -> Iterator[bytes]:
        """The records that this part fills."""
        self._missing -= len(part)
        self._waiting += part
        while len(self._waiting) >= self._record_bytes:
            with memoryview(self._waiting) as view:
                record = bytes(view[: self._record_bytes])
            del self._waiting[: self._record_bytes]
            yield record

    def finish(self) -> bytes | None:
        """What is left for the last record; None if the message was not of its size."""
        return bytes(self._waiting) if self._missing == 0 else None


class ReorderWindow:
    """Puts encrypted records into the order of their numbers; of copies the first one counts."""

    __slots__ = ("_next", "_waiting", "_waiting_bytes")

    def __init__(self) -> None:
        self._next = 0
        self._waiting: dict[int, bytes] = {}
        self._waiting_bytes = 0

    def push(self, seq: int, record: bytes) -> list[bytes]:
        """What can be opened now, in order; RelayError when too much would have to wait."""
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


class Assembler:
    """Puts messages together from decrypted records, however they were cut."""

    __slots__ = ("_buffer", "announced")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.announced = 0  # the size of the message under way, 0 if unknown or none

    def feed(self, record: bytes) -> list[bytes]:
        """The messages that this record completes."""
        if len(record) > RECORD_BYTES:
            raise RelayError("record is too long")
        if not self._buffer and len(record) > _PREFIX_BYTES:
            size = int.from_bytes(record[:_PREFIX_BYTES], "big")
            if size == len(record) - _PREFIX_BYTES:  # nearly always: one message, whole
                return [record[_PREFIX_BYTES:]]
        self._buffer += record
        if len(self._buffer) < self.announced + _PREFIX_BYTES:
            return []
        return list(self._whole_messages())

    def _whole_messages(self) -> Iterator[bytes]:
        """Take whole messages from the start of the buffer."""
        buffer, offset = self._buffer, 0
        self.announced = 0
        while len(buffer) - offset >= _PREFIX_BYTES:
            size = int.from_bytes(buffer[offset : offset + _PREFIX_BYTES], "big")
            if not 0 < size <= MESSAGE_BYTES:
                raise RelayError(f"message of {size} bytes")
            end = offset + _PREFIX_BYTES + size
            if end > len(buffer):
                self.announced = size
                break
            with memoryview(buffer) as view:
                message = bytes(view[offset + _PREFIX_BYTES : end])
            yield message
            offset = end
        del buffer[:offset]
