"""`exec-server complete-name`: list detached commands for the completion scripts; hidden."""

from __future__ import annotations

import argparse
import re
from typing import Final

from exec_server.cli.commands.command_parser import CommandParser
from exec_server.cli.commands.complete_path_command import COMPLETION_SECONDS
from exec_server.cli.commands.printing import print_text
from exec_server.cli.commands.targets import find_target

_DESCRIPTION: Final = """\
Print the names of the detached commands of a target, one on each line. The completion scripts
call it.
"""


def build_parser() -> CommandParser:
    parser = CommandParser("complete-name", description=_DESCRIPTION)
    parser.add_argument("target", metavar="TARGET")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print the names; returns the exit code. Errors are not printed: a shell would show them."""
    from exec_server.cli.commands.errors import EXIT_FAILURE, CommandError, UsageError

    try:
        target = find_target(arguments.target)
    except UsageError:
        return EXIT_FAILURE
    if target.argv is not None:
        return EXIT_FAILURE  # it has no detached commands

    import asyncio

    from exec_server.cli.commands.connection import open_environment, run_until_signal
    from exec_server.errors import ExecServerError

    async def work() -> int:
        try:
            async with (
                asyncio.timeout(COMPLETION_SECONDS),
                open_environment(target, on_status=lambda _: None) as environment,
            ):
                listed = await environment.detached_processes()
        except (CommandError, UsageError, ExecServerError, TimeoutError):
            return EXIT_FAILURE
        names = sorted(each.name for each in listed if _is_name(each.name))
        print_text("".join(f"{name}\n" for name in names))
        return 0

    return run_until_signal(work)


def _is_name(text: str) -> bool:
    """Whether a server could have accepted this name; a shell must not see any other text."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text) is not None
