"""Admission: how many connections a listener accepts, and which of them give way.

Whoever reaches the address can open connections. Those that have not authenticated have a bound of
their own, beyond which the oldest is cut off: an honest client needs a few round trips for its
upgrade request, so idle connections cannot keep it out. All bounds together leave a quarter of the
descriptors for starts and files.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Hashable

# Connections, upgraded or not. Beyond it a new one is answered 503.
MAX_CONNECTIONS = 4096
# Connections before the upgrade, with or without TLS.
MAX_PENDING = 512
# TLS handshakes under way; each takes some tens of kilobytes before the peer has proved anything.
MAX_HANDSHAKES = 256


def open_file_limit() -> int:
    """The limit of open descriptors of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


class Admission:
    """The bounds of a listener, and its connections that are not upgraded yet, the oldest first."""

    def __init__(self, descriptors: int | None = None) -> None:
        """`descriptors` is the limit of this process, unless a test has another one."""
        limit = open_file_limit() if descriptors is None else descriptors
        self.max_connections = min(MAX_CONNECTIONS, limit * 3 // 8)
        self.max_pending = min(MAX_PENDING, limit // 4)
        self.max_handshakes = min(MAX_HANDSHAKES, limit // 8)
        self._pending: dict[Hashable, Callable[[], None]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, connection: Hashable, cut_off: Callable[[], None]) -> None:
        """Count a new connection as pending; beyond the bound the oldest one is cut off."""
        self._pending[connection] = cut_off
        if len(self._pending) > self.max_pending:
            oldest = next(iter(self._pending))
            self._pending.pop(oldest)()

    def remove(self, connection: Hashable) -> None:
        """The connection is upgraded, or gone; without effect for one that is not pending."""
        self._pending.pop(connection, None)
