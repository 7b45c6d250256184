"""FlowControl: when a sender is paused because its output is not taken, and which tasks wait.

Theory of operation. One connection carries all answers and the output of all processes:

    server                         client
    process 1 --output--+                            +--> queue 1 --> reader 1, a task
    process 2 --output--+==> the connection ==> [V] ==+--> queue 2 --> reader 2, a task
    answers   ----------+                            +--> the tasks that wait for them

A queue that its reader empties slowly is full, and its valve V is closed. With
`processFlowControl` that is the process (`output_queue`); other servers keep about 1 MiB of output
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
from collections import Counter
from contextvars import ContextVar
from typing import Final, Protocol

# How long a full queue may stay untouched while a task waits for an answer. A consumer that is
# only slow reads more often.
STALL_SECONDS: Final = 1.0
# Length of a chain of nested consumers. A consumer beyond it is detected by its stalled queue.
MAX_DEPTH: Final = 16


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
        """Note that the running task waits for the server, or for the sender of a queue.

        The result goes to `end_wait`, with the same queue.
        """
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
