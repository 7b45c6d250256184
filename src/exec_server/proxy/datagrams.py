"""Datagrams of SOCKS5 (RFC 1928, section 7), and the destinations of one association. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final, NamedTuple

from exec_server.proxy import hosts

# Destinations of one association that are remembered, with their decisions: programs have a few.
# The oldest is forgotten, so its next datagram is decided about again.
MAX_DESTINATIONS: Final = 64
# Datagrams of one association that wait for decisions; further ones are dropped, as networks do.
MAX_WAITING: Final = 32

_IPV4, _NAME, _IPV6 = 1, 3, 4
_HEADER_BYTES: Final = 4


class Place(NamedTuple):
    """Where a datagram goes, as the process has named it."""

    host: str  # in its normal form
    port: int


class Datagram(NamedTuple):
    place: Place
    payload: bytes


def decode(data: bytes) -> Datagram | None:
    """A datagram of the process; None for a fragment, and for one without a valid place."""
    if len(data) < _HEADER_BYTES or data[2] != 0:
        return None
    kind, rest = data[3], data[_HEADER_BYTES:]
    if kind == _NAME and rest:
        size = 1 + rest[0]
        name = rest[1:size].decode("ascii", "backslashreplace")
        host = name if name.count(":") == 1 else hosts.normalize(name)
    elif kind == _IPV4 and len(rest) >= 4:
        size = 4
        host = str(IPv4Address(rest[:size]))
    elif kind == _IPV6 and len(rest) >= 16:
        size = 16
        host = str(IPv6Address(rest[:size]))
    else:
        return None
    if len(rest) < size + 2:
        return None
    port = int.from_bytes(rest[size : size + 2])
    return Datagram(Place(host, port), rest[size + 2 :]) if port else None


def encode(address: str, port: int, payload: bytes) -> bytes:
    """A datagram for the process, from this address."""
    return b"\0\0\0" + encode_address(address, port) + payload


def encode_address(address: str, port: int) -> bytes:
    """An address and a port as messages of SOCKS5 have them."""
    packed = _packed(address)
    return bytes([_IPV4 if len(packed) == 4 else _IPV6]) + packed + port.to_bytes(2)


def _packed(address: str) -> bytes:
    return ip_address(address.partition("%")[0]).packed


@dataclass
class _Destination:
    """What is known about a place: nothing yet, a refusal, or an address."""

    is_decided: bool = False
    address: str | None = None
    waiting: list[bytes] = field(default_factory=list)


class DatagramDestinations:
    """The places to which one association has sent."""

    def __init__(self) -> None:
        self._known: dict[Place, _Destination] = {}
        self._waiting = 0

    def add(self, datagram: Datagram) -> bool:
        """Whether the place is new and needs a decision; the datagram then waits for it."""
        destination = self._known.get(datagram.place)
        is_new = destination is None
        if destination is not None and destination.is_decided:
            return False
        if self._waiting >= MAX_WAITING:
            return False
        if destination is None:
            self._forget_oldest()
            destination = self._known[datagram.place] = _Destination()
        destination.waiting.append(datagram.payload)
        self._waiting += 1
        return is_new

    def _forget_oldest(self) -> None:
        if len(self._known) >= MAX_DESTINATIONS:
            # Fewer wait than are remembered, so one of them is decided.
            del self._known[next(place for place, each in self._known.items() if each.is_decided)]

    def decide(self, place: Place, address: str | None) -> list[bytes]:
        """Note the address of a place, None for a refusal; returns the datagrams to send there."""
        destination = self._known[place]
        waiting, destination.waiting = destination.waiting, []
        self._waiting -= len(waiting)
        destination.is_decided = True
        destination.address = address
        return waiting if address is not None else []

    def address(self, place: Place) -> str | None:
        """The address of a place that is allowed."""
        destination = self._known.get(place)
        return None if destination is None else destination.address

    def is_peer(self, address: str, port: int) -> bool:
        """Whether datagrams from this address may be passed to the process."""
        packed = _packed(address)
        return any(
            place.port == port and each.address is not None and _packed(each.address) == packed
            for place, each in self._known.items()
        )
