"""The numbered output of one process, its retention, and the chunks that a read returns.

Chunks, exit and close are numbered from 1; only chunks are kept. Recent output is kept beyond
RETAINED_BYTES for clients before 0.143, which ask for it with process/read.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from itertools import islice

from exec_server.process.retention import LargestFirst, RetentionAccount
from exec_server.protocol.process import CHUNK_BYTES, OutputChunk, Stream

# Output that a client can fetch after reconnecting. Above this the oldest chunks are dropped.
RETAINED_BYTES = 1_048_576
# Recent output: at least the output of the last RECENT_SECONDS, and at most twice as old, up to
# RECENT_BYTES of a process. A burst is read whole by a client that comes a little late. In all, the
# processes of a session keep SESSION_RECENT_BYTES above their RETAINED_BYTES, all processes of a
# server SERVER_RECENT_BYTES; beyond a limit the oldest chunks are dropped.
RECENT_SECONDS = 5.0
# A session that reads none of its output for this long takes it from the notifications. Its recent
# output would be memory that is used once, which slows a stream down.
UNREAD_SECONDS = 1.0
RECENT_BYTES = 16 * 1_048_576
SESSION_RECENT_BYTES = 64 * 1_048_576
SERVER_RECENT_BYTES = 256 * 1_048_576
# Space for recent output is reserved in these steps, so that a chunk costs no bookkeeping.
RECENT_STEP = 1_048_576
# A child that prints single bytes would otherwise cost 100 times its output in bookkeeping.
RETAINED_CHUNKS = 50_000
# Upper bound for the memory of one chunk in bytes, without its output.
CHUNK_COST = 160
# An empty deque takes the memory of about this many references. A log of fewer chunks keeps them in
# a list once it is complete.
COMPACTED_CHUNKS = 64
# Sizes of dropped chunks, 2 bytes each, that `loss` needs: at most twice the memory of the
# retained output. Above this the older half is forgotten, and losses that reach back to it are
# reported without a byte count. A child that prints single lines as fast as possible gets there
# after several seconds, one that fills its chunks after 4 GiB.
DROPPED_SIZES = 1_048_576
# While the client of a running process is away, its output is counted in these steps, and dropped
# in them if the budget of the server is used up. The newest output, FREE_BYTES with its
# bookkeeping, is not counted and never dropped for that: a running process itself takes more. There
# is room for the last chunk, and as much for sizes of dropped ones, so that a chunk is always left.
CHARGE_STEP = 65_536
FREE_BYTES = 4 * CHUNK_BYTES


class RecentOutputBudget:
    """The space for recent output of all processes of a session, as a part of the server's.

    `is_read` is whether the client has ever asked for output: None until that is known. Space of
    output that the client has got already is taken back when it is needed. No space is reserved
    while `is_open` is false: the client is away.
    """

    __slots__ = ("_parent", "_read_logs", "free", "is_open", "is_read")

    def __init__(self, size: int, parent: RecentOutputBudget | None = None) -> None:
        self.free = size
        self.is_open = True
        self.is_read: bool | None = None
        self._parent = parent
        self._read_logs: dict[OutputLog, None] = {}  # in the order of reading

    def reserve(self, size: int) -> bool:
        """Take space; False if there is not enough."""
        while self.free < size or not (self._parent is None or self._parent.reserve(size)):
            if not self._read_logs:
                return False
            next(iter(self._read_logs)).drop_read()
        self.free -= size
        return True

    def release(self, size: int) -> None:
        """Give back reserved space."""
        self.free += size
        if self._parent is not None:
            self._parent.release(size)

    def add_read_log(self, log: OutputLog) -> None:
        """Note that recent output of this log has been read."""
        self._read_logs.pop(log, None)
        self._read_logs[log] = None

    def remove_read_log(self, log: OutputLog) -> None:
        self._read_logs.pop(log, None)


class Charges:
    """What logs of one session take from its account while the client is away."""

    __slots__ = ("_logs", "account")

    def __init__(self, account: RetentionAccount) -> None:
        self.account = account
        self._logs: LargestFirst[OutputLog] | None = None  # most clients are never away

    def grew(self, log: OutputLog, size: int) -> None:
        """Count more memory of a log."""
        if self._logs is None:
            self._logs = LargestFirst(_charged_bytes)
        self._logs.grew(log)
        self.account.add(size)

    def end(self, log: OutputLog) -> None:
        """Count nothing of a log."""
        if self._logs is not None:
            self._logs.discard(log)
        self.account.remove(log.charged_bytes)

    def give_back(self) -> None:
        """Drop some output of the log that is charged most; there must be one."""
        assert self._logs is not None
        self._logs.largest().give_back()


class OutputLog:
    """Retained chunks in order of their numbers, and the counter of those numbers.

    With a budget recent output is kept. While `reserved_bytes` is not 0 its owner must call `age`
    after every `recent_seconds`, and `release_recent` when the log is not used any more.
    """

    __slots__ = (
        *("_budget", "_charges", "_chunks", "_dropped_sizes", "_forgotten_sizes", "_max_bytes"),
        *("_non_chunk_seqs", "_old_seq", "_read_seq", "_total_bytes", "charged_bytes"),
        *("next_seq", "reserved_bytes", "retained_bytes"),
    )

    def __init__(self, budget: RecentOutputBudget | None = None) -> None:
        self._budget = budget
        self.reserved_bytes = 0  # of the budget
        self._charges: Charges | None = None
        self.charged_bytes = 0
        self._max_bytes = RETAINED_BYTES  # with which `append` need not look further
        self._old_seq = 0  # the last number before the latest call of `age`
        self._read_seq = 0  # the last number that a read has returned
        self._chunks: deque[OutputChunk] | list[OutputChunk] = deque()
        self.next_seq = 1
        self.retained_bytes = 0
        self._non_chunk_seqs: list[int] = []  # exit and close: two at most
        self._total_bytes = 0  # retained or not
        # Sizes of dropped chunks in order, without the oldest ones, which are only counted.
        self._dropped_sizes = array("H")
        self._forgotten_sizes = 0

    def compact(self) -> None:
        """Release spare memory: no chunk follows."""
        if len(self._chunks) < COMPACTED_CHUNKS:
            self._chunks = list(self._chunks)

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
        self._chunks.append(OutputChunk(seq, stream, data))
        size = len(data)
        self._total_bytes += size
        self.retained_bytes += size
        if self.retained_bytes > self._max_bytes or len(self._chunks) > RETAINED_CHUNKS:
            self._make_space()
        return seq

    def _make_space(self) -> None:
        while len(self._chunks) > RETAINED_CHUNKS or (
            self.retained_bytes > RETAINED_BYTES + self.reserved_bytes and not self._reserve()
        ):
            self._drop_oldest()
        if self._charges is not None:
            self._charge_growth()

    def charge(self, charges: Charges) -> None:
        """Count the memory until `discharge`: the client is away."""
        self._charges = charges
        self._set_max_bytes()
        self._charge_growth()

    def discharge(self) -> None:
        """Count no memory."""
        if self._charges is not None:
            self._charges.end(self)
            self.charged_bytes = 0
            self._charges = None
            self._set_max_bytes()

    def _charge_growth(self) -> None:
        assert self._charges is not None
        surplus = self.memory_bytes() - FREE_BYTES - self.charged_bytes
        if surplus > 0:
            growth = -(-surplus // CHARGE_STEP) * CHARGE_STEP
            self.charged_bytes += growth
            self._charges.grew(self, growth)  # which may call `give_back`

    def give_back(self) -> None:
        """Drop the oldest output of one CHARGE_STEP, or sizes of what was dropped before."""
        assert self._charges is not None
        self.charged_bytes -= CHARGE_STEP
        while self.memory_bytes() - FREE_BYTES > self.charged_bytes:
            if self._dropped_sizes.itemsize * len(self._dropped_sizes) > self.retained_bytes:
                self._forget_sizes()
            else:
                self._drop_oldest()
        self._charges.account.remove(CHARGE_STEP)

    def _set_max_bytes(self) -> None:
        if self._charges is None:
            self._max_bytes = RETAINED_BYTES + self.reserved_bytes
        else:
            self._max_bytes = -1  # each chunk is looked at

    def _drop_oldest(self) -> None:
        size = len(self._chunks[0].chunk)
        del self._chunks[0]
        self.retained_bytes -= size
        self._dropped_sizes.append(size)
        if len(self._dropped_sizes) > DROPPED_SIZES:
            self._forget_sizes()

    def _forget_sizes(self) -> None:
        """Forget the older half of the sizes of dropped chunks."""
        count = len(self._dropped_sizes) // 2
        del self._dropped_sizes[:count]
        self._forgotten_sizes += count

    def _reserve(self) -> bool:
        budget = self._budget
        if budget is None or budget.is_read is False or not budget.is_open:
            return False
        if self.reserved_bytes + RETAINED_BYTES >= RECENT_BYTES or not budget.reserve(RECENT_STEP):
            return False
        self.reserved_bytes += RECENT_STEP
        self._set_max_bytes()
        return True

    def recent_seconds(self) -> float:
        """The time after which `age` is to be called."""
        assert self._budget is not None
        return UNREAD_SECONDS if self._budget.is_read is None else RECENT_SECONDS

    def age(self) -> None:
        """Drop what was old at the last call; all recent output if the client reads none."""
        assert self._budget is not None
        if self._budget.is_read is None:
            self._budget.is_read = False
        self._drop_recent(self._old_seq if self._budget.is_read else self.next_seq)
        self._old_seq = self.next_seq - 1

    def drop_read(self) -> None:
        """Drop the recent output that the client has got already."""
        assert self._budget is not None
        self._budget.remove_read_log(self)
        self._drop_recent(self._read_seq)

    def release_recent(self) -> None:
        """Drop all recent output."""
        self._drop_recent(self.next_seq)

    def _drop_recent(self, last: int) -> None:
        """Drop chunks up to the number `last` that exceed RETAINED_BYTES, and free their space."""
        if self._budget is None or not self.reserved_bytes:
            return
        while self.retained_bytes > RETAINED_BYTES and self._chunks[0].seq <= last:
            self._drop_oldest()
        surplus = max(0, self.retained_bytes - RETAINED_BYTES)
        kept = -(-surplus // RECENT_STEP) * RECENT_STEP
        self._budget.release(self.reserved_bytes - kept)
        self.reserved_bytes = kept
        self._set_max_bytes()
        if not kept:
            self._budget.remove_read_log(self)

    def read(self, after: int, max_bytes: int | None) -> tuple[list[OutputChunk], int]:
        """Chunks numbered above `after`, up to `max_bytes` but one at least; their `nextSeq`."""
        if max_bytes is None:
            chunks, next_seq = self._newer_than(after), self.next_seq
        else:
            chunks = self._first_newer(after, max_bytes)
            next_seq = chunks[-1].seq + 1 if chunks else self.next_seq
        if self._budget is not None:
            self._budget.is_read = True
            if self.reserved_bytes:
                self._read_seq = next_seq - 1
                self._budget.add_read_log(self)
        return chunks, next_seq

    def _first_newer(self, after: int, max_bytes: int) -> list[OutputChunk]:
        included: list[OutputChunk] = []
        total = 0
        for chunk in self._newer(after):
            if included and total + len(chunk.chunk) > max_bytes:
                break
            included.append(chunk)
            total += len(chunk.chunk)
            if total >= max_bytes:
                break
        return included

    def next_chunks(self, after: int, count: int) -> list[OutputChunk]:
        """The first `count` chunks numbered above `after`; the cost does not depend on the rest."""
        start = self._index_after(after)
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
        """The memory of the log, without that of its budget."""
        sizes = self._dropped_sizes.itemsize * len(self._dropped_sizes)
        objects = CHUNK_COST * len(self._chunks)
        return min(self.retained_bytes, RETAINED_BYTES) + sizes + objects

    def newest(self) -> list[OutputChunk]:
        """The newest chunks, RETAINED_BYTES of them at most."""
        size, chosen = 0, []
        for chunk in reversed(self._chunks):
            size += len(chunk.chunk)
            if size > RETAINED_BYTES:
                break
            chosen.append(chunk)
        chosen.reverse()
        return chosen

    def _index_after(self, after: int) -> int:
        seen = after - bisect_right(self._non_chunk_seqs, after)
        index = seen - self._forgotten_sizes - len(self._dropped_sizes)
        return min(max(0, index), len(self._chunks))

    def _newer(self, after: int) -> Iterable[OutputChunk]:
        """Chunks numbered above `after`, found from the nearer end; not all may be wanted."""
        start = self._index_after(after)
        if start < len(self._chunks) // 2:
            return islice(self._chunks, start, None)
        return self._newer_than(after)

    def _newer_than(self, after: int) -> list[OutputChunk]:
        # From the right: a client that follows the output reads the last few chunks.
        newer: list[OutputChunk] = []
        for chunk in reversed(self._chunks):
            if chunk.seq <= after:
                break
            newer.append(chunk)
        newer.reverse()
        return newer


def _charged_bytes(log: OutputLog) -> int:
    return log.charged_bytes
