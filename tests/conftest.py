"""Shared by all tests: our server, a client past its handshake, and children to start."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.support.client import Client, Server, reference_binary, start_server
from tests.support.examples import examples
from tests.support.fixed_surroundings import fix_surroundings

fix_surroundings()

os.environ.pop("EXEC_SERVER_TARGET", None)  # the machine of whoever runs the tests

_TESTS = Path(__file__).parent
_QUICK = (_TESTS / "unit", _TESTS / "fuzz")

# The same examples each time (`--hypothesis-seed` asks for others), and no deadline on a slow
# machine.
hypothesis.settings.register_profile(
    "repeatable",
    max_examples=examples(100),
    derandomize=True,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
# Other examples each time; those that fail are remembered: `make fuzz`.
_EXAMPLES = os.environ.get("EXEC_SERVER_FUZZ_EXAMPLES")
hypothesis.settings.register_profile(
    "searching",
    hypothesis.settings.get_profile("repeatable"),
    derandomize=False,
    database=DirectoryBasedExampleDatabase(_EXAMPLES) if _EXAMPLES else None,
)
hypothesis.settings.load_profile("searching" if _EXAMPLES else "repeatable")

_UNAVAILABLE = pytest.StashKey[int]()
_WORKER_OUTPUT = "reference_cases"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the cases that wait a minute too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark quick tests, leave out the reference where it is not installed, and slow cases."""
    if reference_binary() is None:
        unavailable = [item for item in items if item.get_closest_marker("reference")]
        config.stash[_UNAVAILABLE] = len(unavailable)
        config.hook.pytest_deselected(items=unavailable)
        items[:] = [item for item in items if not item.get_closest_marker("reference")]
    slow = pytest.mark.skip(reason="waits for a minute (--slow runs it)")
    # The reference is not deterministic: its exits overtake output, its closes overtake exits.
    # A case is wrong when it fails twice. Our server gets one try.
    again = pytest.mark.flaky(reruns=1)
    for item in items:
        if any(item.path.is_relative_to(folder) for folder in _QUICK):
            item.add_marker(pytest.mark.quick)
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(slow)
        if item.get_closest_marker("reference"):
            item.add_marker(again)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Ctrl-C raises KeyboardInterrupt; the loop of a command leaves a handler of its own behind."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Report the count of a pytest-xdist worker to the controller."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[_WORKER_OUTPUT] = session.config.stash.get(_UNAVAILABLE, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Take the count of a worker; each worker has collected all cases."""
    count = getattr(node, "workeroutput", {}).get(_WORKER_OUTPUT, 0)
    node.config.stash[_UNAVAILABLE] = count  # type: ignore[attr-defined]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if count := config.stash.get(_UNAVAILABLE, 0):
        terminalreporter.write_line(
            f"{count} cases not run: the reference is not installed (make reference installs it)"
        )


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Our server with default settings, for all tests of a module."""
    with start_server("ours") as running:
        yield running


@pytest.fixture
def fresh_server() -> Iterator[Server]:
    """One for a single test: it changes the server, or measures it."""
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
