"""`exec-server ls`: list directories and files of a target."""

from __future__ import annotations

import argparse
from typing import Final

from exec_server.cli.commands.access_flags import access_options, add_access_flags
from exec_server.cli.commands.command_parser import PATH_FORMS, CommandParser

_DESCRIPTION: Final = f"""\
List directories and files of a target. A path may be a pattern with *, ?, [...], {{a,b}} and **;
quote it for your shell.

{PATH_FORMS}"""
_EPILOG: Final = """\
examples:
  exec-server ls build:                            the server's working directory
  exec-server ls -l build:/srv ws://127.0.0.1:7700:/tmp
  exec-server ls -l 'build:logs/*.gz'              a pattern on the target
  exec-server ls --json build: | jq '.[].path'
"""


class LsParser(CommandParser):
    """-h is that of ls(1), except alone."""

    def parse_words(self, words: list[str]) -> argparse.Namespace:
        return super().parse_words(["--help"] if words == ["-h"] else words)


def build_parser() -> CommandParser:
    parser = LsParser("ls", description=_DESCRIPTION, epilog=_EPILOG, conflict_handler="resolve")
    parser.add_argument("paths", metavar="TARGET:PATH", nargs="+")
    parser.add_argument(
        "-l", "--long", action="store_true", help="also show kind, size and modification time"
    )
    parser.add_argument(
        "-a", "--all", action="store_true", help="also show names that begin with a dot"
    )
    parser.add_argument(
        *("-h", "--human-readable"),
        action="store_true",
        help="with -l: print sizes as 1.5 MiB; -h alone prints this help",
    )
    parser.add_argument(
        "-1", dest="one", action="store_true", help="no effect: each name has a line of its own"
    )
    parser.add_argument(
        "--json", action="store_true", help="print a JSON array with kind, size and time of each"
    )
    add_access_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """List each operand; returns the exit code."""
    from exec_server.cli.commands.listing import JsonLister, Lister
    from exec_server.cli.commands.patterns import is_pattern
    from exec_server.cli.commands.printing import json_text, print_text
    from exec_server.cli.commands.remote_operands import for_each_operand

    if arguments.json:
        collector = JsonLister(shows_all=arguments.all)
        code = for_each_operand(
            arguments.paths,
            access_options(arguments),
            collector,
            needs_path=False,
            takes_patterns=True,
        )
        print_text(json_text(collector.entries))
        return code
    lister = Lister(
        is_long=arguments.long,
        shows_all=arguments.all,
        has_units=arguments.human_readable,
        has_headings=len(arguments.paths) > 1 or any(map(is_pattern, arguments.paths)),
    )
    return for_each_operand(
        arguments.paths,
        access_options(arguments),
        lister,
        needs_path=False,
        takes_patterns=True,
    )
