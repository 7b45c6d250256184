"""The argument parser of all commands.

On argparse, because typer takes ten times as long to import (`python -m bench.alternatives`).
"""

from __future__ import annotations

import argparse
import os
import re
from typing import Any, Final, NoReturn

from exec_server.cli.errors import EXIT_USAGE

TARGET_FORMS: Final = """\
targets:
  ws://HOST:PORT, wss://HOST        a listening server
  unix:/PATH                        a server on a unix socket of this machine
  'stdio:COMMAND WORDS'             a program that serves on stdin and stdout
  relay:https://REGISTRY/ENVIRONMENT  an environment of a registry
  NAME                              the table [NAME] of ~/.config/exec-server/targets.toml;
                                    `exec-server targets` lists them
  :                                 the default target, that of the variable EXEC_SERVER_TARGET;
                                    a TARGET that stands alone, or before --, may be left out
"""
PATH_FORMS: Final = """\
paths:
  NAME:PATH                         on a named target
  :PATH                             on the default target, that of EXEC_SERVER_TARGET
  ws://HOST:PORT:/PATH              on any other target; the path begins with / or ~
  A relative path starts at the server's working directory, ~ is the home of its user.
"""

# Tokens of this registry, GitHub and OpenAI, and JWTs.
_TOKEN: Final = re.compile(r"\b(esr_|gh[a-z]_|github_pat_|sk-|eyJ)[\w.-]{16,}")

# argparse looks for translations of its own texts, for which it imports `locale` and searches the
# disk. Python comes with none.
argparse._ = str  # type: ignore[attr-defined]


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of descriptions, and does not import shutil to find the terminal's width."""

    def __init__(self, prog: str, **options: Any) -> None:
        if options.get("width") is None:
            options["width"] = _columns() - 2
        super().__init__(prog, **options)


def _columns() -> int:
    """The width of the terminal, as shutil.get_terminal_size finds it."""
    try:
        return int(os.environ["COLUMNS"]) or 80
    except (KeyError, ValueError):
        pass
    try:
        return os.get_terminal_size(1).columns or 80
    except OSError:
        return 80


class ArgumentParser(argparse.ArgumentParser):
    """An argparse parser with errors in the format of the reference, and unwrapped help texts."""

    usage_exit_code = 2

    def __init__(self, prog: str, **options: Any) -> None:
        # No abbreviated flags: a new flag could make an abbreviation ambiguous.
        super().__init__(prog, formatter_class=HelpFormatter, allow_abbrev=False, **options)

    def help_command(self) -> str:
        """The command that error texts refer to."""
        return "--help"

    def parse_words(self, words: list[str]) -> argparse.Namespace:
        """Parse the words after the name of the command; exits if they are invalid."""
        return self.parse_args(words)

    def error(self, message: str) -> NoReturn:
        shown = _TOKEN.sub(r"\1…", message)  # logs of a job would keep one in a wrong place
        text = f"Error: {shown}\n\nFor more information, try '{self.help_command()}'.\n"
        self.exit(self.usage_exit_code, text)


def refuse_token(
    parser: argparse.ArgumentParser, flags: str = "--token-file FILE or --token-env NAME"
) -> None:
    """Let `--token X` name the flags that take a token, and repeat nothing of it."""

    class Refused(argparse.Action):
        def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
            parser.error(
                "there is no --token, because other users can see the arguments of a process: "
                f"use {flags}"
            )

    parser.add_argument("--token", action=Refused, nargs="?", help=argparse.SUPPRESS)


def positive_number(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def utf8_text(text: str) -> str:
    """Text for a URL or a JSON message, which have no other bytes; raises UnicodeEncodeError."""
    text.encode()
    return text


def line_count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


def seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1e9:
        raise ValueError(text)
    return value


def positive_seconds(text: str) -> float:
    if seconds(text) == 0:
        raise ValueError(text)
    return seconds(text)


# argparse prints the name of the type: "invalid number of seconds value: 'x'".
utf8_text.__name__ = "UTF-8"
line_count.__name__ = "number of lines"
positive_number.__name__ = "positive number"
seconds.__name__ = "number of seconds"
positive_seconds.__name__ = "number of seconds"


class CommandParser(ArgumentParser):
    """The parser of one command; `name` is the word after exec-server."""

    usage_exit_code = EXIT_USAGE
    verbs: tuple[str, ...] = ()  # each with a help of its own

    def __init__(
        self, name: str, description: str, epilog: str | None = None, **options: Any
    ) -> None:
        super().__init__(f"exec-server {name}", description=description, epilog=epilog, **options)

    def help_command(self) -> str:
        return f"{self.prog} -h"
