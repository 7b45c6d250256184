"""Frames routed by stream id between one executor socket and its clients.

Bytes are forwarded as they came. A harness socket owns the first stream id it names and no
other, so that nobody can speak into a stranger's stream. Nothing is lost in silence: when a
side goes, the other one gets a reset with a reason.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from picows import WSMsgType

from tests.relay_service import envelope as relay
from tests.relay_service.envelope import Buffer, Envelope, Kind
from tests.relay_service.faults import TO_EXECUTOR, TO_HARNESS, Faults
from tests.relay_service.journal import Journal, Message
from tests.relay_service.sockets import REPLACED, UNSUPPORTED_DATA, Socket
from tests.relay_service.state import Registration

# A client that takes nothing for so long loses its stream: the others wait for it.
STALL_SECONDS = 30.0

EXECUTOR_GONE = "executor_disconnected"
HARNESS_GONE = "harness_disconnected"
HARNESS_STALLED = "harness_stalled"
FOREIGN_STREAM = "stream_id_not_owned"
TAKEN_STREAM = "stream_id_in_use"
UNREADABLE = "unreadable_frame"


@dataclass(eq=False)
class Route:
    """The sockets of one environment."""

    environment_id: str
    executor: Socket | None = None
    harnesses: set[Socket] = field(default_factory=set)
    streams: dict[bytes, HarnessSocket] = field(default_factory=dict)


class Exchange:
    """Shared by the sockets of the rendezvous: recording and faults."""

    def __init__(self, journal: Journal, faults: Faults) -> None:
        self.journal = journal
        self.faults = faults

    def forward(
        self, target: Socket, direction: str, route: Route, envelope: Envelope, frame: Buffer
    ) -> None:
        """Send a frame on; without parsing if neither recording nor a fault needs it."""
        if not self.faults.frames.armed and not self.journal.is_watched:
            target.send(frame)
            return
        data = bytes(frame)
        if self.journal.recording:
            name = envelope.stream_id.decode(errors="replace")
            self.journal.traffic.add(
                Message(direction, route.environment_id, data, name, envelope.kind)
            )
        outcome = self.faults.frames.apply(direction, envelope, data)
        if outcome.seconds:
            target.stall_for(outcome.seconds)
        for one in outcome.frames:
            target.send(one)
        self.journal.changed()


class ExecutorSocket(Socket):
    """The socket that carries all streams of an environment."""

    def __init__(self, exchange: Exchange, route: Route, registration: Registration) -> None:
        super().__init__()
        self._exchange = exchange
        self._route = route
        self._registration = registration

    def opened(self) -> None:
        old, self._route.executor = self._route.executor, self
        if old is not None:
            old.close(REPLACED, "replaced by a new connection")
        self._registration.online = True
        self._exchange.journal.changed()

    def message(self, data: Buffer, kind: WSMsgType) -> None:
        if kind is not WSMsgType.BINARY:
            self.close(UNSUPPORTED_DATA, "binary messages only")
            return
        envelope = relay.read(data)
        # Unreadable frames, and those of a client that has just left, are dropped silently.
        if envelope is None or (harness := self._route.streams.get(envelope.stream_id)) is None:
            return
        if envelope.kind is Kind.RESET:
            harness.is_reset = True
        self._exchange.forward(harness, TO_HARNESS, self._route, envelope, data)

    def sending_slow(self) -> None:
        for harness in self._route.harnesses:
            harness.hold_reading("executor slow")

    def sending_ready(self) -> None:
        for harness in self._route.harnesses:
            harness.release_reading("executor slow")

    def gone(self) -> None:
        self._registration.online = False
        if self._route.executor is self:
            self._route.executor = None
        self.sending_ready()
        streams = dict(self._route.streams)
        self._route.streams.clear()
        for harness in streams.values():
            harness.end_stream(EXECUTOR_GONE)
        self._exchange.journal.changed()


class HarnessSocket(Socket):
    """The socket of one client, with one stream."""

    def __init__(self, exchange: Exchange, route: Route) -> None:
        super().__init__()
        self._exchange = exchange
        self._route = route
        self._stall: asyncio.TimerHandle | None = None
        self.stream_id: bytes | None = None
        # No frame of the stream is forwarded any more; each is answered with this reason.
        self._ended: str | None = None
        self.is_reset = False

    def opened(self) -> None:
        self._route.harnesses.add(self)
        executor = self._route.executor
        if executor is not None and executor.is_slow:
            self.hold_reading("executor slow")
        self._exchange.journal.changed()

    def message(self, data: Buffer, kind: WSMsgType) -> None:
        if kind is not WSMsgType.BINARY:
            self.close(UNSUPPORTED_DATA, "binary messages only")
            return
        envelope = relay.read(data)
        if envelope is None:
            self._reset_both(UNREADABLE)
            return
        if (reason := self._refusal(envelope.stream_id)) is not None:
            self.send(relay.reset(envelope.stream_id, reason))
            return
        executor = self._route.executor
        assert executor is not None
        if envelope.kind is Kind.RESET:
            self.is_reset = True
        self._exchange.forward(executor, TO_EXECUTOR, self._route, envelope, data)

    def _refusal(self, stream_id: bytes) -> str | None:
        """Why a frame of this stream is not for the executor; takes the first id as its own."""
        if self.stream_id is None:
            if stream_id in self._route.streams:
                return TAKEN_STREAM
            self.stream_id = stream_id
            if self._route.executor is None:
                self._ended = EXECUTOR_GONE
            else:
                self._route.streams[stream_id] = self
        elif stream_id != self.stream_id:
            return FOREIGN_STREAM
        return self._ended

    def _reset_both(self, reason: str) -> None:
        executor, stream_id = self._route.executor, self.stream_id
        if stream_id is None or self._ended is not None:
            return
        if executor is not None and not self.is_reset:
            executor.send(relay.reset(stream_id, reason))
        self._route.streams.pop(stream_id, None)
        self.end_stream(reason)

    def end_stream(self, reason: str) -> None:
        """Tell the client that its stream is over; the route has forgotten it already."""
        assert self.stream_id is not None
        self._ended = reason
        self.send(relay.reset(self.stream_id, reason))

    def sending_slow(self) -> None:
        if self._route.executor is not None:
            self._route.executor.hold_reading(f"harness {id(self)}")
        loop = asyncio.get_running_loop()
        self._stall = loop.call_later(STALL_SECONDS, self._give_up)

    def sending_ready(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        if self._route.executor is not None:
            self._route.executor.release_reading(f"harness {id(self)}")

    def _give_up(self) -> None:
        self._reset_both(HARNESS_STALLED)
        self.abort()

    def gone(self) -> None:
        self._route.harnesses.discard(self)
        self.sending_ready()
        if self._ended is None:
            self._reset_both(HARNESS_GONE)
        self._exchange.journal.changed()
