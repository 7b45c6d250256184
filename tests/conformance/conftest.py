"""The server under test: ours always, the reference too when its program is here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.origin import Origin, running
from tests.support.client import KINDS, Client, Server, start_server


@pytest.fixture(scope="session", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Which server a test runs against."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def server(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with default settings for all tests that need no other."""
    home = tmp_path_factory.mktemp("home").resolve()
    with start_server(kind, env={"HOME": str(home)}, cwd=home) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    """A connection past its handshake."""
    with server.connect() as connected:
        yield connected


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder whose path contains no symbolic link."""
    return Path(os.path.realpath(tmp_path))


@pytest.fixture
def origin() -> Iterator[Origin]:
    """A web server for http/request."""
    with running() as server:
        yield server
