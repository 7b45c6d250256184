"""`exec-server put`: a short form of cp to a target."""

from __future__ import annotations

import argparse
from typing import Final

from exec_server.cli.commands.access_flags import add_access_flags
from exec_server.cli.commands.command_parser import PATH_FORMS, CommandParser
from exec_server.cli.commands.copy_command import COPY_USAGE, add_copy_flags, copy_paths
from exec_server.cli.commands.errors import UsageError

_DESCRIPTION: Final = f"""\
Copy files and directories of this machine to a target: a short form of cp.

{PATH_FORMS}"""
_EPILOG: Final = """\
examples:
  exec-server put report.pdf build:/srv/
  exec-server put src docs build:project/
"""


def build_parser() -> CommandParser:
    parser = CommandParser("put", description=_DESCRIPTION, epilog=_EPILOG)
    parser.usage = f"exec-server put {COPY_USAGE} SOURCE... TARGET:PATH"
    parser.add_argument("paths", metavar="PATH", nargs="+", help=argparse.SUPPRESS)
    add_copy_flags(parser)
    add_access_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Copy all operands; returns the exit code."""
    from exec_server.cli.commands.targets import parse_remote_path

    are_remote = [parse_remote_path(text) is not None for text in arguments.paths]
    if any(are_remote[:-1]) or not are_remote[-1]:
        raise UsageError(
            "write local paths first and TARGET:PATH last; `get` copies to this machine"
        )
    return copy_paths(arguments, arguments.paths)
