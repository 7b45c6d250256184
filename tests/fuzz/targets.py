"""TARGETS: every decoder of bytes that a peer, a file or a child may choose.

A target raises only if its decoder breaks a rule: another exception than the documented one, an
answer that depends on where the bytes were cut, or a value that does not survive a round trip.
"""

from __future__ import annotations

from typing import Final

from tests.fuzz import machine_targets, network_targets, protocol_targets

TARGETS: Final = (*network_targets.TARGETS, *protocol_targets.TARGETS, *machine_targets.TARGETS)
