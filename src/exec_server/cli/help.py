"""`exec-server help` and `version`: the list of commands, the help of one, the version."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Final

from exec_server import __version__
from exec_server.cli.errors import UsageError
from exec_server.cli.parser import TARGET_FORMS, CommandParser
from exec_server.cli.streams import print_text
from exec_server.cli.table import COMMANDS, GROUPS, unknown_command

if TYPE_CHECKING:
    from pathlib import Path

# Digits of a commit: enough to find it in this project for ever.
COMMIT_DIGITS: Final = 12

OVERVIEW_USAGE: Final = """\
usage: exec-server COMMAND ...
       exec-server [FLAG ...]     the server, as `exec-server serve`
"""
OVERVIEW_DESCRIPTION: Final = """\
Run commands, terminals and file operations on other machines, or serve them on this one for a
coding agent.
"""
_OVERVIEW_EPILOG: Final = """\
examples:
  exec-server serve --listen ws://127.0.0.1:7700   on the machine to work on
  exec-server exec ws://127.0.0.1:7700 uname -a
  exec-server shell ws://127.0.0.1:7700
  exec-server cp report.pdf ws://127.0.0.1:7700:/tmp/

Flags, exit codes and more examples of a command: exec-server COMMAND --help
"""


def overview_text() -> str:
    """The whole text, with a line for each command."""
    return "\n".join(
        [
            OVERVIEW_USAGE,
            OVERVIEW_DESCRIPTION,
            *map(_group_list, GROUPS),
            TARGET_FORMS,
            _OVERVIEW_EPILOG,
        ]
    )


def _group_list(group: str) -> str:
    width = max(len(command.name) for command in COMMANDS.values() if command.is_visible)
    members = [command for command in COMMANDS.values() if command.group == group]
    return f"{group}:\n" + "".join(f"  {each.name:{width}}   {each.summary}\n" for each in members)


_DESCRIPTION: Final = """\
List the commands, or show the help of one: the same as `exec-server COMMAND --help`.
"""
_EPILOG: Final = """\
examples:
  exec-server help
  exec-server help exec
  exec-server help sandbox run
"""


def build_parser() -> CommandParser:
    parser = CommandParser("help", description=_DESCRIPTION, epilog=_EPILOG)
    parser.usage = "exec-server help [COMMAND]"
    parser.add_argument("words", metavar="COMMAND", nargs=argparse.REMAINDER)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print the help; returns the exit code. Raises UsageError for an unknown command."""
    if not arguments.words:
        print_text(overview_text())
        return 0
    name, *rest = arguments.words
    if name not in COMMANDS:
        raise UsageError(unknown_command(name))
    parser = COMMANDS[name].build_parser()
    if isinstance(parser, CommandParser) and parser.verbs:
        if rest and " ".join(rest) not in parser.verbs:
            raise UsageError(f"`exec-server {name}` has no command `{' '.join(rest)}`")
        parser.parse_words([*rest, "--help"])
    if rest and COMMANDS[name].is_client:  # the others get the words of `COMMAND ... --help` too
        raise UsageError(f"`exec-server {name}` has no command `{rest[0]}`")
    parser.parse_args([*rest, "--help"])
    return 0


_VERSION_DESCRIPTION: Final = """\
Print the version of exec-server, and in a checkout its commit. `exec-server info TARGET` shows the
version of a server.
"""
_VERSION_EPILOG: Final = """\
examples:
  exec-server version                              name and version
  exec-server version | cut -d ' ' -f 2            the version alone
"""


def build_version_parser() -> CommandParser:
    return CommandParser("version", description=_VERSION_DESCRIPTION, epilog=_VERSION_EPILOG)


def run_version(_: argparse.Namespace) -> int:
    """Print name, version and commit; returns the exit code."""
    commit = _checkout_commit()
    print_text(f"exec-server {__version__}{f' (commit {commit})' if commit else ''}\n")
    return 0


def _checkout_commit() -> str:
    """The commit of the checkout with this package; empty if the package is installed.

    The files of Git are read, because its program may be missing.
    """
    from pathlib import Path

    root = Path(__file__).parents[3]
    try:
        directory = root / ".git"
        if directory.is_file():  # the checkout is a worktree
            directory = root / directory.read_text().removeprefix("gitdir:").strip()
        common = directory / "commondir"
        shared = directory / common.read_text().strip() if common.exists() else directory
        name = (directory / "HEAD").read_text().strip()
        if name.startswith("ref: "):
            name = _referenced_commit(shared, name.removeprefix("ref: "))
    except (OSError, ValueError):
        return ""
    return name[:COMMIT_DIGITS] if re.fullmatch(r"[0-9a-f]{40,64}", name) else ""


def _referenced_commit(directory: Path, name: str) -> str:
    """The commit of a branch; empty if it has none."""
    if (directory / name).exists():
        return (directory / name).read_text().strip()
    lines = (directory / "packed-refs").read_text().splitlines()
    return next((line.partition(" ")[0] for line in lines if line.endswith(f" {name}")), "")
