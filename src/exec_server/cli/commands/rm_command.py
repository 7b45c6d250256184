"""`exec-server rm`: remove files and trees of a target."""

from __future__ import annotations

import argparse
import posixpath
from typing import TYPE_CHECKING, Final

from exec_server.cli.commands.access_flags import access_options, add_access_flags
from exec_server.cli.commands.command_parser import PATH_FORMS, CommandParser
from exec_server.cli.commands.errors import UsageError

if TYPE_CHECKING:
    from exec_server.cli.commands.remote_operands import Operand

_DESCRIPTION: Final = f"""\
Remove files and empty directories of a target, and with -r whole trees. A path may be a pattern
with *, ?, [...], {{a,b}} and **; quote it for your shell.

{PATH_FORMS}"""
_EPILOG: Final = """\
examples:
  exec-server rm build:/tmp/old.log
  exec-server rm -rf build:/tmp/scratch
  exec-server rm 'build:/tmp/*.log'
"""


def build_parser() -> CommandParser:
    parser = CommandParser("rm", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("paths", metavar="TARGET:PATH", nargs="+")
    parser.add_argument(
        *("-r", "-R", "--recursive"),
        action="store_true",
        help="remove directories and their content",
    )
    parser.add_argument("-f", "--force", action="store_true", help="ignore missing files")
    add_access_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Remove each operand; returns the exit code."""
    from exec_server.cli.commands.remote_operands import for_each_operand

    async def remove(operand: Operand) -> None:
        if not operand.path.strip("/"):
            raise UsageError(f"`{operand.label}` is the root directory; refusing to remove it")
        if posixpath.basename(operand.path.rstrip("/")) in (".", ".."):
            raise UsageError(
                f"`{operand.label}`: refusing to remove `.` or `..`; name the directory"
            )
        await operand.environment.files.remove(
            operand.path, recursive=arguments.recursive, missing_ok=arguments.force
        )

    return for_each_operand(
        arguments.paths,
        access_options(arguments),
        remove,
        takes_patterns=True,
        may_be_missing=arguments.force,
    )
