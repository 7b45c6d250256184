"""`exec-server shell`: open a login shell on a target."""

from __future__ import annotations

import argparse
from typing import Final

from exec_server.cli.commands.access_flags import access_options
from exec_server.cli.commands.command_parser import TARGET_FORMS, CommandParser
from exec_server.cli.commands.execution_flags import add_execution_flags
from exec_server.cli.commands.targets import find_target

_DESCRIPTION: Final = f"""\
Open the login shell of the server's user, like ssh: on a terminal if stdin and stdout are one,
otherwise it reads its commands from stdin. It starts in the server's working directory, unless
--cwd names another.

{TARGET_FORMS}"""
_EPILOG: Final = """\
Exit codes, signals and escapes (~. to leave) are those of `exec-server exec`.

examples:
  exec-server shell build
  exec-server shell --cwd /src ws://127.0.0.1:7700
  exec-server shell build < script.sh
"""


def build_parser() -> CommandParser:
    parser = CommandParser("shell", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("target", metavar="TARGET")
    add_execution_flags(parser)
    # `exec` without a command.
    parser.set_defaults(argv=[], tty=False, no_stdin=False, timeout=None)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Run the shell; returns the exit code."""
    target = find_target(arguments.target, access_options(arguments))

    from exec_server.cli.commands.execution import execute

    return execute(arguments, target)
