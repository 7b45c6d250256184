"""The text of `exec-server --help`."""

from __future__ import annotations

from exec_server.cli.commands import overview
from exec_server.cli.commands.table import COMMANDS, GROUPS


def test_every_group_and_command_has_its_line() -> None:
    text = overview.text()
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert [line[:-1] for line in lines if line[:-1] in GROUPS] == list(GROUPS)
    for command in COMMANDS.values():
        assert (f"  {command.name} " in text) is command.is_visible
        assert (command.summary in text) is command.is_visible
