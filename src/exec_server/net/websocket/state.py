"""The life of a WebSocket, for both ends: one enum, one table of transitions."""

from __future__ import annotations

import enum


class State(enum.Enum):
    CONNECTING = enum.auto()  # the upgrade is not complete
    OPEN = enum.auto()
    CLOSING = enum.auto()  # our close frame is sent: messages are dropped until the peer's arrives
    DISCARDING = enum.auto()  # received bytes are dropped until the connection is gone
    CLOSED = enum.auto()  # the connection is gone


class Cause(enum.Enum):
    UPGRADED = enum.auto()
    REFUSED = enum.auto()  # the upgrade
    CLOSE_SENT = enum.auto()
    CLOSE_RECEIVED = enum.auto()
    PROTOCOL_ERROR = enum.auto()
    EOF = enum.auto()
    ABORTED = enum.auto()
    LOST = enum.auto()  # the transport is closed


# A missing key changes nothing: the WebSocket is further already.
_TRANSITIONS = {
    (State.CONNECTING, Cause.UPGRADED): State.OPEN,
    (State.CONNECTING, Cause.REFUSED): State.DISCARDING,
    (State.CONNECTING, Cause.CLOSE_SENT): State.DISCARDING,
    (State.CONNECTING, Cause.EOF): State.DISCARDING,
    (State.CONNECTING, Cause.ABORTED): State.DISCARDING,
    (State.CONNECTING, Cause.LOST): State.CLOSED,
    (State.OPEN, Cause.CLOSE_SENT): State.CLOSING,
    (State.OPEN, Cause.CLOSE_RECEIVED): State.DISCARDING,
    (State.OPEN, Cause.PROTOCOL_ERROR): State.DISCARDING,
    (State.OPEN, Cause.EOF): State.DISCARDING,
    (State.OPEN, Cause.ABORTED): State.DISCARDING,
    (State.OPEN, Cause.LOST): State.CLOSED,
    (State.CLOSING, Cause.CLOSE_RECEIVED): State.DISCARDING,
    (State.CLOSING, Cause.PROTOCOL_ERROR): State.DISCARDING,
    (State.CLOSING, Cause.EOF): State.DISCARDING,
    (State.CLOSING, Cause.ABORTED): State.DISCARDING,
    (State.CLOSING, Cause.LOST): State.CLOSED,
    (State.DISCARDING, Cause.LOST): State.CLOSED,
}


def next_state(state: State, cause: Cause) -> State | None:
    """The state that follows, None if the cause changes nothing."""
    return _TRANSITIONS.get((state, cause))
