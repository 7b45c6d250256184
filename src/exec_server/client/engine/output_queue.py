"""OutputQueue: the unread output of one process, and what becomes of the output beyond its limits.

Theory of operation. The output of a process is wanted while it has a reader: an iteration that is
not finished, or any other read in the past. This module alone decides what happens to a queue that
is not emptied:

| output is  | server               | from FULL_BYTES on     | from OVERFLOW_BYTES on            |
|------------|----------------------|------------------------|-----------------------------------|
| not wanted | any                  | queued                 | left to the server, which may     |
|            |                      |                        | discard it; read again later      |
| wanted     | `processFlowControl` | the process is paused, | the process is paused, exempt or  |
|            |                      | unless exempt          | not: nothing is lost              |
| wanted     | any other            | the connection is      | left to the server; only an       |
|            |                      | paused, unless exempt  | exempt queue grows so far         |

`flow_control` tells which queues are exempt: those whose reader waits for an answer. A reader that
waits for the exit of the process itself does not want its output meanwhile, because a paused
process would never exit. Output that is left to the server is requested with `process/read` when
the queue has space again, while the process is paused if the server can do that; the loss is
counted.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol, TypeVar

from exec_server.client.engine.flow_control import (
    Consumer,
    FlowControl,
    current_consumer,
    is_consumer,
)
from exec_server.client.engine.server_features import ServerFeatures
from exec_server.client.results import Chunk
from exec_server.errors import ExecServerError
from exec_server.protocol.method import Call
from exec_server.protocol.process import SET_FLOW, Flow, ProcessId, SetFlowParams

P = TypeVar("P")
R = TypeVar("R")

# Weights of the queue: its bytes, and for each chunk the memory that it takes beside them. The
# queue is full at the first, until it is below the second.
FULL_BYTES: Final = 1_048_576
DRAINED_BYTES: Final = 262_144
OVERFLOW_BYTES: Final = 16 * 1_048_576
CHUNK_COST: Final = 256
# Beyond this the output of a paused process is not kept either. What a server and the sockets have
# buffered before the pause is far less, so only a server that ignores the pause reaches it.
PAUSED_BYTES: Final = 64 * 1_048_576
# Unread output of all processes of a session. Beyond it the limit of each queue whose output is not
# wanted is FULL_BYTES, so that a thousand forgotten processes do not take gigabytes.
SESSION_BYTES: Final = 64 * 1_048_576


class Source(Protocol):
    """The process whose output is queued."""

    # Notifications are ignored until `recover`.
    is_skipping: bool

    @property
    def is_ending(self) -> bool:
        """Whether all of its output exists, and is being requested or was received."""
        ...

    def recover(self) -> asyncio.Future[None]:
        """Read the output that was ignored."""
        ...


class FlowSession(Protocol):
    """The part of a session that flow requests need; `session.ClientSession` implements it."""

    features: ServerFeatures

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Future[None]: ...

    async def call_in_background(
        self, call: Call[P, R], params: P, *, is_urgent: bool = False
    ) -> R: ...


class FlowRequests:
    """Tells the server the flow of one process, if the server can control it."""

    def __init__(
        self, session: FlowSession, process_id: ProcessId, *, is_paused: bool = False
    ) -> None:
        """`is_paused` tells the flow that an earlier connection has set."""
        self._session = session
        self._id = process_id
        self.is_supported = session.features.capabilities.process_flow_control
        self._wanted: Flow = "send"
        self._current: Flow = (
            "pause" if is_paused else "send"
        )  # the last one that the server has acknowledged
        self._is_sending = False
        self._settled: list[Callable[[], None]] = []

    def request(self, flow: Flow) -> None:
        """Set the flow; while a request is in progress, only the last wish counts."""
        self._wanted = flow
        if self.is_supported and not self._is_sending and flow != self._current:
            self._is_sending = True
            self._session.spawn(self._send())

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call back when the server has acknowledged the last request: now, if it has."""
        if self._is_sending:
            self._settled.append(callback)
        else:
            callback()

    async def _send(self) -> None:
        while self._wanted != self._current or self._settled:
            if self._wanted == self._current:
                self._settled.pop()()
                continue
            flow = self._wanted
            try:
                params = SetFlowParams(self._id, flow)
                await self._session.call_in_background(SET_FLOW, params, is_urgent=True)
            except ExecServerError:
                flow = self._wanted  # the process is forgotten or the session has ended
            self._current = flow
        self._is_sending = False


class Reader:
    """Marks output as wanted as long as this object is referenced, as by an `async for`."""

    __slots__ = ("__weakref__", "is_known")

    def __init__(self) -> None:
        self.is_known = False  # to the queue


class OutputQueue:
    """The unread output of one process; a Valve of its session's flow control."""

    def __init__(self, flow_control: FlowControl, source: Source, requests: FlowRequests) -> None:
        self._flow_control = flow_control
        self._source = source
        self._requests = requests
        self._loop = asyncio.get_running_loop()
        self._chunks: deque[Chunk] = deque()
        self.weight = 0
        self._readers: set[weakref.ref[Reader]] = set()
        self._was_read = False  # by a call that is no iteration
        self._consumer: Consumer | None = None
        self._exit_waits = 0  # of the reader itself
        self._is_paused = False  # by the flow control
        self._is_recovering = False
        self._is_ended = False
        self._is_discarded = False

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def is_wanted(self) -> bool:
        """Whether a reader is present and there may be more output."""
        has_reader = bool(self._was_read or self._readers)
        return has_reader and not self._exit_waits and not self._is_ended

    # ---- the process ------------------------------------------------------------------

    def append(self, chunk: Chunk) -> None:
        """Queue a chunk that was received."""
        if self._is_discarded:
            return
        self._chunks.append(chunk)
        self._weigh(len(chunk.data) + CHUNK_COST)
        if self.weight >= FULL_BYTES:
            if self.weight >= self._limit() and not self._source.is_ending:
                self._source.is_skipping = True
            self._update()

    def resume(self) -> None:
        """Let the server send, whatever an earlier connection has wanted."""
        self._update()

    def end(self) -> None:
        """Pause nothing any more for the sake of this queue: no output follows."""
        self._is_ended = True
        self._flow_control.queue_drained(self)

    def discard(self) -> None:
        """Discard queued and future output."""
        self._is_discarded = True
        self._chunks.clear()
        self._weigh(-self.weight)
        self._make_space()

    # ---- the reader -------------------------------------------------------------------

    def begin_read(self, reader: Reader | None) -> None:
        """Note that the running task reads, as part of an iteration or not."""
        self._consumer = current_consumer()
        if reader is None:
            self._was_read = True
        elif not reader.is_known:
            reader.is_known = True
            self._readers.add(weakref.ref(reader, self._reader_ended))
        if self.weight >= FULL_BYTES:
            self._update()

    def pop(self) -> Chunk:
        """Take the first chunk; `begin_read` precedes."""
        assert self._consumer is not None
        chunk = self._chunks.popleft()
        before = self.weight
        self._weigh(-len(chunk.data) - CHUNK_COST)
        if self.weight < DRAINED_BYTES <= before:
            self._make_space()
        else:
            self._flow_control.queue_read(self, self._consumer)
        return chunk

    def put_back(self, chunks: Sequence[Chunk]) -> None:
        """Make chunks that were taken the next ones again."""
        if not self._is_discarded:
            self._chunks.extendleft(reversed(chunks))
            self._weigh(sum(len(chunk.data) + CHUNK_COST for chunk in chunks))
            self._update()

    def recover_skipped(self) -> None:
        """Request the output that was left to the server: the queue has space."""
        if self._source.is_skipping and not self._is_recovering:
            self._is_recovering = True
            self._requests.request(self._flow())
            # Not before: chunks that are retained during the last read would be missing.
            self._requests.when_settled(self._recover)

    def _recover(self) -> None:
        self._source.recover().add_done_callback(self._recovered)

    def _recovered(self, _: asyncio.Future[None]) -> None:
        self._is_recovering = False
        self._update()

    @contextmanager
    def waiting_for_exit(self) -> Iterator[None]:
        """The running task waits for the exit of the process, so it cannot read."""
        if not is_consumer(self._consumer):
            yield
            return
        self._exit_waits += 1
        self._update()
        try:
            yield
        finally:
            self._exit_waits -= 1
            self._update()

    def _reader_ended(self, reader: weakref.ref[Reader]) -> None:
        """Called by the interpreter, in any thread, perhaps after the end of the loop."""
        try:
            self._loop.call_soon_threadsafe(self._reader_left, reader)
        except RuntimeError:
            pass  # the loop is closed

    def _reader_left(self, reader: weakref.ref[Reader]) -> None:
        self._readers.discard(reader)
        self._update()

    # ---- limits -----------------------------------------------------------------------

    def _weigh(self, change: int) -> None:
        self.weight += change
        self._flow_control.queued_bytes += change

    def _limit(self) -> int:
        """The weight beyond which output is left to the server."""
        if self.is_wanted:
            return PAUSED_BYTES if self._requests.is_supported else OVERFLOW_BYTES
        return OVERFLOW_BYTES if self._flow_control.queued_bytes < SESSION_BYTES else FULL_BYTES

    def _make_space(self) -> None:
        self._flow_control.queue_drained(self)
        self.recover_skipped()
        self._update()

    def _update(self) -> None:
        """Tell the flow control and the server what the state of the queue demands."""
        if self.is_wanted and self.weight >= FULL_BYTES:
            valve = self if self._requests.is_supported else None
            self._flow_control.queue_full(self, self._consumer, valve)
        elif not self.is_wanted:
            self._flow_control.queue_drained(self)
        self._requests.request(self._flow())

    def _flow(self) -> Flow:
        if self._is_discarded:
            return "send"
        if not (self.is_wanted or self._is_recovering):
            return "retain" if self._source.is_skipping else "send"
        is_too_long = self._source.is_skipping or self.weight >= OVERFLOW_BYTES
        return "pause" if self._is_paused or self._is_recovering or is_too_long else "send"

    def pause_reading(self) -> None:
        """The flow control pauses this process."""
        self._is_paused = True
        self._requests.request(self._flow())

    def resume_reading(self) -> None:
        """The flow control continues this process."""
        self._is_paused = False
        self._requests.request(self._flow())
