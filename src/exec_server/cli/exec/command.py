"""`exec-server exec` and `shell`: run a command, or a login shell, on a target."""

from __future__ import annotations

import argparse
import re
from typing import Final

from exec_server.cli.errors import UsageError
from exec_server.cli.parser import ArgumentParser, CommandParser, positive_seconds
from exec_server.cli.targets import TargetParser, chosen_target, with_access_flags
from exec_server.errors import printable

# The names that servers accept.
DETACHED_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def add_execution_flags(parser: ArgumentParser) -> None:
    """Add directory, environment, sandbox, user, escape character, and the access flags."""
    add_command_flags(parser)
    add_escape_flag(parser)
    with_access_flags(parser)


def add_command_flags(parser: ArgumentParser) -> None:
    """Add directory, environment, sandbox and user."""
    parser.add_argument(
        *("-w", "--cwd", "--workdir"),
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
        "--sandbox",
        metavar="POLICY",
        help="confine the command: read-only, workspace-write (the working directory and /tmp), "
        "or a JSON file as `exec-server sandbox run --policy` takes it (default: not confined)",
    )
    parser.add_argument(
        "-u",
        "--user",
        metavar="USER",
        help="run the command as this user of the machine, a name or a number; the server needs "
        "the rights of root",
    )


def add_escape_flag(parser: ArgumentParser) -> None:
    """Add the escape character, which `attach` has too."""
    parser.add_argument(
        "-e",
        "--escape",
        metavar="CHAR",
        type=_escape,
        default="~",
        help="on a terminal: the escape character, or none (default: ~)",
    )


def _escape(text: str) -> str | None:
    if text == "none":
        return None
    if "=" in text[1:]:  # a habit from other programs
        raise argparse.ArgumentTypeError("variables are given with --env; -e is --escape")
    if len(text) != 1 or not text.isascii() or not text.isprintable():
        raise ValueError(text)
    return text


_escape.__name__ = "escape character"  # argparse prints the name of the type


_DESCRIPTION: Final = """\
Run a command on a target, like ssh. The command gets stdin and the signals of exec-server,
which prints its stdout and stderr and exits with its exit code. The words of the command are
not interpreted by a shell. Options stand before TARGET; they are also read between TARGET and
the command, which begins at the first other word or after --. With -- and no TARGET before it,
the command runs on the default target, see below. Without COMMAND, the login shell of the server's
user is started, on a terminal if exec-server has one.
"""
_EPILOG: Final = """\
exit code:
  the exit code of the command, or 128 + N if signal N has killed it
  2     the arguments are invalid
  124   --timeout has expired
  125   the server refused to run the command, for example because of --sandbox
  126   the program or the working directory was found and could not be used
  127   the program does not exist
  255   there is no connection to the target, or the session was lost

signals:
  INT, TERM, HUP, QUIT, USR1 and USR2 are sent to the command; a second INT within 2 seconds
  kills it. Ctrl-Z stops the command together with exec-server, if the server supports it.

background children:
  What the command leaves running, with nohup or setsid too, is killed when it ends. Use -d for a
  command that goes on.

with -t, at the beginning of a line:
  ~.    end the command and leave         ~^Z   suspend exec-server
  ~?    list these escapes                ~~    send ~

with -d:
  The command goes on when exec-server has left, which prints its name. `exec-server ps`, `logs`,
  `attach` and `kill` use the name, for this and any other client of the target. It ends with the
  server, or by --max-lifetime or --idle-timeout.

examples:
  exec-server exec build make test
  exec-server exec -- make test                        on the target of EXEC_SERVER_TARGET
  exec-server exec -d --name web --cwd /src build npm run dev
  exec-server exec --sandbox workspace-write --cwd /src build make test
  exec-server exec -t --cwd /src build vim README.md
  tar c src | exec-server exec --cwd /srv build tar x
  exec-server exec ws://127.0.0.1:7700 -- sh -c 'echo $HOME; exit 3'
  exec-server exec 'stdio:ssh host exec-server --listen stdio' uname -a
"""


class ExecParser(TargetParser):
    """Parses options and TARGET; the command begins at the next word, or after `--`."""

    def parse_words(self, words: list[str]) -> argparse.Namespace:
        end, begin = self._find_command(words)
        arguments = self.parse_args(words[:end])
        arguments.argv = words[begin:]
        if end < begin and not arguments.argv:
            self.error("no command after `--`")
        if arguments.argv and not arguments.argv[0]:
            self.error("the name of the program is empty; is a variable of your shell unset?")
        return arguments

    def _find_command(self, words: list[str]) -> tuple[int, int]:
        has_target = False
        position = 0
        while position < len(words):
            word = words[position]
            if word == "--":
                return position, position + 1
            if word.startswith("-"):
                position += self._takes_next_word(word)
            elif has_target:
                return position, position
            else:
                has_target = True
            position += 1
        return len(words), len(words)

    def _takes_next_word(self, word: str) -> bool:
        if word.startswith("--"):
            return self._takes_value(word)
        for number, letter in enumerate(word[1:], 1):
            if self._takes_value(f"-{letter}"):
                return number == len(word) - 1  # otherwise the rest of the word is the value
        return False

    def _takes_value(self, option: str) -> bool:
        action = self._option_string_actions.get(option)
        return action is not None and action.nargs != 0


def build_parser() -> ExecParser:
    parser = ExecParser("exec", _DESCRIPTION, _EPILOG)
    parser.usage = (
        "exec-server exec [-t] [-d] [--cwd DIR] [--env K=V] [...] [TARGET] [--] [COMMAND...]"
    )
    parser.add_argument("target", metavar="TARGET", nargs="?")
    parser.add_argument(
        "-t", "--tty", action="store_true", help="run the command on a terminal (default: on pipes)"
    )
    parser.add_argument(
        "-n", "--no-stdin", action="store_true", help="give the command an empty stdin"
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=positive_seconds,
        help="kill the command after this time (default: no limit)",
    )
    add_execution_flags(parser)
    _add_detach_flags(parser)
    return parser


def _detached_name(text: str) -> str:
    if DETACHED_NAME.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(
            f"`{printable(text)}` is not a name of 1 to 64 letters, digits, dots, `-` and `_` that "
            "begins with a letter or digit"
        )
    return text


def _add_detach_flags(parser: ExecParser) -> None:
    group = parser.add_argument_group("detached commands")
    group.add_argument(
        "-d", "--detach", action="store_true", help="start the command, print its name, and leave"
    )
    group.add_argument(
        "--name",
        metavar="NAME",
        type=_detached_name,
        help="with -d: the name of the command (default: a new one)",
    )
    group.add_argument(
        "-i",
        "--interactive",
        action="store_true",
        help="with -d: keep stdin open for `exec-server attach` (default: empty; -t implies it); "
        "without -d stdin is always open",
    )
    group.add_argument(
        "--max-lifetime",
        metavar="SECONDS",
        type=positive_seconds,
        help="with -d: end the command after this time (default: no limit)",
    )
    group.add_argument(
        "--idle-timeout",
        metavar="SECONDS",
        type=positive_seconds,
        help="with -d: end the command after this time without output and without a client "
        "(default: no limit)",
    )


def run(arguments: argparse.Namespace) -> int:
    _check_detach(arguments)
    target = chosen_target(arguments)
    if arguments.detach and target.argv is not None:
        raise UsageError(
            f"{target.label}: the server of a stdio target ends with the connection, and a "
            "detached command with it; --detach needs a server that goes on"
        )
    from exec_server.cli.exec import execution

    return (execution.start_detached if arguments.detach else execution.execute)(arguments, target)


def _check_detach(arguments: argparse.Namespace) -> None:
    if not arguments.detach:
        for flag in ("name", "max_lifetime", "idle_timeout"):
            if getattr(arguments, flag):
                raise UsageError(f"--{flag.replace('_', '-')} needs --detach")
    elif not arguments.argv:
        raise UsageError("--detach needs a COMMAND")
    elif arguments.timeout is not None:
        raise UsageError("with --detach use --max-lifetime instead of --timeout")


_SHELL_DESCRIPTION: Final = """\
Open the login shell of the server's user, like ssh: on a terminal if stdin and stdout are one,
otherwise it reads its commands from stdin. It starts in the server's working directory, unless
--cwd names another.
"""
_SHELL_EPILOG: Final = """\
Exit codes, signals and escapes (~. to leave) are those of `exec-server exec`.

examples:
  exec-server shell build
  exec-server shell --cwd /src ws://127.0.0.1:7700
  exec-server shell build < script.sh
"""


def build_shell_parser() -> CommandParser:
    parser = TargetParser("shell", _SHELL_DESCRIPTION, _SHELL_EPILOG)
    parser.add_argument("target", metavar="TARGET", nargs="?")
    add_execution_flags(parser)
    # `exec` without a command.
    parser.set_defaults(argv=[], tty=False, no_stdin=False, timeout=None)
    parser.set_defaults(detach=False, name=None, interactive=False)
    parser.set_defaults(max_lifetime=None, idle_timeout=None)
    return parser


run_shell = run
