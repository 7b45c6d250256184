"""Admission: how many connections a listener accepts, and which of them give way.

Unauthenticated connections have bounds of their own. Beyond one, the peer with the most loses its
oldest, so neither idle connections nor a flood from another address keep an honest client out. All
bounds together leave a quarter of the descriptors for starts and files.
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable, Hashable

# Upgraded connections. Beyond it an upgrade request is answered 503.
MAX_CONNECTIONS = 4096
# Connections before the upgrade, with or without TLS.
MAX_PENDING = 512
# TLS handshakes under way; each takes some tens of kilobytes before the peer has proved anything.
MAX_HANDSHAKES = 256


def open_file_limit() -> int:
    """The limit of open descriptors of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def peer_network(host: str) -> str:
    """What all connections of one machine have in common: of IPv6, the first 64 bits."""
    if ":" not in host:
        return host
    return socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:8].hex()


class PendingConnections:
    """A bounded number of connections that have proved nothing yet."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._networks: dict[Hashable, str] = {}
        # By network, the oldest first, with the function that ends the connection.
        self._by_network: dict[str, dict[Hashable, Callable[[], object]]] = {}

    def __len__(self) -> int:
        return len(self._networks)

    def add(self, connection: Hashable, network: str, cut_off: Callable[[], object]) -> None:
        """Add a new one; beyond the bound, the network with the most loses its oldest."""
        self._networks[connection] = network
        self._by_network.setdefault(network, {})[connection] = cut_off
        if len(self._networks) > self._limit:
            oldest, cut_off_oldest = next(iter(max(self._by_network.values(), key=len).items()))
            self.remove(oldest)
            cut_off_oldest()

    def cut_off_all(self) -> None:
        """End all of them."""
        for of_network in list(self._by_network.values()):
            for cut_off in list(of_network.values()):
                cut_off()

    def remove(self, connection: Hashable) -> None:
        """The connection is no longer pending; without effect if it was not."""
        network = self._networks.pop(connection, None)
        if network is not None:
            of_network = self._by_network[network]
            del of_network[connection]
            if not of_network:
                del self._by_network[network]


class Admission:
    """The bounds of a listener, and its connections before and after their upgrade."""

    def __init__(self, descriptors: int | None = None) -> None:
        limit = open_file_limit() if descriptors is None else descriptors
        self.max_connections = min(MAX_CONNECTIONS, limit * 3 // 8)
        self.max_pending = min(MAX_PENDING, limit // 4)
        self.max_handshakes = min(MAX_HANDSHAKES, limit // 8)
        self.pending = PendingConnections(self.max_pending)
        self._upgraded: set[Hashable] = set()

    def upgrade(self, connection: Hashable) -> bool:
        """Count a connection as upgraded; False if there are too many of them."""
        if len(self._upgraded) >= self.max_connections:
            return False
        self.pending.remove(connection)
        self._upgraded.add(connection)
        return True

    def remove(self, connection: Hashable) -> None:
        """The connection is gone."""
        self.pending.remove(connection)
        self._upgraded.discard(connection)
