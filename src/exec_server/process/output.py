"""The numbered output of one process, its retention, and the chunks that a read returns.

Every event of a process gets the next number, starting at 1: each chunk, the exit, the close.
Only chunks are kept here; the numbers of exit and close leave gaps.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from itertools import islice

from exec_server.protocol.process import Chunk, Stream

# The wire promises clients that no chunk is larger.
CHUNK_BYTES = 8192
# Output that a client can fetch after reconnecting. Above this the oldest chunks are dropped.
RETAINED_BYTES = 1_048_576
# A child that prints single bytes would otherwise cost 100 times its output in bookkeeping.
RETAINED_CHUNKS = 50_000
# Sizes of dropped chunks, 2 bytes each, that `loss` needs: at most twice the memory of the
# retained output. Above this the older half is forgotten, and losses that reach back to it are
# reported without a byte count. A child that prints single lines as fast as possible gets there
# after several seconds, one that fills its chunks after 4 GiB.
DROPPED_SIZES = 1_048_576


class OutputLog:
    """Retained chunks in order of their numbers, and the counter of those numbers."""

    __slots__ = (
        "_chunks",
        "_dropped_sizes",
        "_forgotten_sizes",
        "_non_chunk_seqs",
        "_total_bytes",
        "next_seq",
        "retained_bytes",
    )

    def __init__(self) -> None:
        self._chunks: deque[Chunk] = deque()
        self.next_seq = 1
        self.retained_bytes = 0
        self._non_chunk_seqs: list[int] = []  # exit and close: two at most
        self._total_bytes = 0  # retained or not
        # Sizes of dropped chunks in order, without the oldest ones, which are only counted.
        self._dropped_sizes = array("H")
        self._forgotten_sizes = 0

    def number_event(self) -> int:
        """Allocate the number of an event that is not a chunk."""
        seq = self.next_seq
        self.next_seq = seq + 1
        self._non_chunk_seqs.append(seq)
        return seq

    def append(self, stream: Stream, data: bytes) -> int:
        """Number and retain a chunk, dropping the oldest ones if need be; returns its number."""
        seq = self.next_seq
        self.next_seq = seq + 1
        self._chunks.append(Chunk(seq, stream, data))
        size = len(data)
        self._total_bytes += size
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
        """Chunks numbered above `after`, and the `nextSeq` that belongs to them.

        The first chunk is always included; a further one only while the total stays within
        `max_bytes`.
        """
        newer = self._newer_than(after)
        if max_bytes is None:
            return newer, self.next_seq
        included: list[Chunk] = []
        total = 0
        for chunk in newer:
            if included and total + len(chunk.chunk) > max_bytes:
                break
            included.append(chunk)
            total += len(chunk.chunk)
            if total >= max_bytes:
                break
        return included, included[-1].seq + 1 if included else self.next_seq

    def next_chunks(self, after: int, count: int) -> list[Chunk]:
        """The first `count` chunks numbered above `after`; the cost does not depend on the rest."""
        seen = after - bisect_right(self._non_chunk_seqs, after)
        start = max(0, seen - self._forgotten_sizes - len(self._dropped_sizes))
        return list(islice(self._chunks, start, start + count))

    def loss(self, after: int) -> tuple[int, int | None] | None:
        """The first retained number and the bytes dropped after `after`; None if none were.

        The byte count is exact, or None if the sizes are forgotten: see DROPPED_SIZES.
        """
        seen = after - bisect_right(self._non_chunk_seqs, after)
        lost = self._forgotten_sizes + len(self._dropped_sizes) - seen
        if lost <= 0:
            return None
        first = self._chunks[0].seq  # a chunk is dropped only for a newer one
        if seen == 0:
            return first, self._total_bytes - self.retained_bytes
        if lost <= len(self._dropped_sizes):
            return first, sum(self._dropped_sizes[-lost:])
        return first, None

    def memory_bytes(self) -> int:
        """The memory of the log, without the overhead of its chunk objects."""
        return self.retained_bytes + self._dropped_sizes.itemsize * len(self._dropped_sizes)

    def retained(self) -> list[Chunk]:
        """All retained chunks."""
        return list(self._chunks)

    def _newer_than(self, after: int) -> list[Chunk]:
        # From the right: a client that follows the output reads the last few chunks.
        newer: list[Chunk] = []
        for chunk in reversed(self._chunks):
            if chunk.seq <= after:
                break
            newer.append(chunk)
        newer.reverse()
        return newer
