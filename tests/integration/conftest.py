"""Shared by integration tests: servers for clients of every kind, a relay."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.relay_service import ThreadedRelayService
from tests.support.client import KINDS
from tests.support.client_targets import ClientTarget, machine


@pytest.fixture(scope="module", params=KINDS)
def there(request: pytest.FixtureRequest) -> Iterator[ClientTarget]:
    """A server for the client under test: ours, then the reference."""
    with machine(request.param) as running:
        yield running


@pytest.fixture(scope="module")
def ours() -> Iterator[ClientTarget]:
    """A server of ours, for features that the reference lacks."""
    with machine("ours") as running:
        yield running


@pytest.fixture
def service() -> Iterator[ThreadedRelayService]:
    with ThreadedRelayService() as running:
        yield running
