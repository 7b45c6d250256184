"""`exec-server cp`, `put` and `get`: copy files and trees to, from and between targets."""

from __future__ import annotations

import argparse
from typing import Final, Literal

from exec_server.cli.errors import UsageError
from exec_server.cli.parser import CommandParser
from exec_server.cli.targets import PathParser, access_options, parse_remote_path, with_access_flags

_DESCRIPTION: Final = """\
Copy files and directories to, from or between targets. Directories are copied recursively,
with modes, symlinks and empty directories. A file appears under its final name only when it
is complete.
"""
_LOCAL_PATHS: Final = """\
  A path without a target, or with a / before its first colon, is local: ./a:b ./:c
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
  exec-server cp report.pdf :/srv/                 to the target of EXEC_SERVER_TARGET
  exec-server cp src docs build:project/           two trees into one directory
  exec-server cp ws://127.0.0.1:7700:/etc/hosts /tmp/hosts
  exec-server cp 'build:logs/*.gz' .               a pattern on the target
  tar c src | exec-server cp - build:src.tar       stdin; stdout is - as the destination
"""
_PUT_DESCRIPTION: Final = """\
Copy files and directories of this machine to a target: a short form of cp.
"""
_PUT_EPILOG: Final = """\
examples:
  exec-server put report.pdf build:/srv/
  exec-server put src docs build:project/
"""
_GET_DESCRIPTION: Final = """\
Copy files and directories of a target to this machine: a short form of cp. Without a
destination they are copied into the current directory.
"""
_GET_EPILOG: Final = """\
examples:
  exec-server get build:/var/log/syslog
  exec-server get 'build:logs/*.gz' build:report.pdf
"""


def build_parser() -> CommandParser:
    parser = _build_parser("cp", "SOURCE... DESTINATION", _DESCRIPTION, _EPILOG)
    parser.description = f"{parser.description}{_LOCAL_PATHS}"
    return parser


def build_put_parser() -> CommandParser:
    return _build_parser("put", "SOURCE... TARGET:PATH", _PUT_DESCRIPTION, _PUT_EPILOG)


def build_get_parser() -> CommandParser:
    return _build_parser("get", "TARGET:PATH... [DESTINATION]", _GET_DESCRIPTION, _GET_EPILOG)


def _build_parser(name: str, operands: str, description: str, epilog: str) -> CommandParser:
    parser = PathParser(name, description, epilog)
    parser.usage = f"exec-server {name} [-a] [-p] [-q] [--sync] [--checksum] {operands}"
    parser.add_argument("paths", metavar="PATH", nargs="+", help=argparse.SUPPRESS)
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
    return with_access_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    return _copy_paths(arguments, arguments.paths)


def run_put(arguments: argparse.Namespace) -> int:
    are_remote = [parse_remote_path(text) is not None for text in arguments.paths]
    if any(are_remote[:-1]) or not are_remote[-1]:
        raise UsageError(
            "write local paths first and TARGET:PATH last; `get` copies to this machine"
        )
    return _copy_paths(arguments, arguments.paths)


def run_get(arguments: argparse.Namespace) -> int:
    are_remote = [parse_remote_path(text) is not None for text in arguments.paths]
    paths = (
        arguments.paths if len(are_remote) > 1 and not are_remote[-1] else [*arguments.paths, "."]
    )
    if not all(are_remote[: len(paths) - 1]):
        raise UsageError("write TARGET:PATH first and a local path last; `put` copies to a target")
    return _copy_paths(arguments, paths)


def _copy_paths(arguments: argparse.Namespace, paths: list[str]) -> int:
    from exec_server.cli.files.copier import copy

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
