"""`exec-server help`."""

from __future__ import annotations

import pytest

from exec_server.cli.commands import dispatch, overview
from exec_server.cli.commands.table import COMMANDS


def test_without_a_command_it_lists_all(capfd: pytest.CaptureFixture[str]) -> None:
    assert dispatch.run("help", []) == 0
    assert capfd.readouterr().out == overview.text()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert dispatch.run("help", [name]) == 0
    assert capfd.readouterr().out.startswith(f"usage: exec-server {name}")


def test_the_help_of_a_subcommand(capfd: pytest.CaptureFixture[str]) -> None:
    assert dispatch.run("help", ["sandbox", "run"]) == 0
    assert capfd.readouterr().out.startswith("usage: exec-server sandbox run")


def test_the_help_of_a_verb(capfd: pytest.CaptureFixture[str]) -> None:
    assert dispatch.run("help", ["registry", "token", "list"]) == 0
    assert capfd.readouterr().out.startswith("usage: exec-server registry token list")
    assert dispatch.run("help", ["registry", "fly"]) == 2
    assert "`exec-server registry` has no command `fly`" in capfd.readouterr().err


def test_an_unknown_subcommand(capfd: pytest.CaptureFixture[str]) -> None:
    assert dispatch.run("help", ["exec", "extra"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("Error: `exec-server exec` has no command `extra`\n")


def test_an_unknown_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert dispatch.run("help", ["exce"]) == 2
    assert capfd.readouterr().err.startswith("Error: unknown command `exce`; did you mean `exec`")
