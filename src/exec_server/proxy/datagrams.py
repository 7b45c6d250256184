"""Datagrams of SOCKS5 (RFC 1928, section 7), and the destinations of one association. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Final, NamedTuple

from exec_server.proxy import hosts

# Destinations of one association that are remembered, with their decisions: programs have a few.
# The oldest is forgotten, so its next datagram is decided about again.
MAX_DESTINATIONS: Final = 64
# Datagrams of one association that wait for decisions; further ones are dropped, as networks do.
MAX_WAITING: Final = 32

_IPV4, NAME, _IPV6 = 1, 3, 4
ADDRESS_BYTES: Final = {_IPV4: 4, _IPV6: 16}
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
    kind, start = data[3], _HEADER_BYTES
    size = ADDRESS_BYTES.get(kind)
    if kind == NAME and len(data) > start:
        size, start = data[start], start + 1
    if size is None or len(data) < start + size + 2:
        return None
    end = start + size
    port = int.from_bytes(data[end : end + 2])
    host = decode_host(kind, data[start:end])
    return Datagram(Place(host, port), data[end + 2 :]) if port else None


def decode_host(kind: int, data: bytes) -> str:
    """The host in its normal form; a name that no host can have stays as it is."""
    if kind != NAME:
        return str(ip_address(data))
    name = data.decode("ascii", "backslashreplace")
    return name if name.count(":") == 1 else hosts.normalize(name)


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
