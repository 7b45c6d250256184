"""`exec-server kill`: end detached commands, or send them a signal."""

from __future__ import annotations

import argparse
import re
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
  exec-server kill -9 build web
"""


# -9, -HUP or -SIGHUP, as kill(1) takes them.
_SHORT_SIGNAL: Final = re.compile(r"-([0-9]{1,2}|[A-Z][A-Z0-9]+)")


class KillParser(CommandParser):
    """Takes a signal in the short form of kill(1) too."""

    def parse_words(self, words: list[str]) -> argparse.Namespace:
        if words and (short := _SHORT_SIGNAL.fullmatch(words[0])) is not None:
            words = [f"--signal={short[1]}", *words[1:]]
        return super().parse_words(words)


def _signal(text: str) -> str:
    from exec_server.client.linux_numbers import SIGNALS  # slow to import

    name = text.upper().removeprefix("SIG")
    if name not in SIGNALS.values() and not (text.isdecimal() and int(text) in SIGNALS):
        raise argparse.ArgumentTypeError(f"unknown signal `{text}`; examples are TERM, HUP and 9")
    return text


def build_parser() -> KillParser:
    parser = KillParser("kill", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("target", metavar="TARGET")
    parser.add_argument("names", metavar="NAME", nargs="+")
    parser.add_argument(
        "-s",
        "--signal",
        metavar="SIGNAL",
        type=_signal,
        help="send only this signal, with or without SIG; KILL also ends all descendants; "
        "as the first word also -SIGNAL",
    )
    add_access_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """End each command; returns the exit code."""
    target = find_target(arguments.target, access_options(arguments))

    from exec_server.cli.commands.connection import run_until_signal
    from exec_server.cli.commands.killing import kill_commands

    return run_until_signal(lambda: kill_commands(target, arguments.names, arguments.signal))
