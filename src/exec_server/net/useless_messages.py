"""UselessMessages: whether a server keeps its client busy with useless messages. No clock.

Useless are answers to requests that were not made, unknown notifications, those about processes and
streams that the client does not know, requests that are refused, events that are empty or were
received before, control frames, empty fragments, and relay frames without content. A few are
normal: servers may be newer, and events may cross a request that ends their subject. Without pause
and with nothing else in between they are a flood, which no time-out of a call would end.
"""

from __future__ import annotations

# How long a flood may last: a person would not wait longer for a command that does nothing.
FLOOD_SECONDS = 30.0
# A pause of this length ends a flood: a client with fewer messages is not busy.
PAUSE_SECONDS = 0.25


def flood_text() -> str:
    """The reason for which the connection to such a server ends."""
    return f"the server has sent nothing but useless messages for {FLOOD_SECONDS:g} s"


class UselessMessages:
    """The useless messages of one connection since the last useful one."""

    __slots__ = ("_last", "_since")

    def __init__(self) -> None:
        self._since = self._last = float("-inf")

    def useful_received(self) -> None:
        self._last = float("-inf")

    def useless_received(self, now: float) -> bool:
        """Count a useless message; returns whether the flood has lasted too long."""
        if now - self._last > PAUSE_SECONDS:
            self._since = now
        self._last = now
        return now - self._since >= FLOOD_SECONDS
