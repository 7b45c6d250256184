"""How many sockets a node may have. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

# Open sockets of a node, upgraded or not. Beyond it the request of a new one is refused.
SOCKETS: Final = 8192
# Sockets beyond it whose request is read, so that each kind of peer gets the refusal after which it
# comes back. Beyond the sum a new one is answered 503 at once, and closed.
REFUSED_SOCKETS: Final = 640
# Descriptors for everything else: the database, listeners, TLS handshakes (256), closing links.
# Without a free descriptor the event loop closes connections without an answer, for which a client
# gives its session up; so the refusal has to come before that.
OTHER_DESCRIPTORS: Final = 640
WANTED_DESCRIPTORS: Final = SOCKETS + REFUSED_SOCKETS + OTHER_DESCRIPTORS
# Where descriptors are few, this part of them is for refused sockets, and as many for the rest, but
# not fewer than the event loop accepts at once (its backlog of 100) beside those that are open.
_PART: Final = 8
LEAST_OTHER_DESCRIPTORS: Final = 160


class SocketAdmission(Enum):
    """How to treat a new connection."""

    ACCEPT = auto()
    REJECT = auto()  # once its path is known
    REJECT_AT_ONCE = auto()  # before its request is read


@dataclass(frozen=True, slots=True)
class Capacity:
    """The limits of a node."""

    sockets: int = SOCKETS
    refused: int = REFUSED_SOCKETS

    def admission(self, used: int) -> SocketAdmission:
        """How to treat one more connection."""
        if used < self.sockets:
            return SocketAdmission.ACCEPT
        if used < self.sockets + self.refused:
            return SocketAdmission.REJECT
        return SocketAdmission.REJECT_AT_ONCE


def capacity_of(descriptors: int) -> Capacity:
    """The limits of a node that may have so many open descriptors."""
    refused = min(REFUSED_SOCKETS, descriptors // _PART)
    others = min(OTHER_DESCRIPTORS, max(LEAST_OTHER_DESCRIPTORS, descriptors // _PART))
    return Capacity(max(1, min(SOCKETS, descriptors - refused - others)), refused)
