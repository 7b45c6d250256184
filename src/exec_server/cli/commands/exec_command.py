"""`exec-server exec`: run a command on a server."""

from __future__ import annotations

import argparse
from typing import Final

from exec_server.cli.argument_parser import positive_seconds
from exec_server.cli.commands.access_flags import access_options, add_access_flags
from exec_server.cli.commands.command_parser import TARGET_FORMS, CommandParser
from exec_server.cli.commands.errors import EXIT_EXEC_FAILED
from exec_server.cli.commands.targets import find_target

_DESCRIPTION: Final = f"""\
Run a command on a target, like ssh. The command gets stdin and the signals of exec-server,
which prints its stdout and stderr and exits with its exit code. The words after -- are not
interpreted by a shell. Without COMMAND, the login shell of the server's user is started, on
a terminal if exec-server has one.

{TARGET_FORMS}"""
_EPILOG: Final = """\
exit code:
  the exit code of the command, or 128 + N if signal N has killed it
  124   --timeout has expired
  255   the command could not be run, the session was lost, or the arguments are invalid

signals:
  INT, TERM, HUP, QUIT, USR1 and USR2 are sent to the command; a second INT within 2 seconds
  kills it. Ctrl-Z stops the command together with exec-server, if the server supports it.

with -t, at the beginning of a line:
  ~.    end the command and leave         ~^Z   suspend exec-server
  ~?    list these escapes                ~~    send ~

examples:
  exec-server exec build -- make test
  exec-server exec -t build                        a shell
  exec-server exec -t --cwd /src build -- vim README.md
  tar c src | exec-server exec --cwd /srv build -- tar x
  exec-server exec ws://127.0.0.1:7700 -- sh -c 'echo $HOME; exit 3'
  exec-server exec 'stdio:ssh host exec-server --listen stdio' -- uname -a
"""


class ExecParser(CommandParser):
    """Parses the words before the first `--`; the words after it are the command."""

    usage_exit_code = EXIT_EXEC_FAILED

    def parse_words(self, words: list[str]) -> argparse.Namespace:
        separator = words.index("--") if "--" in words else len(words)
        arguments = self.parse_args(words[:separator])
        arguments.argv = words[separator + 1 :]
        if arguments.extra:
            word = arguments.extra[0]
            self.error(f"unexpected argument `{word}`; the command comes after `--`")
        if separator < len(words) and not arguments.argv:
            self.error("no command after `--`")
        return arguments


def build_parser() -> ExecParser:
    parser = ExecParser("exec", description=_DESCRIPTION, epilog=_EPILOG)
    parser.usage = "exec-server exec [-t] [-n] [--cwd DIR] [--env K=V] [...] TARGET [-- COMMAND...]"
    parser.add_argument("target", metavar="TARGET")
    # The default makes it optional. Words are collected for the error in `parse_words`.
    parser.add_argument("extra", nargs="*", default=[], help=argparse.SUPPRESS)
    parser.add_argument(
        "-t", "--tty", action="store_true", help="run the command on a terminal (default: on pipes)"
    )
    parser.add_argument(
        "-n", "--no-stdin", action="store_true", help="give the command an empty stdin"
    )
    parser.add_argument(
        "--cwd",
        metavar="DIR",
        help="working directory of the command (default: that of the server)",
    )
    parser.add_argument(
        "--env",
        metavar="K=V",
        action="append",
        default=[],
        help="add a variable to the server's environment; K alone copies the local value; "
        "may be repeated",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=positive_seconds,
        help="kill the command after this time (default: no limit)",
    )
    parser.add_argument(
        "-e",
        "--escape",
        metavar="CHAR",
        type=_escape,
        default="~",
        help="with -t: the escape character, or none (default: ~)",
    )
    add_access_flags(parser)
    return parser


def _escape(text: str) -> str | None:
    if text == "none":
        return None
    if len(text) != 1 or not text.isascii() or not text.isprintable():
        raise ValueError(text)
    return text


_escape.__name__ = "escape character"  # argparse prints the name of the type


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    target = find_target(arguments.target, access_options(arguments))

    from exec_server.cli.commands.execution import execute

    return execute(arguments, target)
