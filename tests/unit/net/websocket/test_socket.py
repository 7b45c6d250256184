"""The life of a WebSocket: every state ends, and no state is entered again."""

from __future__ import annotations

import pytest

from exec_server.net.websocket.socket import Cause, State, next_state

ORDER = list(State)


@pytest.mark.parametrize("state", ORDER[:-1])
def test_every_state_ends_with_the_transport(state: State) -> None:
    assert next_state(state, Cause.LOST) is State.CLOSED


@pytest.mark.parametrize("cause", Cause)
def test_states_are_only_ever_left_forwards(cause: Cause) -> None:
    for state in State:
        following = next_state(state, cause)
        assert following is None or ORDER.index(following) > ORDER.index(state)


@pytest.mark.parametrize("cause", Cause)
def test_nothing_changes_after_the_end(cause: Cause) -> None:
    assert next_state(State.CLOSED, cause) is None


def test_close_handshake_of_either_side() -> None:
    assert next_state(State.OPEN, Cause.CLOSE_SENT) is State.CLOSING
    assert next_state(State.CLOSING, Cause.CLOSE_RECEIVED) is State.DISCARDING
    assert next_state(State.OPEN, Cause.CLOSE_RECEIVED) is State.DISCARDING


def test_only_an_upgrade_opens() -> None:
    opening = [
        (state, cause)
        for state in State
        for cause in Cause
        if next_state(state, cause) is State.OPEN
    ]
    assert opening == [(State.CONNECTING, Cause.UPGRADED)]
