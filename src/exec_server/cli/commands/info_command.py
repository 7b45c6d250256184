"""`exec-server info`: version, directories, shell and capabilities of a target."""

from __future__ import annotations

import argparse
from typing import Final

from exec_server.cli.commands.access_flags import access_options, add_access_flags
from exec_server.cli.commands.command_parser import TARGET_FORMS, CommandParser
from exec_server.cli.commands.printing import json_text, print_text
from exec_server.cli.commands.targets import find_target

_DESCRIPTION: Final = f"""\
Show version, directories, shell and capabilities of a target, and whether its sandbox works.

{TARGET_FORMS}"""
_EPILOG: Final = """\
examples:
  exec-server info build
  exec-server info --json ws://127.0.0.1:7700 | python3 -m json.tool
"""


def build_parser() -> CommandParser:
    parser = CommandParser("info", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("target", metavar="TARGET")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    add_access_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print the description of the target; returns the exit code."""
    target = find_target(arguments.target, access_options(arguments))

    from exec_server.cli.commands.connection import open_environment, run_until_signal
    from exec_server.cli.commands.target_facts import as_text, collect

    async def work() -> int:
        async with open_environment(target) as environment:
            facts = await collect(target, environment)
        print_text(json_text(facts) if arguments.json else as_text(facts))
        return 0

    return run_until_signal(work)
