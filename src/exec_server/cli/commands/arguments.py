"""The arguments of the client commands: one parser each, also the source of shell completion."""

from __future__ import annotations

import argparse
from typing import Final

from exec_server.cli.argument_parser import ArgumentParser, positive_seconds
from exec_server.cli.commands.errors import EXIT_EXEC_FAILED, EXIT_USAGE, UsageError
from exec_server.cli.commands.targets import AccessOptions

SHELLS: Final = ("bash", "zsh", "fish")

_TARGETS: Final = """\
targets:
  ws://HOST:PORT, wss://HOST        a listening server
  'stdio:COMMAND WORDS'             a program that serves on stdin and stdout
  relay:https://REGISTRY/ENVIRONMENT  an environment of a registry
  NAME                              the table [NAME] of ~/.config/exec-server/targets.toml;
                                    `exec-server targets` lists them
"""
_PATHS: Final = """\
paths:
  NAME:PATH                         on a named target
  ws://HOST:PORT:/PATH              on any other target; the path begins with / or ~
  A relative path starts at the server's working directory, ~ is the home of its user.
"""
_EXEC: Final = f"""\
Run a command on a target, like ssh. The command gets stdin and the signals of exec-server,
which prints its stdout and stderr and exits with its exit code. The words after -- are not
interpreted by a shell. Without COMMAND, the login shell of the server's user is started, on
a terminal if exec-server has one.

{_TARGETS}"""
_EXEC_EPILOG: Final = """\
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
_CP: Final = f"""\
Copy files and directories to, from or between targets. Directories are copied recursively,
with modes, symlinks and empty directories. A file appears under its final name only when it
is complete.

{_PATHS}  A path without a target, or with a / before its first colon, is local: ./a:b
"""
_CP_EPILOG: Final = """\
Several sources require an existing directory as destination. If the destination is an existing
directory, each source is copied into it under its own name. The interrupted copy of a large file
is resumed by the next one if the source has not changed.

examples:
  exec-server cp report.pdf build:/srv/
  exec-server cp build:/var/log/syslog .
  exec-server cp src docs build:project/           two trees into one directory
  exec-server cp ws://127.0.0.1:7700:/etc/hosts /tmp/hosts
"""
_LS: Final = f"""\
List directories and files of a target.

{_PATHS}"""
_LS_EPILOG: Final = """\
examples:
  exec-server ls build:                            the server's working directory
  exec-server ls -l build:/srv ws://127.0.0.1:7700:/tmp
"""
_CAT: Final = f"""\
Print files of a target to stdout.

{_PATHS}"""
_CAT_EPILOG: Final = """\
examples:
  exec-server cat build:/etc/os-release
  exec-server cat build:data.tar.gz | tar tz
"""
_RM: Final = f"""\
Remove files and empty directories of a target, and with -r whole trees.

{_PATHS}"""
_RM_EPILOG: Final = """\
examples:
  exec-server rm build:/tmp/old.log
  exec-server rm -rf build:/tmp/scratch
"""
_INFO: Final = f"""\
Show version, directories, shell and capabilities of a target, and whether its sandbox works.

{_TARGETS}"""
_INFO_EPILOG: Final = """\
examples:
  exec-server info build
  exec-server info --json ws://127.0.0.1:7700 | python3 -m json.tool
"""
_LIST: Final = """\
List the targets of ~/.config/exec-server/targets.toml (or $XDG_CONFIG_HOME/exec-server/
targets.toml). Create the file yourself; each table defines one target:

  [build]
  url = "wss://build.example.net:7700"
  token_file = "build.token"           # or token_env; relative to targets.toml
  ca_file = "build-ca.pem"             # root certificate of a private authority

  [lab]
  stdio = "ssh lab exec-server --listen stdio"

  [behind-nat]
  registry = "https://registry.example.net"
  environment_id = "build-7"
  token_env = "REGISTRY_TOKEN"
  executor_key = "sha256:…"            # accept this key only: the registry need not be trusted
"""
_COMPLETION: Final = """\
Print a script with which a shell completes commands, flags and names of targets:

  bash   source <(exec-server completion bash)                 in ~/.bashrc
  zsh    source <(exec-server completion zsh)                  in ~/.zshrc, after compinit
  fish   exec-server completion fish > ~/.config/fish/completions/exec-server.fish
"""


class _Parser(ArgumentParser):
    usage_exit_code = EXIT_USAGE

    def help_command(self) -> str:
        return f"{self.prog} -h"


class _ExecParser(_Parser):
    usage_exit_code = EXIT_EXEC_FAILED


def _escape(text: str) -> str | None:
    if text == "none":
        return None
    if len(text) != 1 or not text.isascii() or not text.isprintable():
        raise ValueError(text)
    return text


_escape.__name__ = "escape character"  # argparse prints the name of the type


def parse(command: str, words: list[str]) -> argparse.Namespace:
    """Parse the arguments of a command; exits if they are invalid."""
    parser = PARSERS[command]()
    separator = words.index("--") if "--" in words and command == "exec" else len(words)
    arguments = parser.parse_args(words[:separator])
    if command == "exec":
        arguments.argv = words[separator + 1 :]
        if arguments.extra:
            word = arguments.extra[0]
            parser.error(f"unexpected argument `{word}`; the command comes after `--`")
        if separator < len(words) and not arguments.argv:
            parser.error("no command after `--`")
    return arguments


def access_options(arguments: argparse.Namespace) -> AccessOptions:
    """The access flags as AccessOptions; raises UsageError."""
    if arguments.token_file is not None and arguments.token_env is not None:
        raise UsageError("--token-file and --token-env exclude each other")
    return AccessOptions(
        token_file=arguments.token_file,
        token_env=arguments.token_env,
        executor_key=arguments.executor_key,
        ca_file=arguments.ca_file,
    )


def _add_access(parser: ArgumentParser) -> None:
    group = parser.add_argument_group(
        "access", "For targets without a name; for named ones they override targets.toml."
    )
    group.add_argument("--token-file", metavar="FILE", help="file with the token to send")
    group.add_argument("--token-env", metavar="NAME", help="environment variable with the token")
    group.add_argument(
        "--ca-file",
        metavar="FILE",
        help="root certificates to trust, in PEM format (default: those of the system)",
    )
    group.add_argument(
        "--executor-key",
        metavar="SHA256",
        help="for relay targets: the only executor key to accept, by its fingerprint "
        "(default: the key that the registry names)",
    )


def _exec() -> ArgumentParser:
    parser = _ExecParser("exec-server exec", description=_EXEC, epilog=_EXEC_EPILOG)
    parser.usage = "exec-server exec [-t] [-n] [--cwd DIR] [--env K=V] [...] TARGET [-- COMMAND...]"
    parser.add_argument("target", metavar="TARGET")
    # The default makes it optional. Words are collected for the error in `parse`.
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
    _add_access(parser)
    return parser


def _cp() -> ArgumentParser:
    parser = _Parser("exec-server cp", description=_CP, epilog=_CP_EPILOG)
    parser.usage = "exec-server cp [-q] SOURCE... DESTINATION"
    parser.add_argument("paths", metavar="PATH", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="show no progress bar (default: on a terminal)"
    )
    _add_access(parser)
    return parser


def _ls() -> ArgumentParser:
    parser = _Parser("exec-server ls", description=_LS, epilog=_LS_EPILOG)
    parser.add_argument("paths", metavar="TARGET:PATH", nargs="+")
    parser.add_argument(
        "-l", "--long", action="store_true", help="also show kind, size and modification time"
    )
    parser.add_argument(
        "-a", "--all", action="store_true", help="also show names that begin with a dot"
    )
    _add_access(parser)
    return parser


def _cat() -> ArgumentParser:
    parser = _Parser("exec-server cat", description=_CAT, epilog=_CAT_EPILOG)
    parser.add_argument("paths", metavar="TARGET:PATH", nargs="+")
    _add_access(parser)
    return parser


def _rm() -> ArgumentParser:
    parser = _Parser("exec-server rm", description=_RM, epilog=_RM_EPILOG)
    parser.add_argument("paths", metavar="TARGET:PATH", nargs="+")
    parser.add_argument(
        "-r", "--recursive", action="store_true", help="remove directories and their content"
    )
    parser.add_argument("-f", "--force", action="store_true", help="ignore missing files")
    _add_access(parser)
    return parser


def _info() -> ArgumentParser:
    parser = _Parser("exec-server info", description=_INFO, epilog=_INFO_EPILOG)
    parser.add_argument("target", metavar="TARGET")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    _add_access(parser)
    return parser


def _targets() -> ArgumentParser:
    parser = _Parser("exec-server targets", description=_LIST)
    parser.add_argument("--names", action="store_true", help="print only the names")
    return parser


def _completion() -> ArgumentParser:
    parser = _Parser("exec-server completion", description=_COMPLETION)
    parser.add_argument("shell", choices=SHELLS)
    return parser


PARSERS: Final = {
    "exec": _exec,
    "cp": _cp,
    "ls": _ls,
    "cat": _cat,
    "rm": _rm,
    "info": _info,
    "targets": _targets,
    "completion": _completion,
}
# Descriptions in the completion scripts.
SUMMARIES: Final = {
    "exec": "run a command on a target",
    "cp": "copy files and directories",
    "ls": "list files of a target",
    "cat": "print files of a target",
    "rm": "remove files of a target",
    "info": "show version, directories and capabilities of a target",
    "targets": "list the targets of targets.toml",
    "completion": "print a shell completion script",
}
