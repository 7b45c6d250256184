"""Servers for the adapters; this folder is run in environments that have one framework each."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator

import pytest

from tests.support.client import start_server

# An ordinary user of every Linux machine.
NOBODY = 65534


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without", default="", help="exact names of tests to leave out")
    parser.addoption("--adapter", default="", help="the driver of every_adapter.py")
    parser.addoption("--server", default="ours", help="ours or reference: the server of a suite")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "reference: as in pyproject.toml, which is not read here")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the named tests; --deselect would take all whose names begin so."""
    names = config.getoption("--without").split()
    left_out = [item for item in items if item.name in names]
    assert len(left_out) == len(names), f"some of {names} do not exist"
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    with start_server(request.config.getoption("--server")) as server:
        yield server.url


@pytest.fixture(scope="session")
def ordinary_user(request: pytest.FixtureRequest) -> str | None:
    """The user of suites that must not be allowed everything, if the server is one of root.

    The reference knows no users but its own.
    """
    is_ours = request.config.getoption("--server") == "ours"
    return pwd.getpwuid(NOBODY).pw_name if os.geteuid() == 0 and is_ours else None
