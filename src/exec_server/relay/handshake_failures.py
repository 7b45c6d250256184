"""HandshakeFailures: failed handshakes of each source, and whether one has had too many. No clock.

A source is the token whose client sent the handshake, if the registry names it, and otherwise all
clients of a link together. Only failures that cost a private key operation are recorded. They take
from an allowance that grows back, so that no source is ever locked out for long, and none but the
one whose handshakes fail is refused at all.
"""

from __future__ import annotations

from typing import NamedTuple

# Failures of one source at once, and then in each second. A handshake that fails costs about a
# millisecond of processor time, so one source uses a few percent of a processor.
BURST_FAILURES = 64
FAILURES_A_SECOND = 32.0
# Sources whose failures are remembered; the one whose last failure is the oldest is forgotten.
MAX_SOURCES = 1024
# A source is reported at most so often, since a flood uses up its allowance many times a second.
REPORT_SECONDS = 10.0


class _Used(NamedTuple):
    until: float  # the time at which the whole allowance is there again
    reported_at: float


class HandshakeFailures:
    """The failures of all sources; each call is given the time."""

    def __init__(self) -> None:
        # By source, the one with the latest failure at the end.
        self._used: dict[str, _Used] = {}

    def is_exhausted(self, source: str, now: float) -> bool:
        """Whether the next handshake of this source has to be refused."""
        used = self._used.get(source)
        missing = 0.0 if used is None else used.until - now
        return missing * FAILURES_A_SECOND > BURST_FAILURES - 1

    def record(self, source: str, now: float) -> bool:
        """Take one failure from the allowance; True if it is used up and that is to be reported."""
        until, reported_at = self._used.pop(source, _Used(now, now - REPORT_SECONDS))
        until = max(until, now) + 1 / FAILURES_A_SECOND
        self._used[source] = _Used(until, reported_at)
        if len(self._used) > MAX_SOURCES:
            del self._used[next(iter(self._used))]
        if not self.is_exhausted(source, now) or now - reported_at < REPORT_SECONDS:
            return False
        self._used[source] = _Used(until, now)
        return True
