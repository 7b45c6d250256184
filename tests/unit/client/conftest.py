"""Shared by the tests of the client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from exec_server.client.engine import flow_control


@pytest.fixture(autouse=True)
def no_consumers() -> Iterator[None]:
    """Start without consumers: a thread that has used the synchronous client stays one."""
    before = flow_control._chain.set(())
    yield
    flow_control._chain.reset(before)
