"""CollectedOutput: the output of a command up to a limit, for both streams together or for each."""

from __future__ import annotations

from typing import Final

import msgspec

from exec_server.errors import InvalidParams
from exec_server.protocol.process import Stream

# The end of a stream grows by so much beyond its limit before it is cut, so that small chunks are
# not moved each time.
SLACK_BYTES: Final = 65_536


class OutputLimit(msgspec.Struct, frozen=True):
    """A limit for each stream: its first `head` bytes and its last `tail` bytes are kept."""

    head: int = 0
    tail: int = 0


class CollectedOutput:
    """The output of a command up to a limit; the rest is counted, for each stream."""

    def __init__(self, limit: int | OutputLimit) -> None:
        # Not lists of chunks: chunks of one byte would take fifty times their size.
        self._streams: dict[bool, _SharedLimit | _HeadAndTail]
        self.received = 0
        if isinstance(limit, OutputLimit):
            for name, size in (("head", limit.head), ("tail", limit.tail)):
                if size < 0:
                    raise InvalidParams(f"{name} of output_limit must not be negative: {size}")
            self._streams = {is_error: _HeadAndTail(limit) for is_error in (False, True)}
            return
        if limit < 0:
            raise InvalidParams(f"output_limit must not be negative: {limit}")
        remaining = _Remaining(limit)
        self._streams = {is_error: _SharedLimit(remaining) for is_error in (False, True)}

    def add(self, stream: Stream, data: bytes) -> None:
        self._streams[stream == "stderr"].add(data)

    @property
    def stdout(self) -> bytes:
        return self._streams[False].kept()

    @property
    def stderr(self) -> bytes:
        return self._streams[True].kept()

    @property
    def lost_stdout(self) -> int:
        return self._streams[False].lost_bytes

    @property
    def lost_stderr(self) -> int:
        return self._streams[True].lost_bytes


class _Remaining:
    """The bytes that two streams may still keep."""

    def __init__(self, size: int) -> None:
        self.size = size


class _SharedLimit:
    """The beginning of a stream that shares its limit with the other one."""

    def __init__(self, remaining: _Remaining) -> None:
        self._remaining = remaining
        self._data = bytearray()
        self.lost_bytes = 0

    def add(self, data: bytes) -> None:
        kept = data[: self._remaining.size]
        self._remaining.size -= len(kept)
        self.lost_bytes += len(data) - len(kept)
        self._data += kept

    def kept(self) -> bytes:
        return bytes(self._data)


class _HeadAndTail:
    """The beginning and the end of a stream."""

    def __init__(self, limit: OutputLimit) -> None:
        self._limit = limit
        self._head = bytearray()
        self._tail = bytearray()
        self._received = 0

    def add(self, data: bytes) -> None:
        self._received += len(data)
        taken = min(len(data), self._limit.head - len(self._head))
        self._head += data[:taken]
        self._tail += data[taken:]
        if len(self._tail) > self._limit.tail + SLACK_BYTES:
            self._cut()

    def _cut(self) -> None:
        del self._tail[: max(0, len(self._tail) - self._limit.tail)]

    def kept(self) -> bytes:
        self._cut()
        return bytes(self._head) + bytes(self._tail)

    @property
    def lost_bytes(self) -> int:
        return self._received - len(self._head) - min(len(self._tail), self._limit.tail)
