"""The numbered output of one process: what is retained of it, and what a read returns.

Every event of a process takes the next number, starting at 1: each chunk, the exit, the
close. Only chunks are kept here; the numbers of the other two leave gaps.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque

from exec_server.protocol.process import Chunk, Stream

# The wire promises clients that no chunk is larger.
CHUNK_BYTES = 8192
# What a client can fetch after reconnecting. Beyond it the oldest chunks are dropped.
RETAINED_BYTES = 1_048_576
# A child that prints single bytes would otherwise cost 100 times its output in bookkeeping.
RETAINED_CHUNKS = 50_000
# The sizes of dropped chunks that are remembered, at 2 bytes each: as much again as is kept of the
# output, twice. Half of them is forgotten when there are more, and what was lost since then
# cannot be told any longer. It takes a child that prints single lines as fast as it can several
# seconds to get there, and one that fills its chunks 4 GiB.
DROPPED_SIZES = 1_048_576


class OutputLog:
    """Retained chunks in order of their numbers, and the counter they come from."""

    __slots__ = (
        "_all_bytes",
        "_chunks",
        "_dropped_sizes",
        "_forgotten_sizes",
        "_other_events",
        "next_seq",
        "retained_bytes",
    )

    def __init__(self) -> None:
        self._chunks: deque[Chunk] = deque()
        self.next_seq = 1
        self.retained_bytes = 0
        self._other_events: list[int] = []  # the numbers that are no chunk's: two at the most
        self._all_bytes = 0  # retained or not
        # Of the dropped chunks in order, but for the oldest; then how many those are.
        self._dropped_sizes = array("H")
        self._forgotten_sizes = 0

    def take_number(self) -> int:
        """The number of an event that is not a chunk."""
        seq = self.next_seq
        self.next_seq = seq + 1
        self._other_events.append(seq)
        return seq

    def append(self, stream: Stream, data: bytes) -> int:
        """Number a chunk and keep it, at the cost of the oldest ones; returns its number."""
        seq = self.next_seq
        self.next_seq = seq + 1
        self._chunks.append(Chunk(seq, stream, data))
        size = len(data)
        self._all_bytes += size
        self.retained_bytes += size
        while self.retained_bytes > RETAINED_BYTES or len(self._chunks) > RETAINED_CHUNKS:
            size = len(self._chunks.popleft().chunk)
            self.retained_bytes -= size
            self._dropped_sizes.append(size)
        if len(self._dropped_sizes) > DROPPED_SIZES:
            del self._dropped_sizes[: DROPPED_SIZES // 2]
            self._forgotten_sizes += DROPPED_SIZES // 2
        return seq

    def read(self, after: int, max_bytes: int | None) -> tuple[list[Chunk], int]:
        """Chunks numbered above `after`, and the `nextSeq` that goes with them.

        The first chunk is always taken; a further one only while the total stays within
        `max_bytes`.
        """
        newer = self._newer_than(after)
        if max_bytes is None:
            return newer, self.next_seq
        taken: list[Chunk] = []
        total = 0
        for chunk in newer:
            if taken and total + len(chunk.chunk) > max_bytes:
                break
            taken.append(chunk)
            total += len(chunk.chunk)
            if total >= max_bytes:
                break
        return taken, taken[-1].seq + 1 if taken else self.next_seq

    def loss(self, after: int) -> tuple[int, int | None] | None:
        """What is gone of the chunks numbered above `after`; None if nothing is.

        Otherwise the number of the first chunk that is kept, and how many bytes are gone: exactly,
        or None if that is so long ago that it is not known any more.
        """
        seen = after - bisect_right(self._other_events, after)
        lost = self._forgotten_sizes + len(self._dropped_sizes) - seen
        if lost <= 0:
            return None
        first = self._chunks[0].seq  # what is dropped makes room for another one
        if seen == 0:
            return first, self._all_bytes - self.retained_bytes
        if lost <= len(self._dropped_sizes):
            return first, sum(self._dropped_sizes[-lost:])
        return first, None

    def held_bytes(self) -> int:
        """What the log costs in memory, without the bookkeeping of its chunks."""
        return self.retained_bytes + self._dropped_sizes.itemsize * len(self._dropped_sizes)

    def retained(self) -> list[Chunk]:
        """All chunks that are kept."""
        return list(self._chunks)

    def _newer_than(self, after: int) -> list[Chunk]:
        # From the right: a client that follows the output asks for the last few.
        newer: list[Chunk] = []
        for chunk in reversed(self._chunks):
            if chunk.seq <= after:
                break
            newer.append(chunk)
        newer.reverse()
        return newer
