"""`exec-server kill`: end detached commands, or send them a signal."""

from __future__ import annotations

import argparse
from typing import Final

from exec_server.cli.commands.access_flags import access_options, add_access_flags
from exec_server.cli.commands.command_parser import TARGET_FORMS, CommandParser
from exec_server.cli.commands.targets import find_target

_DESCRIPTION: Final = f"""\
End detached commands (`exec-server exec -d`): SIGTERM first, and SIGKILL to the command and all
its descendants if it has not ended after 5 seconds.

{TARGET_FORMS}"""
_EPILOG: Final = """\
examples:
  exec-server kill build web
  exec-server kill -s HUP build web worker-1
"""


def build_parser() -> CommandParser:
    parser = CommandParser("kill", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("target", metavar="TARGET")
    parser.add_argument("names", metavar="NAME", nargs="+")
    parser.add_argument(
        "-s",
        "--signal",
        metavar="SIGNAL",
        help="send only this signal, with or without SIG; KILL also ends all descendants",
    )
    add_access_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """End each command; returns the exit code."""
    target = find_target(arguments.target, access_options(arguments))

    from exec_server.cli.commands.connection import run_until_signal
    from exec_server.cli.commands.killing import kill_commands

    return run_until_signal(lambda: kill_commands(target, arguments.names, arguments.signal))
