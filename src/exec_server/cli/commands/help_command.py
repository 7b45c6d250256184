"""`exec-server help`: the list of commands, or the help of one."""

from __future__ import annotations

import argparse
from typing import Final

from exec_server.cli.commands.command_parser import CommandParser
from exec_server.cli.commands.errors import UsageError
from exec_server.cli.commands.printing import print_text
from exec_server.cli.commands.routing import unknown_command
from exec_server.cli.commands.table import COMMANDS, load

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
        from exec_server.cli.commands import overview

        print_text(overview.text())
        return 0
    name, *rest = arguments.words
    if name not in COMMANDS:
        raise UsageError(unknown_command(name))
    parser = load(COMMANDS[name]).build_parser()
    if isinstance(parser, CommandParser) and parser.verbs:
        if rest and " ".join(rest) not in parser.verbs:
            raise UsageError(f"`exec-server {name}` has no command `{' '.join(rest)}`")
        parser.parse_words([*rest, "--help"])
    if rest and COMMANDS[name].is_client:  # the others get the words of `COMMAND ... --help` too
        raise UsageError(f"`exec-server {name}` has no command `{rest[0]}`")
    parser.parse_args([*rest, "--help"])
    return 0
