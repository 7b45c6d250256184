"""How many sockets a node may have. No I/O."""

from __future__ import annotations

from typing import Final

# Open sockets of a node, upgraded or not. Beyond it a new one is answered 503.
SOCKETS: Final = 8192
# Descriptors for everything else: the database, listeners, TLS handshakes (256), closing links, and
# connections that are being refused. Without a free descriptor the event loop closes connections
# without an answer, for which a client gives its session up; so 503 has to come before that.
RESERVED_DESCRIPTORS: Final = 1280
# Where descriptors are few, this part of them is reserved instead.
_RESERVED_PART: Final = 4
WANTED_DESCRIPTORS: Final = SOCKETS + RESERVED_DESCRIPTORS


def socket_limit(descriptors: int) -> int:
    """The limit of sockets of a node that may have so many open descriptors."""
    reserved = min(RESERVED_DESCRIPTORS, descriptors // _RESERVED_PART)
    return min(SOCKETS, descriptors - reserved)
