"""Shared by integration tests: servers for clients of every kind, and a relay service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from clients import Machine, machine
from relay_ends import Ends, close_links
from relay_service import ThreadedRelayService
from relaying import KINDS


@pytest.fixture(scope="module", params=KINDS)
def there(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """A server for the client under test: ours, then the reference."""
    with machine(request.param) as running:
        yield running


@pytest.fixture(scope="module")
def ours() -> Iterator[Machine]:
    """A server of ours, for what no other can do."""
    with machine("ours") as running:
        yield running


@pytest.fixture
def service() -> Iterator[ThreadedRelayService]:
    with ThreadedRelayService() as running:
        yield running


@pytest.fixture
def ends(service: ThreadedRelayService) -> Ends:
    return Ends(service)


@pytest.fixture
def closed_links() -> Iterator[None]:
    """Closes at last what `relay_ends.dial` has opened."""
    yield
    close_links()
