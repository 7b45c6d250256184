"""`exec-server grep`: search the files of a target."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from exec_server.cli.commands.access_flags import access_options, add_access_flags
from exec_server.cli.commands.command_parser import PATH_FORMS, CommandParser
from exec_server.cli.commands.errors import EXIT_USAGE

if TYPE_CHECKING:
    from exec_server.cli.commands.remote_operands import Operand
    from exec_server.client.results import GrepMatch

_DESCRIPTION: Final = f"""\
Print the lines below directories, or in files, of a target that match a regular expression.
Binary files are skipped. The exit code is 1 if no line matches.

{PATH_FORMS}"""
_EPILOG: Final = """\
examples:
  exec-server grep 'import +os' build:src
  exec-server grep -iF -g '*.{c,h}' -C 2 'buffer overflow' build:
  exec-server grep --json main build:src | jq .path
"""


def build_parser() -> CommandParser:
    parser = CommandParser("grep", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("pattern", metavar="PATTERN")
    parser.add_argument("paths", metavar="TARGET:PATH", nargs="+")
    parser.add_argument("-i", "--ignore-case", action="store_true", help="ignore case")
    parser.add_argument(
        "-F", "--fixed-strings", action="store_true", help="PATTERN is a plain text"
    )
    for flag, name, text in (
        ("-A", "after", "after"),
        ("-B", "before", "before"),
        ("-C", "context", "around"),
    ):
        parser.add_argument(
            flag,
            f"--{name}",
            type=int,
            default=0,
            metavar="N",
            help=f"also print N lines {text} it",
        )
    parser.add_argument(
        "-g", "--glob", metavar="GLOB", help="search only files that match, as '*.py'"
    )
    parser.add_argument(
        "--exclude",
        metavar="GLOB",
        default=".git",
        help="skip files and directories (default: .git)",
    )
    parser.add_argument(
        "-m", "--max-count", type=int, default=1000, metavar="N", help="stop after N matches (1000)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object for each match")
    add_access_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Search each operand; returns the exit code of grep."""
    from exec_server.cli.commands.printing import print_status, print_text
    from exec_server.cli.commands.remote_operands import for_each_operand

    show = _json_line if arguments.json else _text_lines
    count = 0

    async def search(operand: Operand) -> None:
        nonlocal count
        found = await operand.environment.files.grep(
            arguments.pattern,
            operand.path,
            literal=arguments.fixed_strings,
            ignore_case=arguments.ignore_case,
            glob=arguments.glob,
            exclude=arguments.exclude or None,
            before=max(arguments.before, arguments.context),
            after=max(arguments.after, arguments.context),
            limit=arguments.max_count,
        )
        count += len(found)
        print_text("".join(show(operand, match) for match in found))
        if found.truncated:
            print_status(f"{operand.label}: there may be further matches; see -m, -g and --exclude")

    failed = for_each_operand(arguments.paths, access_options(arguments), search, needs_path=False)
    if failed:
        return EXIT_USAGE if failed == 1 else failed
    return 0 if count else 1


def _json_line(operand: Operand, match: GrepMatch) -> str:
    import json

    members = {name: getattr(match, name) for name in ("path", "line", "column", "text")}
    return (
        json.dumps(
            {"operand": operand.label, **members, "before": match.before, "after": match.after}
        )
        + "\n"
    )


def _text_lines(operand: Operand, match: GrepMatch) -> str:
    """PATH:LINE:TEXT as grep prints it, with `-` for the lines around a match."""
    from exec_server.printable import printable

    first = match.line - len(match.before)
    lines = [
        *((first + index, "-", text) for index, text in enumerate(match.before)),
        (match.line, ":", match.text),
        *((match.line + 1 + index, "-", text) for index, text in enumerate(match.after)),
    ]
    path = printable(match.path)
    tab = "\t"
    shown = "".join(
        f"{path}{mark}{number}{mark}{printable(text, keep=tab)}\n" for number, mark, text in lines
    )
    return f"{shown}--\n" if len(lines) > 1 else shown
