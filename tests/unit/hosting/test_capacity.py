"""The sockets of a node follow from its descriptors."""

from __future__ import annotations

import pytest

from exec_server.hosting.capacity import SOCKETS, WANTED_DESCRIPTORS, socket_limit


@pytest.mark.parametrize(
    ("descriptors", "sockets"),
    [
        (128, 96),
        (1024, 768),
        (4096, 3072),
        (WANTED_DESCRIPTORS - 1, SOCKETS - 1),
        (WANTED_DESCRIPTORS, SOCKETS),
        (500_000, SOCKETS),
    ],
)
def test_descriptors_are_left_for_the_rest(descriptors: int, sockets: int) -> None:
    assert socket_limit(descriptors) == sockets
