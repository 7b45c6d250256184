"""EventSequence: the events of one process, each once and in order. Pure.

Theory of operation: every event of a process has a number, from 1 and without gaps: each chunk of
output, the exit, the end. `receive` returns the events that are next, keeps early ones and drops
repeated ones. Notifications that were missed while there was no connection are not sent again. So
the client calls `process/read` for the events after `begin_read()`, and `apply_read` derives the
missed events from the answer, until an answer has no chunks.

An answer names chunks only. An answer with chunks covers the numbers up to its last chunk: a number
missing between chunks is the exit; numbers missing before them are chunks that the server has
discarded (a `Gap`), or a single number that is the exit. An answer without chunks covers all
numbers: the last one is the end, if the process has ended, and a missing one is the exit.

The events of a detached process are sent in order, but the server leaves out those that it has
discarded because this client was slow. So an early event means that a read is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from exec_server.protocol.process import (
    ClosedParams,
    ExitedParams,
    OutputParams,
    ProcessId,
    ReadResult,
)

# Early events that are kept, as many as the reference keeps. Only a server that sends out of order
# reaches this; events beyond it are dropped and read again.
EARLY_EVENTS: Final = 256
EARLY_BYTES: Final = 1_048_576
# The same while a read is in progress. Everything sent before its answer is early then, so this is
# more than sockets and servers buffer. Events beyond it are dropped and read again, too.
EARLY_EVENTS_DURING_READ: Final = 65_536
EARLY_BYTES_DURING_READ: Final = 16 * 1_048_576

Event = OutputParams | ExitedParams | ClosedParams


class Gap(NamedTuple):
    """Lost output: its size in bytes, or a lower bound if the server does not tell."""

    size: int


class EventSequence:
    """Puts the events of one process into order; no I/O."""

    __slots__ = (
        "_delivered_bytes",
        "_dropped",
        "_early",
        "_early_bytes",
        "_has_exited",
        "_id",
        "_is_detached",
        "_is_reading",
        "last",
    )

    def __init__(self, process_id: ProcessId, *, is_detached: bool = False, last: int = 0) -> None:
        """`last` is the number after which the events of a detached process are wanted."""
        self._id = process_id
        self._is_detached = is_detached
        self.last = last  # the number of the last event that was delivered
        self._early: dict[int, Event] = {}
        self._early_bytes = 0
        self._dropped = 0  # the highest number among dropped events
        self._has_exited = False
        self._is_reading = False
        self._delivered_bytes = 0  # since the read began

    @property
    def needs_read(self) -> bool:
        """Whether an event is missing that no notification will bring."""
        return self._dropped > self.last or (self._is_detached and bool(self._early))

    def receive(self, event: Event) -> Sequence[Event]:
        """Take an event; returns the events that are next."""
        if event.seq == self.last + 1:
            if self._lacks_exit(event):
                return ()
            delivered = (event,) if self._deliver(event) else ()
            return (*delivered, *self._ready()) if self._early else delivered
        if event.seq > self.last and event.seq not in self._early:
            self._keep_early(event)
        return ()

    def begin_read(self) -> int:
        """The number after which to read; the answer goes to `apply_read`."""
        self._is_reading = True
        self._delivered_bytes = 0
        return self.last

    def apply_read(self, answer: ReadResult) -> list[Event | Gap]:
        """Take the answer to a read; returns the events that are next."""
        self._is_reading = False
        end = answer.chunks[-1].seq if answer.chunks else answer.next_seq - 1
        known = self._known(answer, end)
        holes = self._holes(known, end)
        exit_seq = self._exit_seq(answer, known, holes)
        if exit_seq is not None:
            known[exit_seq] = self._exit(answer, exit_seq)
            holes = self._holes(known, end)
        gaps = self._gaps(holes, known, answer)
        events: list[Event | Gap] = []
        for seq in sorted(known.keys() | gaps.keys()):
            if seq > end:
                break
            self._drop_early(seq)
            if seq in gaps:
                events.append(gaps[seq])
            else:
                event = known[seq]
                if isinstance(event, ClosedParams) and not self._has_exited:
                    # The exit is among the discarded events: deliver it late, but before the end.
                    events.append(self._exit(answer, seq))
                    self._has_exited = True
                if self._deliver(event):
                    events.append(event)
        self.last = max(self.last, end)
        if not answer.chunks and answer.exit_code is not None and not self._has_exited:
            events.append(self._exit(answer, end))
            self._has_exited = True
        events += self._ready()
        return events

    # ---- bookkeeping ------------------------------------------------------------------

    def _deliver(self, event: Event) -> bool:
        """Count an event as delivered; False for an exit that was delivered before.

        False also for empty output: it would take memory in queues that are limited in bytes.
        """
        self.last = event.seq
        if isinstance(event, OutputParams):
            self._delivered_bytes += len(event.chunk)
            return bool(event.chunk)
        if isinstance(event, ExitedParams):
            if self._has_exited:
                return False
            self._has_exited = True
        return True

    def _ready(self) -> list[Event]:
        """The early events that are next now."""
        ready = []
        while (event := self._early.get(self.last + 1)) is not None:
            if self._lacks_exit(event):
                break
            self._drop_early(event.seq)
            if self._deliver(event):
                ready.append(event)
        return ready

    def _lacks_exit(self, event: Event) -> bool:
        """Whether this is an end whose exit was lost, so that a read is needed."""
        if not isinstance(event, ClosedParams) or self._has_exited:
            return False
        self._dropped = event.seq
        return True

    def _keep_early(self, event: Event) -> None:
        max_events, max_bytes = EARLY_EVENTS, EARLY_BYTES
        if self._is_reading:
            max_events, max_bytes = EARLY_EVENTS_DURING_READ, EARLY_BYTES_DURING_READ
        size = _size(event)
        if len(self._early) >= max_events or self._early_bytes + size > max_bytes:
            self._dropped = max(self._dropped, event.seq)
            return
        self._early[event.seq] = event
        self._early_bytes += size

    def _drop_early(self, seq: int) -> None:
        event = self._early.pop(seq, None)
        if event is not None:
            self._early_bytes -= _size(event)

    # ---- the answer to a read ---------------------------------------------------------

    def _known(self, answer: ReadResult, end: int) -> dict[int, Event]:
        """All events that are known, by number."""
        known = dict(self._early)
        for chunk in answer.chunks:
            if chunk.seq > self.last:
                known[chunk.seq] = OutputParams(self._id, chunk.seq, chunk.stream, chunk.chunk)
        if answer.closed and not answer.chunks and end > self.last:
            known[end] = ClosedParams(self._id, end)
        return known

    def _holes(self, known: dict[int, Event], end: int) -> list[tuple[int, int]]:
        """The unknown numbers up to `end`, as ranges."""
        holes = []
        reached = self.last
        for seq in sorted(known):
            if seq > end:
                break
            if seq > reached + 1:
                holes.append((reached + 1, seq - 1))
            reached = seq
        if reached < end:
            holes.append((reached + 1, end))
        return holes

    def _exit_seq(
        self, answer: ReadResult, known: dict[int, Event], holes: list[tuple[int, int]]
    ) -> int | None:
        """The number of the exit, if the answer determines it."""
        if answer.exit_code is None or self._knows_exit(known):
            return None
        if not answer.chunks:
            return holes[-1][1] if holes else None
        first = answer.chunks[0].seq
        for start, stop in holes:
            if start > first or (start == stop and answer.first_seq is None):
                return stop
        return None

    def _exit(self, answer: ReadResult, seq: int) -> ExitedParams:
        code = 0 if answer.exit_code is None else answer.exit_code
        return ExitedParams(self._id, seq, code, answer.sandbox_denied, answer.sandbox_denial)

    def _knows_exit(self, known: dict[int, Event]) -> bool:
        return self._has_exited or any(isinstance(event, ExitedParams) for event in known.values())

    def _gaps(
        self, holes: list[tuple[int, int]], known: dict[int, Event], answer: ReadResult
    ) -> dict[int, Gap]:
        """The lost output, by its first number; a chunk has at least one byte."""
        # One of the numbers may be the exit's.
        spared = answer.exit_code is not None and not self._knows_exit(known)
        gaps = {start: Gap(max(1, stop - start + 1 - spared)) for start, stop in holes}
        if holes and answer.first_seq is not None and answer.lost_bytes is not None:
            # The server counts from the number of the request. Notifications may have brought
            # some of these bytes meanwhile.
            received = sum(_size(event) for seq, event in known.items() if seq < answer.first_seq)
            exact = answer.lost_bytes - self._delivered_bytes - received
            others = sum(gaps[start].size for start, _ in holes[1:])
            gaps[holes[0][0]] = Gap(exact - others)
            if exact <= others:  # the missing number is the exit, not a chunk
                del gaps[holes[0][0]]
        return gaps


def _size(event: Event) -> int:
    return len(event.chunk) if isinstance(event, OutputParams) else 0
