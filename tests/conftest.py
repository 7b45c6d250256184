"""Shared by all tests: our server, a client past its handshake, and children to start."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator

import hypothesis
import pytest

from wire import Client, Server, start_server

# Servers inherit what is ignored here, and nohup, for one, starts the tests that way.
for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)

# The same examples each time, and however slow the machine is. `--hypothesis-seed` asks for others.
hypothesis.settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run what waits for 30 s")


@pytest.fixture
def server() -> Iterator[Server]:
    """Our server with default settings, for one test."""
    with start_server("ours") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    """A connection past its handshake."""
    with server.connect() as connected:
        yield connected


@pytest.fixture
def python() -> Callable[[str], list[str]]:
    """The argv of a child that runs this code."""
    return lambda code: [sys.executable, "-S", "-c", code]
