"""Admission: bounds from the limit of descriptors, and the oldest pending connection gives way."""

from __future__ import annotations

import resource

import pytest

from exec_server.net.admission import Admission


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


def test_the_oldest_gives_way() -> None:
    cut_off: list[int] = []
    admission = Admission(16)
    assert admission.max_pending == 4
    for number in range(5):
        admission.add(number, lambda number=number: cut_off.append(number))  # type: ignore[misc]
    assert cut_off == [0]
    admission.remove(0)
    admission.remove(1)
    admission.add(9, lambda: cut_off.append(9))
    assert (cut_off, len(admission)) == ([0], 4)
