"""Content of the completion scripts; tests with real shells are in integration."""

from __future__ import annotations

import argparse

import pytest

from exec_server.cli.commands.completion import SHELLS, script
from exec_server.cli.commands.table import COMMANDS, load


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_flag_is_there(shell: str) -> None:
    text = script(shell)
    for command in filter(lambda command: command.is_visible, COMMANDS.values()):
        assert command.name in text
        for action in load(command).build_parser()._actions:
            for name in action.option_strings if action.help != argparse.SUPPRESS else ():
                spelt = f"-l {name[2:]} " if shell == "fish" and name.startswith("--") else name
                if shell != "fish" or name.startswith("--"):
                    assert spelt in text, f"{command.name} {name}"


@pytest.mark.parametrize("shell", SHELLS)
def test_names_of_targets_are_listed_at_completion_time(shell: str) -> None:
    assert "exec-server targets --names" in script(shell)


@pytest.mark.parametrize("shell", SHELLS)
def test_remote_paths_are_asked_for_at_completion_time(shell: str) -> None:
    assert "exec-server complete-path" in script(shell)
