"""The order of one process's events, and how a gap in it is filled; no I/O.

Theory of operation. Every event of a process has a number, from 1 and without gaps: each chunk of
output, the exit, the end. `take` gives back what is next in line, keeps what came too early and
drops what came twice. After a lost connection some notifications are missing for good; then the
server is asked for what follows `ask()`, and `fill` works out from its answer what happened, again
and again until an answer has no chunks.

An answer names chunks only. One that has some speaks of the numbers up to its last chunk: what is
missing between them is the exit, what is missing before them are chunks that the server has
forgotten, the `Gap`, or a single number that is the exit. One that has none speaks of all numbers
there are: the last is the end if there was one, and what is left is the exit.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Final

from exec_server.protocol.process import (
    ClosedParams,
    ExitedParams,
    OutputParams,
    ProcessId,
    ReadResult,
)

# What is kept of what came too early, as the reference. Only servers that send out of order get
# there; whatever is beyond is asked for again.
EARLY_EVENTS: Final = 256
EARLY_BYTES: Final = 1_048_576
# The same while an answer is awaited. Everything that is on its way before it comes, so this is
# more than what sockets and servers hold. What is beyond is asked for again, too.
AWAITED_EVENTS: Final = 65_536
AWAITED_BYTES: Final = 16 * 1_048_576

Event = OutputParams | ExitedParams | ClosedParams


@dataclass(frozen=True, slots=True)
class Gap:
    """Output that nobody has any more: so many bytes, or at least as many if nobody can tell."""

    size: int


class EventSequence:
    """Where in its numbers a process is."""

    __slots__ = (
        "_dropped",
        "_early",
        "_early_bytes",
        "_has_exited",
        "_id",
        "_is_asking",
        "_taken",
        "last",
    )

    def __init__(self, process_id: ProcessId) -> None:
        self._id = process_id
        self.last = 0  # everything up to here was given out
        self._early: dict[int, Event] = {}
        self._early_bytes = 0
        self._dropped = 0  # the highest number that there was no room for
        self._has_exited = False
        self._is_asking = False
        self._taken = 0  # bytes given out since the server was asked

    @property
    def is_torn(self) -> bool:
        """Whether something has to be asked for that no notification will bring."""
        return self._dropped > self.last

    def take(self, event: Event) -> Ordered[Event]:
        """What is next in line now that this event has come."""
        if event.seq == self.last + 1:
            if self._lacks_exit(event):
                return ()
            given = (event,) if self._give(event) else ()
            return (*given, *self._ready()) if self._early else given
        if event.seq > self.last and event.seq not in self._early:
            self._keep(event)
        return ()

    def ask(self) -> int:
        """The number after which the server is asked now; its answer goes to `fill`."""
        self._is_asking = True
        self._taken = 0
        return self.last

    def fill(self, answer: ReadResult) -> list[Event | Gap]:
        """What is next in line, now that the server has said this."""
        self._is_asking = False
        end = answer.chunks[-1].seq if answer.chunks else answer.next_seq - 1
        known = self._known(answer, end)
        holes = self._holes(known, end)
        exit_seq = self._exit_seq(answer, known, holes)
        if exit_seq is not None:
            known[exit_seq] = self._exit(answer, exit_seq)
            holes = self._holes(known, end)
        gaps = self._gaps(holes, known, answer)
        filled: list[Event | Gap] = []
        for seq in sorted(known.keys() | gaps.keys()):
            if seq > end:
                break
            self._drop_early(seq)
            if seq in gaps:
                filled.append(gaps[seq])
            else:
                event = known[seq]
                if isinstance(event, ClosedParams) and not self._has_exited:
                    # It was among what is forgotten: it comes late, but before the end.
                    filled.append(self._exit(answer, seq))
                    self._has_exited = True
                if self._give(event):
                    filled.append(event)
        self.last = max(self.last, end)
        if not answer.chunks and answer.exit_code is not None and not self._has_exited:
            filled.append(self._exit(answer, end))
            self._has_exited = True
        filled += self._ready()
        return filled

    # ---- bookkeeping ------------------------------------------------------------------

    def _give(self, event: Event) -> bool:
        """It is this event's turn; False if it was told before, as a guess that was too early."""
        self.last = event.seq
        if isinstance(event, OutputParams):
            self._taken += len(event.chunk)
        elif isinstance(event, ExitedParams):
            if self._has_exited:
                return False
            self._has_exited = True
        return True

    def _ready(self) -> list[Event]:
        """The early ones whose turn it is."""
        ready = []
        while (event := self._early.get(self.last + 1)) is not None:
            if self._lacks_exit(event):
                break
            self._drop_early(event.seq)
            if self._give(event):
                ready.append(event)
        return ready

    def _lacks_exit(self, event: Event) -> bool:
        """Whether it is an end whose exit was lost: then the server has to be asked for it."""
        if not isinstance(event, ClosedParams) or self._has_exited:
            return False
        self._dropped = event.seq
        return True

    def _keep(self, event: Event) -> None:
        limits = (EARLY_EVENTS, EARLY_BYTES)
        if self._is_asking:
            limits = (AWAITED_EVENTS, AWAITED_BYTES)
        size = _size(event)
        if len(self._early) >= limits[0] or self._early_bytes + size > limits[1]:
            self._dropped = max(self._dropped, event.seq)
            return
        self._early[event.seq] = event
        self._early_bytes += size

    def _drop_early(self, seq: int) -> Event | None:
        event = self._early.pop(seq, None)
        if event is not None:
            self._early_bytes -= _size(event)
        return event

    # ---- what an answer says ----------------------------------------------------------

    def _known(self, answer: ReadResult, end: int) -> dict[int, Event]:
        """All events that are there, by their numbers."""
        known = dict(self._early)
        for chunk in answer.chunks:
            if chunk.seq > self.last:
                known[chunk.seq] = OutputParams(self._id, chunk.seq, chunk.stream, chunk.chunk)
        if answer.closed and not answer.chunks and end > self.last:
            known[end] = ClosedParams(self._id, end)
        return known

    def _holes(self, known: dict[int, Event], end: int) -> list[tuple[int, int]]:
        """The numbers up to `end` that are not there, as ranges."""
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
        """The number of the exit, if it can only be that."""
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
        return self._has_exited or any(isinstance(each, ExitedParams) for each in known.values())

    def _gaps(
        self, holes: list[tuple[int, int]], known: dict[int, Event], answer: ReadResult
    ) -> dict[int, Gap]:
        """What is lost for good, by its first number; a chunk has at least one byte."""
        # One of the numbers may be the exit's.
        spared = answer.exit_code is not None and not self._knows_exit(known)
        gaps = {start: Gap(max(1, stop - start + 1 - spared)) for start, stop in holes}
        if holes and answer.first_seq is not None and answer.lost_bytes is not None:
            # The server counts from the number it was asked for, and we may have got some of
            # that on our own meanwhile.
            here = sum(_size(each) for seq, each in known.items() if seq < answer.first_seq)
            exact = answer.lost_bytes - self._taken - here
            others = sum(gaps[start].size for start, _ in holes[1:])
            gaps[holes[0][0]] = Gap(exact - others)
            if exact <= others:  # it was no chunk that is missing there, but the exit
                del gaps[holes[0][0]]
        return gaps


def _size(event: Event) -> int:
    return len(event.chunk) if isinstance(event, OutputParams) else 0
