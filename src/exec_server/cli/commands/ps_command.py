"""`exec-server ps`: list the detached commands of a target."""

from __future__ import annotations

import argparse
from typing import Final

from exec_server.cli.commands.access_flags import access_options, add_access_flags
from exec_server.cli.commands.command_parser import TARGET_FORMS, CommandParser
from exec_server.cli.commands.targets import find_target

_DESCRIPTION: Final = f"""\
List the detached commands of a target, which `exec-server exec -d` has started, also those of
other clients. Commands that have ended are listed for an hour.

{TARGET_FORMS}"""
_EPILOG: Final = """\
examples:
  exec-server ps build
  exec-server ps --json ws://127.0.0.1:7700
"""


def build_parser() -> CommandParser:
    parser = CommandParser("ps", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("target", metavar="TARGET")
    parser.add_argument("--json", action="store_true", help="print a JSON array instead of a table")
    add_access_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print the list; returns the exit code."""
    target = find_target(arguments.target, access_options(arguments))

    from exec_server.cli.commands.connection import open_environment, run_until_signal
    from exec_server.cli.commands.detached_commands import as_json, as_table
    from exec_server.cli.commands.printing import print_text

    async def work() -> int:
        async with open_environment(target) as environment:
            listed = await environment.detached_processes()
        print_text(as_json(listed) if arguments.json else as_table(listed))
        return 0

    return run_until_signal(work)
