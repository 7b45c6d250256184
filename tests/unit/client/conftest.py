"""Shared by the tests of the client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from exec_server.client import parties


@pytest.fixture(autouse=True)
def no_parties() -> Iterator[None]:
    """Nobody reads yet: a thread that has used the synchronous client is one party for good."""
    before = parties._chain.set(())
    yield
    parties._chain.reset(before)
