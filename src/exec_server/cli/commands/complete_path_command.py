"""`exec-server complete-path`: list remote paths for the completion scripts; hidden from people."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from exec_server.cli.commands.command_parser import CommandParser
from exec_server.cli.commands.printing import print_text
from exec_server.cli.commands.targets import RemotePath, find_target, parse_remote_path

if TYPE_CHECKING:
    from exec_server.client.results import Entry

# The time for connection and listing: a shell waits for it, with a key pressed.
COMPLETION_SECONDS: Final = 2.0
# More names than this do not help while typing.
MAX_PATHS: Final = 500

_DESCRIPTION: Final = """\
Print the paths of a target that begin with TARGET:PATH, one on each line, directories with a
slash. The completion scripts call it.
"""


def build_parser() -> CommandParser:
    parser = CommandParser("complete-path", description=_DESCRIPTION)
    parser.add_argument("word", metavar="TARGET:PATH")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print the paths; returns the exit code. Errors are not printed: a shell would show them."""
    from exec_server.cli.commands.errors import EXIT_FAILURE, CommandError, UsageError

    try:
        remote = parse_remote_path(arguments.word)
        if remote is None or remote.path is None:
            return EXIT_FAILURE
        target = find_target(remote.target)
    except UsageError:
        return EXIT_FAILURE
    if target.argv is not None:
        return EXIT_FAILURE  # a program such as ssh could ask for a password

    import asyncio

    from exec_server.cli.commands.connection import open_environment, run_until_signal
    from exec_server.errors import ExecServerError

    async def work() -> int:
        try:
            async with (
                asyncio.timeout(COMPLETION_SECONDS),
                open_environment(target, on_status=lambda _: None) as environment,
            ):
                entries = await environment.files.list(_split(remote.path or "")[0] or ".")
        except (CommandError, UsageError, ExecServerError, TimeoutError):
            return EXIT_FAILURE
        print_text("".join(f"{path}\n" for path in matching(remote, entries)))
        return 0

    return run_until_signal(work)


def _split(path: str) -> tuple[str, str]:
    """The directory with its slash, and the beginning of a name."""
    directory, slash, name = path.rpartition("/")
    if not slash and name.startswith("~"):
        return "~/", ""
    return directory + slash, name


def matching(remote: RemotePath, entries: list[Entry]) -> list[str]:
    """The entries of the directory of a word that continue it, as words."""
    directory, beginning = _split(remote.path or "")
    found = [
        f"{remote.target}:{directory}{entry.name}{'/' if entry.is_directory else ''}"
        for entry in entries
        if entry.name.startswith(beginning)
        and (beginning or not entry.name.startswith("."))
        and entry.name.isprintable()
    ]
    return sorted(found)[:MAX_PATHS]
