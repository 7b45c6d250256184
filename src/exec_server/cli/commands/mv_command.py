"""`exec-server mv`: rename and move files of a target."""

from __future__ import annotations

import argparse
import posixpath
from typing import TYPE_CHECKING, Final

from exec_server.cli.commands.access_flags import access_options, add_access_flags
from exec_server.cli.commands.command_parser import PATH_FORMS, CommandParser
from exec_server.cli.commands.errors import CommandError, UsageError

if TYPE_CHECKING:
    from exec_server.cli.commands.remote_operands import Operand
    from exec_server.client.files import Files

_DESCRIPTION: Final = f"""\
Rename or move files and directories of one target. Into an existing directory, each is moved
under its own name.

{PATH_FORMS}"""
_EPILOG: Final = """\
examples:
  exec-server mv build:old.txt build:new.txt
  exec-server mv build:a.log build:b.log build:logs/
"""


def build_parser() -> CommandParser:
    parser = CommandParser("mv", description=_DESCRIPTION, epilog=_EPILOG)
    parser.usage = "exec-server mv [-n] TARGET:SOURCE... TARGET:DESTINATION"
    parser.add_argument("paths", metavar="TARGET:PATH", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument(
        "-n", "--no-clobber", action="store_true", help="do not replace an existing file"
    )
    parser.add_argument(
        *("-f", "--force"),
        dest="no_clobber",
        action="store_false",
        default=False,
        help="replace an existing file; the default, unless -n comes before",
    )
    add_access_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Move all operands but the last to the last; returns the exit code."""
    from exec_server.cli.commands.connection import error_text
    from exec_server.cli.commands.remote_operands import for_each_operand, parse_operand
    from exec_server.client.arguments import PathResolver
    from exec_server.errors import RpcError

    *sources, destination = arguments.paths
    if not sources:
        raise UsageError("no destination; write TARGET:SOURCE... TARGET:DESTINATION")
    target = parse_operand(destination, needs_path=True)
    others = [
        text for text in sources if parse_operand(text, needs_path=True).target != target.target
    ]
    if others:
        raise UsageError(f"`{others[0]}` and `{destination}` are on two targets; use cp and rm")
    end = target.path or ""

    async def move(operand: Operand) -> None:
        files = operand.environment.files
        path = end
        if await _is_directory(files, end):
            path = posixpath.join(end, posixpath.basename(operand.path.rstrip("/")))
        elif len(sources) > 1 or end.endswith("/"):
            raise CommandError(f"{destination} is not a directory")
        try:
            await files.rename(operand.path, path, replace=not arguments.no_clobber)
        except RpcError as error:
            absolute = PathResolver(operand.environment.info).absolute
            text = error_text(error, f"{absolute(operand.path)} to {absolute(path)}")
            raise error.explained(f"cannot move it to {path}: {text}") from None

    return for_each_operand(sources, access_options(arguments), move)


async def _is_directory(files: Files, path: str) -> bool:
    from exec_server.errors import NotFound

    try:
        return (await files.stat(path)).is_directory
    except NotFound:
        return False
