"""The sockets of a node follow from its descriptors."""

from __future__ import annotations

import pytest

from exec_server.hosting.http_connection import (
    REFUSED_SOCKETS,
    SOCKETS,
    WANTED_DESCRIPTORS,
    Capacity,
    SocketAdmission,
    capacity_of,
)


@pytest.mark.parametrize(
    ("descriptors", "sockets", "refused"),
    [
        (128, 1, 16),
        (256, 64, 32),
        (1024, 736, 128),
        (4096, 3072, 512),
        (WANTED_DESCRIPTORS - 1, SOCKETS - 1, REFUSED_SOCKETS),
        (WANTED_DESCRIPTORS, SOCKETS, REFUSED_SOCKETS),
        (500_000, SOCKETS, REFUSED_SOCKETS),
    ],
)
def test_descriptors_are_left_for_the_rest(descriptors: int, sockets: int, refused: int) -> None:
    assert capacity_of(descriptors) == Capacity(sockets, refused)


def test_sockets_are_served_then_refused_then_turned_away() -> None:
    rooms = [Capacity(2, 1).admission(used) for used in range(5)]
    assert rooms == [
        SocketAdmission.ACCEPT,
        SocketAdmission.ACCEPT,
        SocketAdmission.REJECT,
        SocketAdmission.REJECT_AT_ONCE,
        SocketAdmission.REJECT_AT_ONCE,
    ]
