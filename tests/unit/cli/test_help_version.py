"""`exec-server version`."""

from __future__ import annotations

import pytest

from exec_server import __version__
from exec_server.cli import main


def test_the_version_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    assert main.run_client("version", []) == 0
    assert capfd.readouterr().out == f"exec-server {__version__}\n"
