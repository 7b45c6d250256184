"""`exec-server help`, and the text of `exec-server --help`."""

from __future__ import annotations

import pytest

from exec_server.cli import main
from exec_server.cli.help import overview_text
from exec_server.cli.table import COMMANDS, GROUPS


def test_without_a_command_it_lists_all(capfd: pytest.CaptureFixture[str]) -> None:
    assert main.run_client("help", []) == 0
    assert capfd.readouterr().out == overview_text()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main.run_client("help", [name]) == 0
    assert capfd.readouterr().out.startswith(f"usage: exec-server {name}")


def test_the_help_of_a_subcommand(capfd: pytest.CaptureFixture[str]) -> None:
    assert main.run_client("help", ["sandbox", "run"]) == 0
    assert capfd.readouterr().out.startswith("usage: exec-server sandbox run")


def test_the_help_of_a_verb(capfd: pytest.CaptureFixture[str]) -> None:
    assert main.run_client("help", ["registry", "token", "list"]) == 0
    assert capfd.readouterr().out.startswith("usage: exec-server registry token list")
    assert main.run_client("help", ["registry", "fly"]) == 2
    assert "`exec-server registry` has no command `fly`" in capfd.readouterr().err


def test_an_unknown_subcommand(capfd: pytest.CaptureFixture[str]) -> None:
    assert main.run_client("help", ["exec", "extra"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("Error: `exec-server exec` has no command `extra`\n")


def test_an_unknown_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert main.run_client("help", ["exce"]) == 2
    assert capfd.readouterr().err.startswith("Error: unknown command `exce`; did you mean `exec`")


def test_every_group_and_command_has_its_line() -> None:
    text = overview_text()
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert [line[:-1] for line in lines if line[:-1] in GROUPS] == list(GROUPS)
    for command in COMMANDS.values():
        assert (f"  {command.name} " in text) is command.is_visible
        assert (command.summary in text) is command.is_visible
