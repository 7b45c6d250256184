"""Shared by the tests of sandboxes: a server of each user, and a connection to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.client import Client
from tests.support.sandbox import BASE_STEPS, USERS, Stage, start_stage


@pytest.fixture(scope="module", params=USERS)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """One server for all sandbox tests of a module that do not end it: of root, then of a user."""
    with start_stage(request.param) as running:
        yield running


@pytest.fixture
def client(stage: Stage) -> Iterator[Client]:
    """A connection to the server of the sandbox tests, and a reset tree."""
    stage.scratch.reset(BASE_STEPS)
    with stage.server.connect() as connected:
        yield connected
