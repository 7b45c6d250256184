"""The arguments of the commands for people; one parser each, from which completion is made too."""

from __future__ import annotations

import argparse
from typing import Final, NoReturn

from exec_server.commands.failures import EXEC_FAILED, MISTAKEN, Mistake
from exec_server.commands.targets import Access

SHELLS: Final = ("bash", "zsh", "fish")

_TARGETS: Final = """\
targets:
  ws://HOST:PORT, wss://HOST        a server that listens
  'stdio:COMMAND WORDS'             a program that serves on its stdin and stdout
  relay:https://REGISTRY/ENVIRONMENT  an environment that a registry knows
  NAME                              what ~/.config/exec-server/targets.toml calls NAME;
                                    `exec-server targets` lists them
"""
_PLACES: Final = """\
paths:
  NAME:PATH                         on a named target
  ws://HOST:PORT:/PATH              on any other; the path begins with / or ~
  Relative paths count from where the server works, ~ is the home of its user.
"""
_EXEC: Final = f"""\
Run a command on a target. Its stdin, stdout, stderr, exit code and signals are those of
exec-server itself, as with ssh; but there is no shell in between unless you name one.
Without COMMAND it is the server's shell, on a terminal if there is one here.

{_TARGETS}"""
_EXEC_EPILOG: Final = """\
exit code:
  the command's own, or 128 + N when signal N has ended it
  124   --timeout was over
  255   the command could not be run, or the connection was lost for good

signals:
  INT, TERM, HUP, QUIT, USR1 and USR2 go to the command; a second INT within 2 seconds ends
  it by force. Ctrl-Z stops it along with exec-server, where the server can.

on a terminal (-t), at the beginning of a line:
  ~.    leave, and end the command        ~^Z   suspend exec-server
  ~?    list these                        ~~    send ~

examples:
  exec-server exec build -- make test
  exec-server exec -t build                        a shell
  exec-server exec -t --cwd /src build -- vim README.md
  tar c src | exec-server exec --cwd /srv build -- tar x
  exec-server exec ws://127.0.0.1:7700 -- sh -c 'echo $HOME; exit 3'
  exec-server exec 'stdio:ssh host exec-server --listen stdio' -- uname -a
"""
_CP: Final = f"""\
Copy files and whole directories from, to or between targets. Modes, symlinks and empty
directories come along; no -r is needed. What is under its final name is always complete.

{_PLACES}  Without a target, or with a / before the first colon, a path is local: ./a:b
"""
_CP_EPILOG: Final = """\
Several sources need a directory to go to; into an existing directory things go under their own
name. A large file whose copy was broken off goes on where it stopped, if the source is the same.

examples:
  exec-server cp report.pdf build:/srv/
  exec-server cp build:/var/log/syslog .
  exec-server cp src docs build:project/           two trees into one directory
  exec-server cp ws://127.0.0.1:7700:/etc/hosts /tmp/hosts
"""
_LS: Final = f"""\
List a directory, or files, of a target.

{_PLACES}"""
_LS_EPILOG: Final = """\
examples:
  exec-server ls build:                            where the server works
  exec-server ls -l build:/srv ws://127.0.0.1:7700:/tmp
"""
_CAT: Final = f"""\
Write files of a target to stdout.

{_PLACES}"""
_CAT_EPILOG: Final = """\
examples:
  exec-server cat build:/etc/os-release
  exec-server cat build:data.tar.gz | tar tz
"""
_RM: Final = f"""\
Remove files, and with -r directories, of a target.

{_PLACES}"""
_RM_EPILOG: Final = """\
examples:
  exec-server rm build:/tmp/old.log
  exec-server rm -rf build:/tmp/scratch
"""
_INFO: Final = f"""\
Connect to a target and say what it is: version, directories, shell, what it can do.

{_TARGETS}"""
_INFO_EPILOG: Final = """\
examples:
  exec-server info build
  exec-server info --json ws://127.0.0.1:7700 | python3 -m json.tool
"""
_LIST: Final = """\
List the targets of ~/.config/exec-server/targets.toml (or below XDG_CONFIG_HOME), which you
write yourself:

  [build]
  url = "wss://build.example.net:7700"
  token_file = "build.token"           # or token_env; relative to targets.toml
  ca_file = "build-ca.pem"             # if its certificate is of your own making

  [lab]
  stdio = "ssh lab exec-server --listen stdio"

  [behind-nat]
  registry = "https://registry.example.net"
  environment_id = "build-7"
  token_env = "REGISTRY_TOKEN"
  executor_key = "sha256:…"            # then the registry need not be trusted
"""
_COMPLETION: Final = """\
Print what makes a shell complete commands, flags and names of targets:

  bash   source <(exec-server completion bash)                 in ~/.bashrc
  zsh    source <(exec-server completion zsh)                  in ~/.zshrc, after compinit
  fish   exec-server completion fish > ~/.config/fish/completions/exec-server.fish
"""


class _Parser(argparse.ArgumentParser):
    mistake_code = MISTAKEN

    def error(self, message: str) -> NoReturn:
        self.exit(
            self.mistake_code, f"Error: {message}\n\nFor more information, try '{self.prog} -h'.\n"
        )


class _ExecParser(_Parser):
    mistake_code = EXEC_FAILED


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 1e9:
        raise ValueError(text)
    return seconds


_seconds.__name__ = "number of seconds"  # argparse names it in its error


def _escape(text: str) -> str | None:
    if text == "none":
        return None
    if len(text) != 1 or not text.isascii() or not text.isprintable():
        raise ValueError(text)
    return text


_escape.__name__ = "escape character"


def parse(command: str, words: list[str]) -> argparse.Namespace:
    """The arguments of a command; ends the program when they make no sense."""
    parser = PARSERS[command]()
    mark = words.index("--") if "--" in words and command == "exec" else len(words)
    arguments = parser.parse_args(words[:mark])
    if command == "exec":
        arguments.argv = words[mark + 1 :]
        if arguments.stray:
            parser.error(
                f"unexpected argument `{arguments.stray[0]}`; the command comes after `--`"
            )
        if mark < len(words) and not arguments.argv:
            parser.error("there is no command after `--`")
    return arguments


def access(arguments: argparse.Namespace) -> Access:
    """Who we are, as far as the arguments say it; raises Mistake."""
    if arguments.token_file is not None and arguments.token_env is not None:
        raise Mistake("--token-file and --token-env exclude each other")
    return Access(
        token_file=arguments.token_file,
        token_env=arguments.token_env,
        executor_key=arguments.executor_key,
        ca_file=arguments.ca_file,
    )


def _parser(
    command: str, text: str, epilog: str = "", kind: type[_Parser] = _Parser
) -> argparse.ArgumentParser:
    return kind(
        f"exec-server {command}",
        description=text,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _add_access(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "access", "For targets that targets.toml does not know, or instead of what it says."
    )
    group.add_argument("--token-file", metavar="FILE", help="file with the token to send")
    group.add_argument("--token-env", metavar="NAME", help="environment variable with the token")
    group.add_argument("--ca-file", metavar="FILE", help="root certificates to trust (PEM)")
    group.add_argument(
        "--executor-key",
        metavar="SHA256",
        help="through a registry: fingerprint of the executor's key",
    )


def _exec() -> argparse.ArgumentParser:
    parser = _parser("exec", _EXEC, _EXEC_EPILOG, _ExecParser)
    parser.usage = "exec-server exec [-t] [-n] [--cwd DIR] [--env K=V] [...] TARGET [-- COMMAND...]"
    parser.add_argument("target", metavar="TARGET")
    parser.add_argument("stray", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("-t", "--tty", action="store_true", help="run it on a terminal")
    parser.add_argument("-n", "--no-stdin", action="store_true", help="give it no input at all")
    parser.add_argument(
        "--cwd", metavar="DIR", help="where it starts (default: where the server works)"
    )
    parser.add_argument(
        "--env",
        metavar="K=V",
        action="append",
        default=[],
        help="set a variable for it beside the server's own; K alone: as it is here",
    )
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=_seconds, help="end it by force after so long"
    )
    parser.add_argument(
        "-e",
        "--escape",
        metavar="CHAR",
        type=_escape,
        default="~",
        help="with -t: another character than ~, or none",
    )
    _add_access(parser)
    return parser


def _cp() -> argparse.ArgumentParser:
    parser = _parser("cp", _CP, _CP_EPILOG)
    parser.usage = "exec-server cp [-q] SOURCE... DESTINATION"
    parser.add_argument("paths", metavar="PATH", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("-q", "--quiet", action="store_true", help="show no progress")
    _add_access(parser)
    return parser


def _ls() -> argparse.ArgumentParser:
    parser = _parser("ls", _LS, _LS_EPILOG)
    parser.add_argument("places", metavar="TARGET:PATH", nargs="+")
    parser.add_argument("-l", "--long", action="store_true", help="kind, size and time of each")
    parser.add_argument("-a", "--all", action="store_true", help="also what begins with a dot")
    _add_access(parser)
    return parser


def _cat() -> argparse.ArgumentParser:
    parser = _parser("cat", _CAT, _CAT_EPILOG)
    parser.add_argument("places", metavar="TARGET:PATH", nargs="+")
    _add_access(parser)
    return parser


def _rm() -> argparse.ArgumentParser:
    parser = _parser("rm", _RM, _RM_EPILOG)
    parser.add_argument("places", metavar="TARGET:PATH", nargs="+")
    parser.add_argument("-r", "--recursive", action="store_true", help="directories, too")
    parser.add_argument("-f", "--force", action="store_true", help="what is missing is no mistake")
    _add_access(parser)
    return parser


def _info() -> argparse.ArgumentParser:
    parser = _parser("info", _INFO, _INFO_EPILOG)
    parser.add_argument("target", metavar="TARGET")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    _add_access(parser)
    return parser


def _targets() -> argparse.ArgumentParser:
    parser = _parser("targets", _LIST)
    parser.add_argument("--names", action="store_true", help="only their names")
    return parser


def _completion() -> argparse.ArgumentParser:
    parser = _parser("completion", _COMPLETION)
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
# For completion and for the help of exec-server itself.
SUMMARIES: Final = {
    "exec": "run a command on a target",
    "cp": "copy files and directories",
    "ls": "list a directory of a target",
    "cat": "print files of a target",
    "rm": "remove files of a target",
    "info": "say what a target is and can do",
    "targets": "list the targets you have named",
    "completion": "print shell completion",
}
