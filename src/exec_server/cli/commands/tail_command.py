"""`exec-server tail`: print the end of files of a target, and what is appended to them."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Final

from exec_server.cli.commands.access_flags import access_options, add_access_flags
from exec_server.cli.commands.command_parser import PATH_FORMS, CommandParser
from exec_server.cli.commands.errors import UsageError

# -5, as tail(1) takes it.
_SHORT_COUNT: Final = re.compile(r"-([0-9]+)")

if TYPE_CHECKING:
    from exec_server.cli.commands.remote_operands import Operand

_DESCRIPTION: Final = f"""\
Print the last lines of files of a target; with -f also the lines that are appended later, until
Ctrl-C. A file that is replaced or truncated is read from its beginning. Several files get headings.

{PATH_FORMS}"""
_EPILOG: Final = """\
examples:
  exec-server tail build:/var/log/syslog
  exec-server tail -n 100 -f build:server.log
  exec-server tail -n +2 build:table.csv           all but the first line
"""


class TailParser(CommandParser):
    """Takes a number of lines in the short form of tail(1) too."""

    def parse_words(self, words: list[str]) -> argparse.Namespace:
        if words and (short := _SHORT_COUNT.fullmatch(words[0])) is not None:
            words = [f"--lines={short[1]}", *words[1:]]
        return super().parse_words(words)


def _first_or_count(text: str) -> tuple[int | None, int]:
    """The first line of +N, and None; or None, and the number of the last lines."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError("the number of lines must not be negative")
    return (max(number, 1), 0) if text.startswith("+") else (None, number)


_first_or_count.__name__ = "number of lines"  # argparse prints the name of the type


def build_parser() -> CommandParser:
    parser = TailParser("tail", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("paths", metavar="TARGET:PATH", nargs="+")
    parser.add_argument(
        "-n",
        "--lines",
        type=_first_or_count,
        default=(None, 10),
        metavar="N",
        help="print the last N lines (default: 10), or with +N all from line N on; as the first "
        "word also -N",
    )
    parser.add_argument(
        *("-f", "-F", "--follow"), action="store_true", help="wait for further lines of one file"
    )
    add_access_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print the end of each operand; returns the exit code."""
    from exec_server.cli.commands.remote_operands import for_each_operand
    from exec_server.cli.commands.tailing import Tail
    from exec_server.printable import printable

    if arguments.follow and len(arguments.paths) > 1:
        raise UsageError("-f follows one file")

    first, count = arguments.lines
    has_headings = len(arguments.paths) > 1
    gap = ""

    async def print_end(operand: Operand) -> None:
        nonlocal gap
        tail = Tail(operand)
        heading = (f"{gap}==> {printable(operand.path)} <==\n" if has_headings else "").encode()
        if first is None:
            await tail.print_end(count, heading)
        else:
            await tail.print_from(first, heading)
        gap = "\n"
        if arguments.follow:
            await tail.follow()

    return for_each_operand(arguments.paths, access_options(arguments), print_end)
