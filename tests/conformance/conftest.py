"""The server under test: ours always, the reference too when its program is here."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

_HERE = Path(__file__).resolve().parent
for _folder in (_HERE.parent, _HERE):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

from origin import Origin, running  # noqa: E402

from wire import Client, Server, reference_binary, start_server  # noqa: E402

_NO_REFERENCE = pytest.mark.skipif(
    reference_binary() is None,
    reason="no reference binary (make conformance installs it, EXEC_SERVER_REFERENCE names it)",
)
_KINDS = ["ours", pytest.param("reference", marks=[_NO_REFERENCE, pytest.mark.reference])]


@pytest.fixture(scope="session", params=_KINDS)
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


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Ask the reference a second time before a case counts as wrong.

    It is not deterministic: its exits overtake output, its closes overtake exits. Our server
    gets no second chance.
    """
    if item.get_closest_marker("reference") is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if any(report.failed for report in reports):
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: waits half a minute; run with --slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # This file is read too late to define an option for a run of all tests, so --slow is
    # asked for where someone defined it, and the environment variable always works.
    if config.getoption("--slow", default=False) or os.environ.get("EXEC_SERVER_SLOW") == "1":
        return
    reason = "waits half a minute (--slow or EXEC_SERVER_SLOW=1 runs it)"
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason=reason))
