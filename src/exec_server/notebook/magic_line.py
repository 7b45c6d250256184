"""Parses the line of a `%remote` or `%%remote` magic: options, TARGET, then a shell command."""

from __future__ import annotations

import argparse
import keyword
import re
import shlex
from typing import Final, NoReturn

from exec_server.cli.errors import UsageError
from exec_server.cli.exec.command import add_command_flags
from exec_server.cli.parser import TARGET_FORMS, ArgumentParser, positive_seconds
from exec_server.cli.targets import with_access_flags

_DESCRIPTION: Final = f"""\
Run shell commands on another machine and show their output while they run:

  %%remote build             all lines of the cell
  %remote build make test    the rest of the line
  %remote : make test        … on the target of EXEC_SERVER_TARGET

The connection stays open for further cells, until %remote_close or the end of the kernel.
Interrupting the kernel kills the command.

{TARGET_FORMS}"""

# A word of a shell. Behind TARGET a quote need not have its end.
_WORD: Final = re.compile(r"""(?:[^\s'"\\]|\\.|'[^']*'|"(?:[^"\\]|\\.)*"|['"\\])+""")


class HelpShown(Exception):
    """The line asked for help, and got it."""


class _MagicParser(ArgumentParser):
    """A parser that raises UsageError and HelpShown instead of ending the kernel."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; %remote? lists the options")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise HelpShown


def parse_cell_line(line: str) -> argparse.Namespace:
    """The line of a cell magic; raises UsageError or HelpShown."""
    arguments = _parser("%%remote").parse_args(split_words(line))
    _check(arguments)
    return arguments


def parse_command_line(line: str) -> argparse.Namespace:
    """The line of a line magic, with the text for the shell as `text`; raises the same."""
    found = list(_WORD.finditer(line))
    parser = _parser("%remote")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a text for the shell")
    arguments = parser.parse_args([_unquoted(word[0]) for word in found])
    if not arguments.command:
        raise UsageError("no command behind TARGET; %%remote TARGET runs the lines of its cell")
    if arguments.command[0].startswith("--"):
        raise UsageError(f"options belong before TARGET: {arguments.command[0]}")
    _check(arguments)
    arguments.text = line[found[-len(arguments.command)].start() :]
    return arguments


def split_words(line: str) -> list[str]:
    """The words of a line, without their quotes."""
    return [_unquoted(word) for word in _WORD.findall(line)]


def usage() -> str:
    """The help text of both magics."""
    return _parser("%%remote").format_help()


def _parser(magic: str) -> _MagicParser:
    parser = _MagicParser(magic, description=_DESCRIPTION)
    parser.add_argument("target", metavar="TARGET", nargs="?")
    add_command_flags(parser)
    parser.add_argument(
        "--shell",
        metavar="PROGRAM",
        default="bash",
        help="program that gets the text after -c, such as sh or python3 (default: bash)",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=positive_seconds,
        help="kill the command after this time (default: none)",
    )
    parser.add_argument(
        "--tty", action="store_true", help="give the command a terminal, so that programs colour"
    )
    parser.add_argument("-o", "--out", metavar="NAME", help="variable for the Result")
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="do not show the output, which -o keeps"
    )
    parser.add_argument(
        "--no-raise",
        "--no-raise-error",
        action="store_true",
        help="go on after an exit code other than 0, which _exit_code holds (default: an error)",
    )
    parser.add_argument(
        "--background",
        "--bg",
        action="store_true",
        help="start the command and go on; the variable of -o holds the Process",
    )
    return with_access_flags(parser)


def _check(arguments: argparse.Namespace) -> None:
    if arguments.out is not None and not (
        arguments.out.isidentifier() and not keyword.iskeyword(arguments.out)
    ):
        raise UsageError(f"-o {arguments.out}: not a name of a variable")
    if arguments.background and arguments.out is None:
        raise UsageError("--background needs -o NAME, the variable for the process")
    if arguments.background and arguments.timeout is not None:
        raise UsageError("--background and --timeout exclude each other")


def _unquoted(word: str) -> str:
    try:
        return "".join(shlex.split(word))
    except ValueError:  # a quote without its end
        return word
