"""`exec-server watch`: print the changes of files of a target."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from exec_server.cli.commands.access_flags import access_options, add_access_flags
from exec_server.cli.commands.command_parser import PATH_FORMS, CommandParser

if TYPE_CHECKING:
    from exec_server.cli.commands.remote_operands import Operand

_DESCRIPTION: Final = f"""\
Print the changes of a directory or file of a target, one line each, until Ctrl-C.

{PATH_FORMS}"""
_EPILOG: Final = """\
Each line has the kind of the change (created, modified, deleted) and the path. A line `overflow`
says that some changes are missing, because there were too many at once.

examples:
  exec-server watch -r build:src
  exec-server watch --json build:/var/log/syslog
"""


def build_parser() -> CommandParser:
    parser = CommandParser("watch", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("path", metavar="TARGET:PATH")
    parser.add_argument(
        "-r", "--recursive", action="store_true", help="also watch the directories below"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object for each change")
    add_access_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print changes until the directory is removed or a signal arrives; returns the exit code."""
    import json

    from exec_server.cli.commands.printing import print_text
    from exec_server.cli.commands.remote_operands import for_each_operand
    from exec_server.printable import printable

    async def watch(operand: Operand) -> None:
        files = operand.environment.files
        async with files.watch(operand.path, recursive=arguments.recursive) as changes:
            async for change in changes:
                if arguments.json:
                    print_text(json.dumps({"path": change.path, "kind": change.kind}) + "\n")
                else:
                    print_text(f"{change.kind} {printable(change.path)}".rstrip() + "\n")

    return for_each_operand([arguments.path], access_options(arguments), watch, needs_path=False)
