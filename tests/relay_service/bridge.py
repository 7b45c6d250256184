"""The forms without relay frames: one client socket joined to the executor's, as it comes.

The executor's connection is the client's: when one ends, so does the other, and the executor
dials in again for the next client.
"""

from __future__ import annotations

from picows import WSFrame, WSMsgType, WSTransport

from tests.relay_service.faults import TO_EXECUTOR, TO_HARNESS
from tests.relay_service.journal import Message
from tests.relay_service.sockets import (
    BRIDGE_MESSAGE_BYTES,
    GOING_AWAY,
    MESSAGE_TOO_BIG,
    REPLACED,
    Socket,
)
from tests.relay_service.state import Registration
from tests.relay_service.streams import Exchange, Route


class _Bridged(Socket):
    """One end of a bridge. Fragments pass as they are: the far end may limit their size."""

    largest_message = BRIDGE_MESSAGE_BYTES
    direction = ""

    def __init__(self, exchange: Exchange, route: Route) -> None:
        super().__init__()
        self._exchange = exchange
        self._route = route
        self._size = 0

    def other(self) -> Socket | None:
        """The far end, if it is there."""
        raise NotImplementedError

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        kind = frame.msg_type
        data = kind in (WSMsgType.TEXT, WSMsgType.BINARY, WSMsgType.CONTINUATION)
        if not data or transport.is_close_frame_sent:
            super().on_ws_frame(transport, frame)
            return
        self._size += frame.payload_size
        if self._size > self.largest_message:
            self.close(MESSAGE_TOO_BIG, "message too big")
            return
        if frame.fin:
            self._size = 0
        if self.is_open and (other := self.other()) is not None:
            self._pass_on(other, kind, frame)

    def _pass_on(self, other: Socket, kind: WSMsgType, frame: WSFrame) -> None:
        faults, journal = self._exchange.faults.frames, self._exchange.journal
        if not faults.armed and not journal.is_watched:
            other.send(frame.get_payload_as_memoryview(), kind, final=frame.fin)
            return
        data = frame.get_payload_as_bytes()
        if journal.recording:
            journal.traffic.add(Message(self.direction, self._route.environment_id, data))
        outcome = faults.apply(self.direction, None, data)
        if outcome.seconds:
            other.stall_for(outcome.seconds)
        for one in outcome.frames:
            other.send(one, kind, final=frame.fin)
        journal.changed()

    def sending_slow(self) -> None:
        if (other := self.other()) is not None:
            other.hold_reading("far end slow")

    def sending_ready(self) -> None:
        if (other := self.other()) is not None:
            other.release_reading("far end slow")


class BridgedExecutor(_Bridged):
    """The executor's end."""

    direction = TO_HARNESS

    def __init__(self, exchange: Exchange, route: Route, registration: Registration) -> None:
        super().__init__(exchange, route)
        self._registration = registration

    def other(self) -> Socket | None:
        return next(iter(self._route.harnesses), None)

    def opened(self) -> None:
        old, self._route.executor = self._route.executor, self
        if old is not None:
            old.close(REPLACED, "replaced by a new connection")
        self._registration.online = True
        self._exchange.journal.changed()

    def gone(self) -> None:
        self._registration.online = False
        if self._route.executor is self:
            self._route.executor = None
        if (client := self.other()) is not None:
            client.close(GOING_AWAY, "executor disconnected")
        self._exchange.journal.changed()


class BridgedClient(_Bridged):
    """The client's end."""

    direction = TO_EXECUTOR

    def other(self) -> Socket | None:
        return self._route.executor

    def opened(self) -> None:
        self._route.harnesses.add(self)
        self._exchange.journal.changed()

    def gone(self) -> None:
        self._route.harnesses.discard(self)
        if (executor := self.other()) is not None:
            executor.close(GOING_AWAY, "client disconnected")
        self._exchange.journal.changed()
