"""`exec-server cat`: print files of a target."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from exec_server.cli.commands.access_flags import access_options, add_access_flags
from exec_server.cli.commands.command_parser import PATH_FORMS, CommandParser

if TYPE_CHECKING:
    from exec_server.cli.commands.remote_operands import Operand

_DESCRIPTION: Final = f"""\
Print files of a target to stdout. A path may be a pattern with *, ?, [...], {{a,b}} and **;
quote it for your shell.

{PATH_FORMS}"""
_EPILOG: Final = """\
examples:
  exec-server cat build:/etc/os-release
  exec-server cat build:data.tar.gz | tar tz
  exec-server cat 'build:logs/2026-*.log'
"""


def build_parser() -> CommandParser:
    parser = CommandParser("cat", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("paths", metavar="TARGET:PATH", nargs="+")
    add_access_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print each operand; returns the exit code."""
    from exec_server.cli.commands.printing import describe_stdout_errors
    from exec_server.cli.commands.remote_operands import for_each_operand
    from exec_server.cli.commands.streams import OutputWriter

    writer = OutputWriter()

    async def print_file(operand: Operand) -> None:
        async with operand.environment.files.open(operand.path, "rb") as file:
            async for block in file:
                with describe_stdout_errors():
                    await writer.write(1, block)

    return for_each_operand(
        arguments.paths, access_options(arguments), print_file, takes_patterns=True
    )
