"""`exec-server logs`: print the output of a detached command."""

from __future__ import annotations

import argparse
from typing import Final

from exec_server.cli.argument_parser import line_count
from exec_server.cli.commands.access_flags import access_options, add_access_flags
from exec_server.cli.commands.command_parser import TARGET_FORMS, CommandParser
from exec_server.cli.commands.targets import find_target

_DESCRIPTION: Final = f"""\
Print the output of a detached command (`exec-server exec -d`), as far as the server retains it:
the last MiB, until an hour after its end. Its stderr is printed to stderr.

{TARGET_FORMS}"""
_EPILOG: Final = """\
examples:
  exec-server logs build web
  exec-server logs -f build web | grep -i error
  exec-server logs -n 20 -f build web
"""


def build_parser() -> CommandParser:
    parser = CommandParser("logs", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("target", metavar="TARGET")
    parser.add_argument("name", metavar="NAME")
    parser.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="go on with new output until the command has ended",
    )
    parser.add_argument(
        *("-n", "--lines", "--tail"),
        metavar="N",
        type=line_count,
        help="begin with the last N lines of the retained output (default: all of it)",
    )
    add_access_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print the output; returns the exit code."""
    target = find_target(arguments.target, access_options(arguments))

    from exec_server.cli.commands.connection import run_until_signal
    from exec_server.cli.commands.log_output import print_output

    return run_until_signal(
        lambda: print_output(
            target, arguments.name, is_following=arguments.follow, lines=arguments.lines
        )
    )
