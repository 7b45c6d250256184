"""Admission: bounds from the limit of descriptors, and which pending connection gives way."""

from __future__ import annotations

import resource

import pytest

from exec_server.net.admission import Admission, PendingConnections, peer_network


@pytest.mark.parametrize("descriptors", [64, 1024, 4096, 1_048_576])
def test_a_quarter_of_the_descriptors_stays_free(descriptors: int) -> None:
    admission = Admission(descriptors)
    bounds = (admission.max_connections, admission.max_pending, admission.max_handshakes)
    assert all(bounds)
    assert sum(bounds) <= descriptors * 3 // 4
    if descriptors > 100_000:
        assert bounds == (4096, 512, 256)


def test_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
    assert Admission().max_connections == 4096
    monkeypatch.setattr(resource, "getrlimit", lambda _: (80, 80))
    assert Admission().max_connections == 30


class _Scene:
    """Pending connections, each with a number, and those that were cut off."""

    def __init__(self, limit: int) -> None:
        self.cut_off: list[int] = []
        self.pending = PendingConnections(limit)

    def add(self, network: str, *numbers: int) -> None:
        for number in numbers:
            self.pending.add(number, network, lambda number=number: self.cut_off.append(number))  # type: ignore[misc]


def test_the_oldest_gives_way() -> None:
    scene = _Scene(4)
    scene.add("a", *range(5))
    assert scene.cut_off == [0]
    scene.pending.remove(0)
    scene.pending.remove(1)
    scene.add("a", 9)
    assert (scene.cut_off, len(scene.pending)) == ([0], 4)
    scene.pending.cut_off_all()
    assert scene.cut_off == [0, 2, 3, 4, 9]


def test_a_flood_from_one_network_cuts_off_its_own_connections() -> None:
    scene = _Scene(4)
    scene.add("honest", 1)
    scene.add("flood", *range(10, 100))
    assert scene.cut_off == [*range(10, 97)]
    scene.add("other", 2)
    assert scene.cut_off[-1] == 97
    scene.pending.remove(1)
    scene.add("flood", 100, 101)
    assert scene.cut_off[-1] == 98


def test_of_networks_with_one_connection_each_the_oldest_gives_way() -> None:
    scene = _Scene(2)
    for number in range(4):
        scene.add(f"network {number}", number)
    assert scene.cut_off == [0, 1]


def test_networks_of_peers() -> None:
    assert peer_network("127.0.0.1") != peer_network("127.0.0.2")
    assert peer_network("2001:db8::1") == peer_network("2001:db8:0:0:ffff::")
    assert peer_network("2001:db8::1") != peer_network("2001:db8:0:1::1")
    assert peer_network("fe80::1%lo") == peer_network("fe80::2")


def test_pending_connections_take_no_place_of_upgraded_ones() -> None:
    admission = Admission(16)
    assert (admission.max_connections, admission.max_pending) == (6, 4)
    for number in range(8):
        admission.pending.add(number, "a", lambda: None)
        assert admission.upgrade(number) is (number < 6)
    assert len(admission.pending) == 2
    admission.remove(0)
    admission.remove(7)
    assert admission.upgrade(6)
    assert not admission.upgrade(9)
