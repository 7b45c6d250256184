"""Useless messages: how long a flood may last, and what ends it."""

from __future__ import annotations

from exec_server.client.engine.messages import FLOOD_SECONDS, PAUSE_SECONDS, UselessMessages


def flood(messages: UselessMessages, start: float, seconds: float) -> list[float]:
    """The times at which the flood was too long."""
    step = PAUSE_SECONDS / 2
    times = [start + number * step for number in range(int(seconds / step) + 1)]
    return [now for now in times if messages.useless_received(now)]


def test_flood_without_a_pause_is_too_long_at_last() -> None:
    messages = UselessMessages()
    assert flood(messages, 100.0, FLOOD_SECONDS - PAUSE_SECONDS) == []
    assert flood(messages, 100.0 + FLOOD_SECONDS, 0.0) == [100.0 + FLOOD_SECONDS]


def test_useful_message_ends_a_flood() -> None:
    messages = UselessMessages()
    flood(messages, 100.0, FLOOD_SECONDS - PAUSE_SECONDS)
    messages.useful_received()
    assert flood(messages, 100.0 + FLOOD_SECONDS, FLOOD_SECONDS - PAUSE_SECONDS) == []


def test_few_messages_are_no_flood() -> None:
    messages = UselessMessages()
    assert not any(messages.useless_received(100.0 + number) for number in range(10_000))
