"""`exec-server help` and `version`: the list of commands, the help of one, the version."""

from __future__ import annotations

import argparse
from typing import Final

from exec_server import __version__
from exec_server.cli.errors import UsageError
from exec_server.cli.parser import TARGET_FORMS, CommandParser
from exec_server.cli.streams import print_text
from exec_server.cli.table import COMMANDS, GROUPS, unknown_command

OVERVIEW_USAGE: Final = """\
usage: exec-server COMMAND ...
       exec-server [FLAG ...]     the server, as `exec-server serve`
"""
OVERVIEW_DESCRIPTION: Final = """\
Run commands, terminals and file operations on other machines, or serve them on this one for a
coding agent.
"""
_OVERVIEW_EPILOG: Final = """\
examples:
  exec-server serve --listen ws://127.0.0.1:7700   on the machine to work on
  exec-server exec ws://127.0.0.1:7700 uname -a
  exec-server shell ws://127.0.0.1:7700
  exec-server cp report.pdf ws://127.0.0.1:7700:/tmp/

Flags, exit codes and more examples of a command: exec-server COMMAND --help
"""


def overview_text() -> str:
    """The whole text, with a line for each command."""
    return "\n".join(
        [
            OVERVIEW_USAGE,
            OVERVIEW_DESCRIPTION,
            *map(_group_list, GROUPS),
            TARGET_FORMS,
            _OVERVIEW_EPILOG,
        ]
    )


def _group_list(group: str) -> str:
    width = max(len(command.name) for command in COMMANDS.values() if command.is_visible)
    members = [command for command in COMMANDS.values() if command.group == group]
    return f"{group}:\n" + "".join(f"  {each.name:{width}}   {each.summary}\n" for each in members)


_DESCRIPTION: Final = """\
List the commands, or show the help of one: the same as `exec-server COMMAND --help`.
"""
_EPILOG: Final = """\
examples:
  exec-server help
  exec-server help exec
  exec-server help sandbox run
"""


def build_parser() -> CommandParser:
    parser = CommandParser("help", description=_DESCRIPTION, epilog=_EPILOG)
    parser.usage = "exec-server help [COMMAND]"
    parser.add_argument("words", metavar="COMMAND", nargs=argparse.REMAINDER)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print the help; returns the exit code. Raises UsageError for an unknown command."""
    if not arguments.words:
        print_text(overview_text())
        return 0
    name, *rest = arguments.words
    if name not in COMMANDS:
        raise UsageError(unknown_command(name))
    parser = COMMANDS[name].build_parser()
    if isinstance(parser, CommandParser) and parser.verbs:
        if rest and " ".join(rest) not in parser.verbs:
            raise UsageError(f"`exec-server {name}` has no command `{' '.join(rest)}`")
        parser.parse_words([*rest, "--help"])
    if rest and COMMANDS[name].is_client:  # the others get the words of `COMMAND ... --help` too
        raise UsageError(f"`exec-server {name}` has no command `{rest[0]}`")
    parser.parse_args([*rest, "--help"])
    return 0


_VERSION_DESCRIPTION: Final = """\
Print the version of exec-server. `exec-server info TARGET` shows the version of a server.
"""
_VERSION_EPILOG: Final = """\
examples:
  exec-server version                              name and version
  exec-server version | cut -d ' ' -f 2            the version alone
"""


def build_version_parser() -> CommandParser:
    return CommandParser("version", description=_VERSION_DESCRIPTION, epilog=_VERSION_EPILOG)


def run_version(_: argparse.Namespace) -> int:
    """Print name and version; returns the exit code."""
    print_text(f"exec-server {__version__}\n")
    return 0
