"""`exec-server mkdir`: create directories of a target."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from exec_server.cli.commands.access_flags import access_options, add_access_flags
from exec_server.cli.commands.command_parser import PATH_FORMS, CommandParser

if TYPE_CHECKING:
    from exec_server.cli.commands.remote_operands import Operand

_DESCRIPTION: Final = f"""\
Create directories of a target.

{PATH_FORMS}"""
_EPILOG: Final = """\
examples:
  exec-server mkdir build:project
  exec-server mkdir -p build:project/src/lib
"""


def build_parser() -> CommandParser:
    parser = CommandParser("mkdir", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("paths", metavar="TARGET:PATH", nargs="+")
    parser.add_argument(
        "-p",
        "--parents",
        action="store_true",
        help="also create the directories above; an existing directory is not an error",
    )
    add_access_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Create each operand; returns the exit code."""
    from exec_server.cli.commands.remote_operands import for_each_operand

    async def make(operand: Operand) -> None:
        await operand.environment.files.mkdir(
            operand.path, parents=arguments.parents, exist_ok=arguments.parents
        )

    return for_each_operand(arguments.paths, access_options(arguments), make)
