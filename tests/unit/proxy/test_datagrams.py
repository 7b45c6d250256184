"""Datagrams of SOCKS5, and the table of an association's destinations."""

from __future__ import annotations

import pytest

from exec_server.proxy import datagrams as module
from exec_server.proxy.datagrams import Datagram, DatagramDestinations, Place, decode, encode

_V4 = b"\0\0\0\x01\x08\x08\x08\x08\x00\x35"
_A = Place("8.8.8.8", 53)


@pytest.mark.parametrize(
    ("data", "place", "payload"),
    [
        (_V4 + b"x", _A, b"x"),
        (_V4, _A, b""),
        (b"\xff\xff\0" + _V4[3:] + b"x", _A, b"x"),  # the reserved bytes have no meaning
        (b"\0\0\0\x04" + bytes(15) + b"\x01\x00\x35x", Place("::1", 53), b"x"),
        (b"\0\0\0\x03\x07A.test.\x00\x35x", Place("a.test", 53), b"x"),
        (b"\0\0\0\x03\x03a:1\x00\x35x", Place("a:1", 53), b"x"),
        (b"\0\0\0\x03\x01\xe9\x00\x35x", Place("\\xe9", 53), b"x"),
    ],
)
def test_datagrams(data: bytes, place: Place, payload: bytes) -> None:
    assert decode(data) == Datagram(place, payload)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0\0",
        b"\0\0\x01" + _V4[3:] + b"x",  # a fragment
        b"\0\0\0\x02\x08\x08\x08\x08\x00\x35x",
        _V4[:-1],
        _V4[:6],
        _V4[:-2] + b"\0\0x",  # port 0
        b"\0\0\0\x03",
        b"\0\0\0\x03\x07a.test",
        b"\0\0\0\x04" + bytes(15),
    ],
)
def test_datagrams_that_are_dropped(data: bytes) -> None:
    assert decode(data) is None


def test_answers() -> None:
    assert encode("8.8.8.8", 53, b"x") == _V4 + b"x"
    assert encode("::1%lo", 53, b"x") == b"\0\0\0\x04" + bytes(15) + b"\x01\x00\x35x"


def test_the_first_datagram_waits_for_the_decision() -> None:
    destinations = DatagramDestinations()
    assert destinations.add(Datagram(_A, b"1"))
    assert not destinations.add(Datagram(_A, b"2"))
    assert destinations.address(_A) is None
    assert destinations.decide(_A, "8.8.8.8") == [b"1", b"2"]
    assert not destinations.add(Datagram(_A, b"3"))
    assert destinations.address(_A) == "8.8.8.8"
    assert destinations.is_peer("8.8.8.8", 53)
    assert not destinations.is_peer("8.8.8.8", 54)
    assert not destinations.is_peer("8.8.4.4", 53)


def test_a_refusal_is_remembered() -> None:
    destinations = DatagramDestinations()
    assert destinations.add(Datagram(_A, b"1"))
    assert destinations.decide(_A, None) == []
    assert not destinations.add(Datagram(_A, b"2"))
    assert destinations.address(_A) is None
    assert not destinations.is_peer("8.8.8.8", 53)


def test_an_address_has_one_meaning_in_all_spellings() -> None:
    destinations = DatagramDestinations()
    destinations.add(Datagram(_A, b""))
    destinations.decide(_A, "::ffff:102:304")
    assert destinations.is_peer("::ffff:1.2.3.4", 53)


def test_waiting_datagrams_are_limited() -> None:
    destinations = DatagramDestinations()
    for number in range(module.MAX_WAITING):
        assert destinations.add(Datagram(Place("a.test", number), b""))
    assert not destinations.add(Datagram(_A, b"dropped"))
    assert not destinations.add(Datagram(Place("a.test", 0), b"dropped"))
    assert destinations.decide(Place("a.test", 0), "8.8.8.8") == [b""]
    assert destinations.add(Datagram(_A, b"next"))


def test_the_oldest_destination_is_forgotten() -> None:
    destinations = DatagramDestinations()
    places = [Place("a.test", number) for number in range(module.MAX_DESTINATIONS)]
    for place in places:
        destinations.add(Datagram(place, b""))
        destinations.decide(place, "8.8.8.8")
    destinations.add(Datagram(_A, b""))
    assert destinations.address(places[0]) is None
    assert destinations.address(places[1]) == "8.8.8.8"
    assert not destinations.is_peer("8.8.8.8", 0)
    assert destinations.add(Datagram(places[0], b""))
