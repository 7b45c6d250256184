"""`exec-server get`: a short form of cp from a target."""

from __future__ import annotations

import argparse
from typing import Final

from exec_server.cli.commands.access_flags import add_access_flags
from exec_server.cli.commands.command_parser import PATH_FORMS, CommandParser
from exec_server.cli.commands.copy_command import COPY_USAGE, add_copy_flags, copy_paths
from exec_server.cli.commands.errors import UsageError

_DESCRIPTION: Final = f"""\
Copy files and directories of a target to this machine: a short form of cp. Without a
destination they are copied into the current directory.

{PATH_FORMS}"""
_EPILOG: Final = """\
examples:
  exec-server get build:/var/log/syslog
  exec-server get 'build:logs/*.gz' build:report.pdf
"""


def build_parser() -> CommandParser:
    parser = CommandParser("get", description=_DESCRIPTION, epilog=_EPILOG)
    parser.usage = f"exec-server get {COPY_USAGE} TARGET:PATH... [DESTINATION]"
    parser.add_argument("paths", metavar="PATH", nargs="+", help=argparse.SUPPRESS)
    add_copy_flags(parser)
    add_access_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Copy all operands; returns the exit code."""
    from exec_server.cli.commands.targets import parse_remote_path

    are_remote = [parse_remote_path(text) is not None for text in arguments.paths]
    paths = (
        arguments.paths if len(are_remote) > 1 and not are_remote[-1] else [*arguments.paths, "."]
    )
    if not all(are_remote[: len(paths) - 1]):
        raise UsageError("write TARGET:PATH first and a local path last; `put` copies to a target")
    return copy_paths(arguments, paths)
