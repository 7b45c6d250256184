"""The text of `exec-server --help`: all commands of the table by groups."""

from __future__ import annotations

from typing import Final

from exec_server.cli.commands.command_parser import TARGET_FORMS
from exec_server.cli.commands.table import COMMANDS, GROUPS

USAGE: Final = """\
usage: exec-server COMMAND ...
       exec-server [FLAG ...]     the server, as `exec-server serve`
"""
DESCRIPTION: Final = """\
Run commands, terminals and file operations on other machines, or serve them on this one for a
coding agent.
"""
_EPILOG: Final = """\
examples:
  exec-server serve --listen ws://127.0.0.1:7700   on the machine to work on
  exec-server exec ws://127.0.0.1:7700 uname -a
  exec-server shell ws://127.0.0.1:7700
  exec-server cp report.pdf ws://127.0.0.1:7700:/tmp/

Flags, exit codes and more examples of a command: exec-server COMMAND --help
"""


def text() -> str:
    """The whole text, with a line for each command."""
    return "\n".join([USAGE, DESCRIPTION, *map(_list, GROUPS), TARGET_FORMS, _EPILOG])


def _list(group: str) -> str:
    width = max(len(command.name) for command in COMMANDS.values() if command.is_visible)
    members = [command for command in COMMANDS.values() if command.group == group]
    return f"{group}:\n" + "".join(f"  {each.name:{width}}   {each.summary}\n" for each in members)
