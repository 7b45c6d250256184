"""`exec-server attach`: use a detached command with the local stdin, stdout and stderr."""

from __future__ import annotations

import argparse
from typing import Final

from exec_server.cli.commands.access_flags import access_options, add_access_flags
from exec_server.cli.commands.command_parser import TARGET_FORMS, CommandParser
from exec_server.cli.commands.execution_flags import add_escape_flag
from exec_server.cli.commands.targets import find_target

_DESCRIPTION: Final = f"""\
Attach to a detached command (`exec-server exec -d`): print its output, from the oldest that the
server retains to its end, and send it stdin. Several clients may be attached at a time; all of
them see the output, and the input of all reaches the command. Leaving does not end the command.

{TARGET_FORMS}"""
_EPILOG: Final = """\
exit code:
  the exit code of the command, if it has ended; 0 after ~. and 128 + N after signal N
  1     there is no such command
  255   there is no connection to the target, or the session was lost

signals:
  INT, TERM and HUP let exec-server leave; the command does not get them. On a terminal the
  keys, Ctrl-C among them, are sent to the command.

on a terminal, at the beginning of a line:
  ~.    leave; the command goes on        ~^Z   suspend exec-server
  ~?    list these escapes                ~~    send ~

examples:
  exec-server attach build web
  exec-server attach -n build web
"""


def build_parser() -> CommandParser:
    parser = CommandParser("attach", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("target", metavar="TARGET")
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("-n", "--no-stdin", action="store_true", help="send no input")
    add_escape_flag(parser)
    add_access_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Attach until the command has ended or the user leaves; returns the exit code."""
    target = find_target(arguments.target, access_options(arguments))

    from exec_server.cli.commands.attaching import attach

    return attach(arguments, target)
