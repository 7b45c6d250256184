"""Content of the completion scripts; tests with real shells are in integration."""

from __future__ import annotations

import pytest

from exec_server.cli.commands.arguments import PARSERS, SHELLS
from exec_server.cli.commands.completion import script


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_flag_is_there(shell: str) -> None:
    text = script(shell)
    for command, build in PARSERS.items():
        assert command in text
        for action in build()._actions:
            for name in action.option_strings:
                spelt = f"-l {name[2:]} " if shell == "fish" and name.startswith("--") else name
                if shell != "fish" or name.startswith("--"):
                    assert spelt in text, f"{command} {name}"


@pytest.mark.parametrize("shell", SHELLS)
def test_names_of_targets_are_listed_at_completion_time(shell: str) -> None:
    assert "exec-server targets --names" in script(shell)
