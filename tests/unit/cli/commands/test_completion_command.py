"""`exec-server completion`."""

from __future__ import annotations

import pytest

from exec_server.cli.commands import dispatch


def test_completion_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    assert dispatch.run("completion", ["bash"]) == 0
    assert "complete -F _exec_server_complete exec-server" in capfd.readouterr().out
