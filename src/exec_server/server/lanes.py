"""Lanes: the order in which the requests of one connection run, and how many may be pending.

By the reference's rule the main lane has one slot. Control requests have a lane of their own,
because a process must be stoppable while a file copy runs; one for an unfinished start stays behind
it, except a terminate that can cancel it. A method that yields its slot is parked while it waits.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from exec_server.protocol import jsonrpc
from exec_server.server.methods import DecodedParams, Method

# Queued requests; as many as the reference queues. At the limit reading pauses.
QUEUED_REQUESTS = 128
# Parked requests (long polls, writes to a full stdin), at 4 KB each: far more than a client that
# does not wait for responses will have pending. Further ones keep their slot in the lane.
PARKED_REQUESTS = 8192
# Bytes of queued and running requests: one message of the largest size. At the limit reading
# pauses.
PENDING_BYTES = 64 * 1_048_576


class PendingRequest(msgspec.Struct, frozen=True, gc=False):
    """A request that is queued or runs."""

    id: jsonrpc.RequestId
    method: Method
    params: object
    size: int
    decoded: DecodedParams | None = None  # of a large message, whose params are decoded in a thread


class Lane:
    """Requests in their order of arrival; at most `slots` of them run at a time."""

    __slots__ = ("queue", "running", "slots")

    def __init__(self, slots: int) -> None:
        self.slots = slots
        # Not a deque: an empty one takes 760 bytes, and moving some hundred entries is as quick.
        self.queue: list[PendingRequest] = []
        self.running = 0


class Lanes:
    """The lanes of one connection and the accounting of its pending requests."""

    def __init__(self, slots: int) -> None:
        self.main = Lane(slots)
        self.control = Lane(slots)
        self._parked = Lane(PARKED_REQUESTS)  # its queue stays empty
        self._is_concurrent = slots > 1
        self._unfinished_starts: Counter[str | None] = Counter()  # by process id
        self._pending_bytes = 0

    def lane_for(self, request: PendingRequest, *, can_cancel: bool = False) -> Lane:
        """The lane of a new request: the control lane if it may overtake earlier requests.

        `can_cancel` is whether it cancels an unfinished start of its process at once.
        """
        method = request.method
        if not method.control:
            return self.main
        if self._is_concurrent:
            return self.control
        if method.family == "filesystem":
            return self.main  # closing a handle must not overtake reads from it
        if not self._unfinished_starts:
            return self.control
        starts = self._unfinished_starts.get(named_process(request), 0)
        return self.control if starts == 0 or (starts == 1 and can_cancel) else self.main

    def enqueue(self, lane: Lane, request: PendingRequest) -> None:
        lane.queue.append(request)
        self._add(request)

    def dequeue(self, lane: Lane) -> PendingRequest:
        """The next request of a lane whose queue is not empty."""
        request = lane.queue.pop(0)
        self._subtract(request)
        return request

    def occupy(self, lane: Lane, request: PendingRequest) -> Lane:
        """Count a request that has to wait as running; returns the lane whose slot it holds."""
        self._add(request)
        if request.method.yields_slot and self._parked.running < self._parked.slots:
            lane = self._parked
        lane.running += 1
        return lane

    def release(self, occupied: Lane, request: PendingRequest) -> None:
        """Give back the slot that `occupy` returned."""
        occupied.running -= 1
        self._subtract(request)

    @property
    def has_queued(self) -> bool:
        return bool(self.main.queue or self.control.queue)

    @property
    def is_idle(self) -> bool:
        """Whether no request is queued or running."""
        return not self._pending_bytes

    @property
    def has_only_parked(self) -> bool:
        """Whether every pending request has yielded its slot."""
        return not (self.has_queued or self.main.running or self.control.running)

    @property
    def is_full(self) -> bool:
        """Whether no further request should be read."""
        return (
            len(self.main.queue) + len(self.control.queue) >= QUEUED_REQUESTS
            or self._pending_bytes >= PENDING_BYTES
        )

    def clear(self) -> None:
        """Drop the queued requests."""
        for lane in (self.main, self.control):
            while lane.queue:
                self.dequeue(lane)

    def _add(self, request: PendingRequest) -> None:
        self._pending_bytes += request.size
        if request.method.starts_process:
            self._unfinished_starts[named_process(request)] += 1

    def _subtract(self, request: PendingRequest) -> None:
        self._pending_bytes -= request.size
        if request.method.starts_process:
            name = named_process(request)
            self._unfinished_starts[name] -= 1
            if not self._unfinished_starts[name]:
                del self._unfinished_starts[name]


def named_process(request: PendingRequest) -> str | None:
    """The process id in the params of a request, which are not decoded yet."""
    if isinstance(request.params, dict):
        name = request.params.get("processId")
    elif isinstance(request.params, list) and request.params:
        name = request.params[0]
    else:
        return None
    return name if isinstance(name, str) else None
