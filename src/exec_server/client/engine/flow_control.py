"""FlowControl: when a sender is paused because its output is not taken, and which tasks wait.

OutputQueue has the unread output of one process.

Theory of operation. One connection carries all answers and the output of all processes:

    server                         client
    process 1 --output--+                            +--> queue 1 --> reader 1, a task
    process 2 --output--+==> the connection ==> [V] ==+--> queue 2 --> reader 2, a task
    answers   ----------+                            +--> the tasks that wait for them

A queue that its reader empties slowly is full, and its valve V is closed. With
`processFlowControl` that is the process (OutputQueue); other servers keep about 1 MiB of output
and drop the rest, so nothing is read from the connection until their buffers stop the process. Then
answers stop as well:

    reader 1 takes nothing from queue 1  <--  it waits for an answer, or for a task that does
       |                                          ^
       v                                          |
    queue 1 is full --> V is closed --> no answer is received: a deadlock

So a full queue is exempt, and its valve stays open,

- while its reader, which is called its consumer here, waits for an answer;
- while any task waits for an answer, if the queue has no consumer yet;
- if nothing was taken from a full queue for STALL_SECONDS while a task waited for an answer. A wait
  for the exit of the same process does not count: it ends after the output was taken.

The owner of a queue bounds the data that arrives while the queue is exempt.

"It waits, or a task that it waits for" is known by descent: a consumer is a task that reads output,
together with all tasks started by that task from then on. New tasks inherit context variables, so
every context holds the chain of consumers that it descends from.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Protocol, TypeVar

from exec_server.client.engine.server_features import ServerFeatures
from exec_server.client.results import Chunk
from exec_server.errors import ExecServerError
from exec_server.protocol.decoding import Call
from exec_server.protocol.process import CHUNK_BYTES, SET_FLOW, Flow, ProcessId, SetFlowParams

# How long a full queue may stay untouched while a task waits for an answer. A consumer that is
# only slow reads more often.
STALL_SECONDS: Final = 1.0
# Length of a chain of nested consumers. A consumer beyond it is detected by its stalled queue.
MAX_DEPTH: Final = 16

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


class Consumer:
    """A task that reads output, or a thread that reads through tasks of another thread."""

    __slots__ = ("__weakref__", "_task")

    def __init__(self, task: asyncio.Task[object] | None) -> None:
        """`task` is None for a thread."""
        self._task = None if task is None else weakref.ref(task)

    def is_current(self) -> bool:
        """Whether the running task is the consumer's own."""
        return self._task is None or self._task() is asyncio.current_task()


_chain: ContextVar[tuple[Consumer, ...]] = ContextVar("exec_server_consumers", default=())


def current_consumer() -> Consumer:
    """The running task as a consumer."""
    chain = _chain.get()
    if not chain or not chain[-1].is_current():
        chain = (*chain[1 - MAX_DEPTH :], Consumer(asyncio.current_task()))
        _chain.set(chain)
    return chain[-1]


def waiting_consumers() -> tuple[Consumer, ...]:
    """Every consumer that may be blocked while the running task waits."""
    return _chain.get()


def share_consumer() -> None:
    """Make this thread one consumer, together with all tasks that are started from it."""
    if not _chain.get():
        _chain.set((Consumer(None),))


def separate_consumer() -> None:
    """Make the running task a consumer of its own, even in a thread that is one consumer.

    For a task of the client that no task of the user waits for, so that it cannot be blocked.
    """
    _chain.set((*_chain.get()[1 - MAX_DEPTH :], Consumer(asyncio.current_task())))


def is_consumer(consumer: Consumer | None) -> bool:
    """Whether the running task itself is this consumer, not one that it has started."""
    chain = _chain.get()
    return bool(chain) and chain[-1] is consumer and chain[-1].is_current()


class Valve(Protocol):
    """Stops and continues the sender of one or more queues."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class FlowControl:
    """The full queues and the waiting tasks of one session."""

    def __init__(self, connection: Valve) -> None:
        """`connection` is the valve of all queues without one of their own."""
        self.queued_bytes = 0  # in the queues of all processes, which keep count
        self._connection = connection
        self._full: dict[object, tuple[Consumer | None, Valve]] = {}
        self._stalled: set[object] = set()
        self._waits = 0
        self._own_waits: Counter[object] = Counter()  # for the sender of a queue itself
        self._waiting: Counter[Consumer] = Counter()
        self._paused: set[Valve] = set()
        self._has_progress = False
        self._stall_timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Stop the timer."""
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def queue_full(
        self, queue: object, consumer: Consumer | None, valve: Valve | None = None
    ) -> None:
        """Note that a queue is above its limit; `consumer` was the last to take from it."""
        if queue not in self._full or self._full[queue][0] is not consumer:
            self._full[queue] = consumer, valve or self._connection
            self._update()

    def queue_read(self, queue: object, consumer: Consumer) -> None:
        """Note that data was taken from a queue, full or not."""
        if queue in self._full:
            self._full[queue] = consumer, self._full[queue][1]
            self._stalled.discard(queue)
            self._has_progress = True
            self._update()

    def queue_drained(self, queue: object) -> None:
        """Note that a queue takes data again, or is not needed any more."""
        if queue in self._full:
            del self._full[queue]
            self._stalled.discard(queue)
            self._update()

    def begin_wait(self, queue: object | None = None) -> tuple[Consumer, ...]:
        """Note that the running task waits for the server or a sender, until `end_wait`."""
        consumers = waiting_consumers()
        self._waits += 1
        if queue is not None:
            self._own_waits[queue] += 1
        self._waiting.update(consumers)
        self._update()
        return consumers

    def end_wait(self, consumers: tuple[Consumer, ...], queue: object | None = None) -> None:
        self._waits -= 1
        if queue is not None:
            self._own_waits[queue] -= 1
            if not self._own_waits[queue]:
                del self._own_waits[queue]
        self._waiting.subtract(consumers)
        for consumer in consumers:
            if not self._waiting[consumer]:
                del self._waiting[consumer]
        self._update()

    def is_exempt(self, queue: object) -> bool:
        """Whether a full queue does not close its valve."""
        consumer, _ = self._full[queue]
        if consumer is None:
            return self._waits > 0
        return consumer in self._waiting or queue in self._stalled

    def _update(self) -> None:
        """Close and open valves, as the queues and waits demand now."""
        if not self._full and not self._paused:
            return
        paused = {valve for queue, (_, valve) in self._full.items() if not self.is_exempt(queue)}
        before, self._paused = self._paused, paused
        for valve in paused - before:
            valve.pause_reading()
        for valve in before - paused:
            valve.resume_reading()
        if paused and self._waits and self._stall_timer is None:
            self._has_progress = False
            loop = asyncio.get_running_loop()
            self._stall_timer = loop.call_later(STALL_SECONDS, self._check_stall)

    def _check_stall(self) -> None:
        """Exempt all full queues if nothing was taken from them since the timer was set."""
        self._stall_timer = None
        if self._paused and not self._has_progress:
            self._stalled.update(each for each in self._full if self._waits > self._own_waits[each])
        self._update()


# Theory of operation. The output of a process is wanted while it has a reader: an iteration that
# is not finished, or any other read in the past. OutputQueue alone decides what happens to a
# queue that is not emptied:
#
# | output is  | server               | from FULL_BYTES on     | from OVERFLOW_BYTES on            |
# |------------|----------------------|------------------------|-----------------------------------|
# | not wanted | any                  | queued                 | left to the server, which may     |
# |            |                      |                        | discard it; read again later      |
# | wanted     | `processFlowControl` | the process is paused, | the process is paused, exempt or  |
# |            |                      | unless exempt          | not: nothing is lost              |
# | wanted     | any other            | the connection is      | left to the server; only an       |
# |            |                      | paused, unless exempt  | exempt queue grows so far         |
#
# FlowControl tells which queues are exempt: those whose reader waits for an answer. A reader
# that waits for the exit of the process itself does not want its output meanwhile, because a
# paused process would never exit. Output that is left to the server is requested with
# `process/read` when the queue has space again, while the process is paused if the server can do
# that; the loss is counted.
class QueuedProcess(Protocol):
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

    def __init__(self, session: FlowSession, process_id: ProcessId) -> None:
        self._session = session
        self._id = process_id
        self.is_supported = session.features.capabilities.process_flow_control
        self._wanted: Flow = "send"
        self._current: Flow = "send"  # the last one that the server has acknowledged
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


def _cut(run: Chunk) -> Iterator[Chunk]:
    for start in range(0, len(run.data), CHUNK_BYTES):
        lost = 0 if start else run.lost_before
        yield Chunk(run.stream, run.data[start : start + CHUNK_BYTES], lost)


class OutputQueue:
    """The unread output of one process; a Valve of its session's flow control."""

    def __init__(
        self, flow_control: FlowControl, source: QueuedProcess, requests: FlowRequests
    ) -> None:
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
        """Take the first chunk, CHUNK_BYTES at most; `begin_read` precedes.

        A run is cut once, not at each call: what is put back after a line must not be long.
        """
        first = self._chunks[0]
        if len(first.data) > CHUNK_BYTES:
            del self._chunks[0]
            pieces = list(_cut(first))
            self._chunks.extendleft(reversed(pieces))
            self._weigh((len(pieces) - 1) * CHUNK_COST)
        return self.pop_whole()

    def pop_whole(self) -> Chunk:
        """Take the first chunk as it was received; `begin_read` precedes."""
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
