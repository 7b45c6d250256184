"""`exec-server mkdir`, `mv` and `rm`: create, move and remove files of a target."""

from __future__ import annotations

import argparse
import posixpath
from typing import TYPE_CHECKING, Final

from exec_server.cli.errors import CommandError, UsageError
from exec_server.cli.parser import CommandParser
from exec_server.cli.targets import PathParser, with_access_flags

if TYPE_CHECKING:
    from exec_server.cli.files.operands import Operand
    from exec_server.client.files import Files


_MKDIR_DESCRIPTION: Final = """\
Create directories of a target.
"""
_MKDIR_EPILOG: Final = """\
examples:
  exec-server mkdir build:project
  exec-server mkdir -p build:project/src/lib
"""


def build_mkdir_parser() -> CommandParser:
    parser = PathParser("mkdir", _MKDIR_DESCRIPTION, _MKDIR_EPILOG)
    parser.add_argument("paths", metavar="TARGET:PATH", nargs="+")
    parser.add_argument(
        "-p",
        "--parents",
        action="store_true",
        help="also create the directories above; an existing directory is not an error",
    )
    return with_access_flags(parser)


def run_mkdir(arguments: argparse.Namespace) -> int:
    from exec_server.cli.files.operands import for_each_operand

    async def make(operand: Operand) -> None:
        await operand.environment.files.mkdir(
            operand.path, parents=arguments.parents, exist_ok=arguments.parents
        )

    return for_each_operand(arguments, make)


_MV_DESCRIPTION: Final = """\
Rename or move files and directories of one target. Into an existing directory, each is moved
under its own name.
"""
_MV_EPILOG: Final = """\
examples:
  exec-server mv build:old.txt build:new.txt
  exec-server mv build:a.log build:b.log build:logs/
"""


def build_mv_parser() -> CommandParser:
    parser = PathParser("mv", _MV_DESCRIPTION, _MV_EPILOG)
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
    return with_access_flags(parser)


def run_mv(arguments: argparse.Namespace) -> int:
    from exec_server.cli.connection import error_text
    from exec_server.cli.files.operands import for_each_operand, parse_operand
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

    arguments.paths = sources
    return for_each_operand(arguments, move)


async def _is_directory(files: Files, path: str) -> bool:
    from exec_server.errors import NotFound

    try:
        return (await files.stat(path)).is_directory
    except NotFound:
        return False


_RM_DESCRIPTION: Final = """\
Remove files and empty directories of a target, and with -r whole trees. A path may be a pattern
with *, ?, [...], {a,b} and **; quote it for your shell.
"""
_RM_EPILOG: Final = """\
examples:
  exec-server rm build:/tmp/old.log
  exec-server rm -rf build:/tmp/scratch
  exec-server rm 'build:/tmp/*.log'
"""


def build_rm_parser() -> CommandParser:
    parser = PathParser("rm", _RM_DESCRIPTION, _RM_EPILOG)
    parser.add_argument("paths", metavar="TARGET:PATH", nargs="+")
    parser.add_argument(
        *("-r", "-R", "--recursive"),
        action="store_true",
        help="remove directories and their content",
    )
    parser.add_argument("-f", "--force", action="store_true", help="ignore missing files")
    return with_access_flags(parser)


def run_rm(arguments: argparse.Namespace) -> int:
    from exec_server.cli.files.operands import for_each_operand

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

    return for_each_operand(arguments, remove, takes_patterns=True, may_be_missing=arguments.force)
