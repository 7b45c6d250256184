"""The numbered output of one process: what is retained of it, and what a read returns.

Every event of a process takes the next number, starting at 1: each chunk, the exit, the
close. Only chunks are kept here; the numbers of the other two leave gaps.
"""

from __future__ import annotations

from collections import deque

from exec_server.protocol.process import Chunk, Stream

# The wire promises clients that no chunk is larger.
CHUNK_BYTES = 8192
# What a client can fetch after reconnecting. Beyond it the oldest chunks are dropped.
RETAINED_BYTES = 1_048_576
# A child that prints single bytes would otherwise cost 100 times its output in bookkeeping.
RETAINED_CHUNKS = 50_000


class OutputLog:
    """Retained chunks in order of their numbers, and the counter they come from."""

    __slots__ = ("_chunks", "next_seq", "retained_bytes")

    def __init__(self) -> None:
        self._chunks: deque[Chunk] = deque()
        self.next_seq = 1
        self.retained_bytes = 0

    def take_number(self) -> int:
        """The number of an event that is not a chunk."""
        seq = self.next_seq
        self.next_seq = seq + 1
        return seq

    def append(self, stream: Stream, data: bytes) -> int:
        """Number a chunk and keep it, at the cost of the oldest ones; returns its number."""
        seq = self.next_seq
        self.next_seq = seq + 1
        self._chunks.append(Chunk(seq, stream, data))
        self.retained_bytes += len(data)
        while self.retained_bytes > RETAINED_BYTES or len(self._chunks) > RETAINED_CHUNKS:
            self.retained_bytes -= len(self._chunks.popleft().chunk)
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
