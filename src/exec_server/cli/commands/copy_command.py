"""`exec-server cp`: copy files and trees to, from and between targets."""

from __future__ import annotations

import argparse
from typing import Final

from exec_server.cli.commands.access_flags import access_options, add_access_flags
from exec_server.cli.commands.command_parser import PATH_FORMS, CommandParser

_DESCRIPTION: Final = f"""\
Copy files and directories to, from or between targets. Directories are copied recursively,
with modes, symlinks and empty directories. A file appears under its final name only when it
is complete.

{PATH_FORMS}  A path without a target, or with a / before its first colon, is local: ./a:b
"""
_EPILOG: Final = """\
Several sources require an existing directory as destination. If the destination is an existing
directory, each source is copied into it under its own name. The interrupted copy of a large file
is resumed by the next one if the source has not changed.

examples:
  exec-server cp report.pdf build:/srv/
  exec-server cp build:/var/log/syslog .
  exec-server cp src docs build:project/           two trees into one directory
  exec-server cp ws://127.0.0.1:7700:/etc/hosts /tmp/hosts
"""


def build_parser() -> CommandParser:
    parser = CommandParser("cp", description=_DESCRIPTION, epilog=_EPILOG)
    parser.usage = "exec-server cp [-q] SOURCE... DESTINATION"
    parser.add_argument("paths", metavar="PATH", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="show no progress bar (default: on a terminal)"
    )
    add_access_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Copy all sources; returns the exit code."""
    from exec_server.cli.commands.copier import copy

    return copy(arguments.paths, access_options(arguments), is_quiet=arguments.quiet)
