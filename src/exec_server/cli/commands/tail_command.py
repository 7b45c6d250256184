"""`exec-server tail`: print the end of files of a target, and what is appended to them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from exec_server.cli.commands.access_flags import access_options, add_access_flags
from exec_server.cli.commands.command_parser import PATH_FORMS, CommandParser
from exec_server.cli.commands.errors import UsageError

if TYPE_CHECKING:
    from exec_server.cli.commands.remote_operands import Operand

_DESCRIPTION: Final = f"""\
Print the last lines of files of a target; with -f also the lines that are appended later, until
Ctrl-C. A file that is replaced or truncated is read from its beginning. Several files get headings.

{PATH_FORMS}"""
_EPILOG: Final = """\
examples:
  exec-server tail build:/var/log/syslog
  exec-server tail -n 100 -f build:server.log
"""


def build_parser() -> CommandParser:
    parser = CommandParser("tail", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("paths", metavar="TARGET:PATH", nargs="+")
    parser.add_argument(
        "-n", "--lines", type=int, default=10, metavar="N", help="print the last N lines (10)"
    )
    parser.add_argument(
        "-f", "--follow", action="store_true", help="wait for further lines of one file"
    )
    add_access_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print the end of each operand; returns the exit code."""
    from exec_server.cli.commands.remote_operands import for_each_operand
    from exec_server.cli.commands.tailing import Tail
    from exec_server.printable import printable

    if arguments.lines < 0:
        raise UsageError("-n: the number of lines must not be negative")
    if arguments.follow and len(arguments.paths) > 1:
        raise UsageError("-f follows one file")

    has_headings = len(arguments.paths) > 1
    gap = ""

    async def print_end(operand: Operand) -> None:
        nonlocal gap
        tail = Tail(operand)
        heading = f"{gap}==> {printable(operand.path)} <==\n" if has_headings else ""
        await tail.print_end(arguments.lines, heading.encode())
        gap = "\n"
        if arguments.follow:
            await tail.follow()

    return for_each_operand(arguments.paths, access_options(arguments), print_end)
