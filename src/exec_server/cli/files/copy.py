"""`exec-server cp`, `put` and `get`: copy files and trees to, from and between targets."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Final

from exec_server.cli.errors import UsageError
from exec_server.cli.parser import CommandParser
from exec_server.cli.targets import PathParser, access_options, parse_remote_path, with_access_flags

if TYPE_CHECKING:
    from exec_server.cli.files.copier import CopyFlags

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

A PATTERN is one of .gitignore, for each source: node_modules/, *.pyc, /build, !keep.pyc. The last
one that matches decides. Within and below excluded directories nothing is listed or copied.

examples:
  exec-server cp report.pdf build:/srv/
  exec-server cp build:/var/log/syslog .
  exec-server cp report.pdf :/srv/                 to the target of EXEC_SERVER_TARGET
  exec-server cp src docs build:project/           two trees into one directory
  exec-server cp ws://127.0.0.1:7700:/etc/hosts /tmp/hosts
  exec-server cp 'build:logs/*.gz' .               a pattern on the target
  exec-server cp --exclude-vcs --exclude node_modules/ app build:
  exec-server cp -n --gitignore --sync --delete app/. build:app    what would be done
  tar c src | exec-server cp - build:src.tar       stdin; stdout is - as the destination
"""
_PUT_DESCRIPTION: Final = """\
Copy files and directories of this machine to a target: a short form of cp.
"""
_PUT_EPILOG: Final = """\
examples:
  exec-server put report.pdf build:/srv/
  exec-server put src docs build:project/
  exec-server put --gitignore --exclude-vcs --sync --delete . build:app
"""
_GET_DESCRIPTION: Final = """\
Copy files and directories of a target to this machine: a short form of cp. Without a
destination they are copied into the current directory.
"""
_GET_EPILOG: Final = """\
examples:
  exec-server get build:/var/log/syslog
  exec-server get 'build:logs/*.gz' build:report.pdf
  exec-server get --exclude '*.tmp' build:results
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
    parser.usage = f"exec-server {name} [-anpqv] [--sync] [--delete] [--exclude PATTERN] {operands}"
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
    parser.add_argument(
        "--delete",
        action="store_true",
        help="delete from the copy what the source has not; with --sync or --checksum",
    )
    parser.add_argument(
        *("-n", "--dry-run"),
        action="store_true",
        help="print what would be done, and change nothing",
    )
    parser.add_argument(
        *("-v", "--verbose"), action="store_true", help="print each file that is copied or deleted"
    )
    _add_exclusions(parser)
    return with_access_flags(parser)


def _add_exclusions(parser: CommandParser) -> None:
    parser.add_argument(
        "--exclude",
        metavar="PATTERN",
        action="append",
        default=[],
        type=lambda text: [text],
        help="leave out what matches; may be repeated",
    )
    parser.add_argument(
        "--exclude-from",
        metavar="FILE",
        dest="exclude",
        action="append",
        type=_read_patterns,
        help="leave out what matches a line of a file",
    )
    parser.add_argument(
        "--exclude-vcs",
        action="store_true",
        help="leave out .git, .hg, .svn, .jj, _darcs, CVS and .bzr",
    )
    parser.add_argument(
        "--gitignore",
        action="store_true",
        help="leave out what the .gitignore files of the source name",
    )


def _read_patterns(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
            return file.read().splitlines()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None


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

    return copy(paths, access_options(arguments), copy_flags(arguments))


def copy_flags(arguments: argparse.Namespace) -> CopyFlags:
    """The flags of a copy; raises UsageError."""
    from exec_server.cli.files.copier import CopyFlags

    sync = "time" if arguments.sync else None
    if arguments.checksum:
        sync = "checksum"
    if arguments.delete and sync is None:
        raise UsageError("--delete needs --sync or --checksum")
    options: dict[str, Any] = {
        "keep_times": arguments.preserve or arguments.archive or sync is not None,
        "sync": sync,
        "exclude": [pattern for patterns in arguments.exclude for pattern in patterns],
        "exclude_vcs": arguments.exclude_vcs,
        "gitignore": arguments.gitignore,
        "delete": arguments.delete,
        "dry_run": arguments.dry_run,
    }
    return CopyFlags(options, is_quiet=arguments.quiet, is_verbose=arguments.verbose)
