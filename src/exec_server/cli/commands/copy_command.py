"""`exec-server cp`: copy files and trees to, from and between targets."""

from __future__ import annotations

import argparse
from typing import Final, Literal

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
is resumed by the next one if the source has not changed. The directory above the destination must
exist: create it with `exec-server mkdir -p`. A source on a target may be a pattern with *, ?,
[...], {a,b} and **; quote it for your shell.

examples:
  exec-server cp report.pdf build:/srv/
  exec-server cp build:/var/log/syslog .
  exec-server cp src docs build:project/           two trees into one directory
  exec-server cp ws://127.0.0.1:7700:/etc/hosts /tmp/hosts
  exec-server cp 'build:logs/*.gz' .               a pattern on the target
  tar c src | exec-server cp - build:src.tar       stdin; stdout is - as the destination
"""


COPY_USAGE: Final = "[-a] [-p] [-q] [--sync] [--checksum]"


def build_parser() -> CommandParser:
    parser = CommandParser("cp", description=_DESCRIPTION, epilog=_EPILOG)
    parser.usage = f"exec-server cp {COPY_USAGE} SOURCE... DESTINATION"
    parser.add_argument("paths", metavar="PATH", nargs="+", help=argparse.SUPPRESS)
    add_copy_flags(parser)
    add_access_flags(parser)
    return parser


def add_copy_flags(parser: CommandParser) -> None:
    """Add the flags that cp, put and get share."""
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="show no progress bar (default: on a terminal)"
    )
    parser.add_argument(
        *("-r", "-R", "--recursive"),
        action="store_true",
        help="no effect: directories are always copied",
    )
    parser.add_argument("-a", "--archive", action="store_true", help="the same as -r -p")
    parser.add_argument(
        "-p",
        "--preserve",
        action="store_true",
        help="keep modification times; modes are always kept",
    )
    parser.add_argument(
        "--sync",
        action="store_true",
        help="skip files whose copies have the same size and time; implies -p",
    )
    parser.add_argument(
        "--checksum", action="store_true", help="like --sync, but compare size and SHA-256"
    )


def run(arguments: argparse.Namespace) -> int:
    """Copy all sources; returns the exit code."""
    return copy_paths(arguments, arguments.paths)


def copy_paths(arguments: argparse.Namespace, paths: list[str]) -> int:
    """Copy all paths but the last to the last, with the flags of `add_copy_flags`."""
    from exec_server.cli.commands.copier import copy

    sync: Literal["time", "checksum"] | None = "time" if arguments.sync else None
    if arguments.checksum:
        sync = "checksum"
    return copy(
        paths,
        access_options(arguments),
        is_quiet=arguments.quiet,
        keep_times=arguments.preserve or arguments.archive or sync is not None,
        sync=sync,
    )
