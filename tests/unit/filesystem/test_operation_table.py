"""Every fs call with its own function."""

from __future__ import annotations

import pytest

from exec_server.filesystem.operation_table import OPERATIONS
from exec_server.protocol.sandbox import Confinable

pytestmark = pytest.mark.quick


def test_every_operation_can_be_confined() -> None:
    for call in OPERATIONS:
        assert call.params is not None
        assert issubclass(call.params, Confinable), call.name


def test_no_function_serves_two_calls() -> None:
    assert len(set(OPERATIONS.values())) == len(OPERATIONS)
