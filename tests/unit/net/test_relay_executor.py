"""Keys are made ahead up to a limit, and each is used once."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.clock import Clock

from exec_server.net.relay_executor import KEYS_AHEAD, REFILL_SECONDS, EphemeralKeys
from exec_server.relay.noise import Identity


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
    return clock


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Identity]:
    """The keys that were generated, in order."""
    keys: list[Identity] = []
    generate = Identity.generate

    def recorded() -> Identity:
        keys.append(generate())
        return keys[-1]

    monkeypatch.setattr(Identity, "generate", recorded)
    return keys


def test_keys_are_made_ahead_up_to_the_limit(clock: Clock, made: list[Identity]) -> None:
    keys = EphemeralKeys()
    assert made == []
    for number in range(1, 2 * KEYS_AHEAD):
        clock.advance((number + 0.5) * REFILL_SECONDS)
        assert len(made) == min(number, KEYS_AHEAD)
    taken = [keys.take() for _ in range(KEYS_AHEAD + 2)]
    assert len(made) == KEYS_AHEAD + 2  # the last two were made for their handshakes
    assert {id(key) for key in taken} == {id(key) for key in made}
    clock.advance(clock.now + 1.5 * REFILL_SECONDS)
    assert keys.take() is made[-1]
