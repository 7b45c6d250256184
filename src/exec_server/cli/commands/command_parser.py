"""The parser of the client commands, and the help texts that they share."""

from __future__ import annotations

from typing import Any, Final

from exec_server.cli.argument_parser import ArgumentParser
from exec_server.cli.commands.errors import EXIT_USAGE

TARGET_FORMS: Final = """\
targets:
  ws://HOST:PORT, wss://HOST        a listening server
  unix:/PATH                        a server on a unix socket of this machine
  'stdio:COMMAND WORDS'             a program that serves on stdin and stdout
  relay:https://REGISTRY/ENVIRONMENT  an environment of a registry
  NAME                              the table [NAME] of ~/.config/exec-server/targets.toml;
                                    `exec-server targets` lists them
"""
PATH_FORMS: Final = """\
paths:
  NAME:PATH                         on a named target
  ws://HOST:PORT:/PATH              on any other target; the path begins with / or ~
  A relative path starts at the server's working directory, ~ is the home of its user.
"""


class CommandParser(ArgumentParser):
    """The parser of one command; `name` is the word after exec-server."""

    usage_exit_code = EXIT_USAGE
    verbs: tuple[str, ...] = ()  # each with a help of its own

    def __init__(
        self, name: str, *, description: str, epilog: str | None = None, **options: Any
    ) -> None:
        super().__init__(f"exec-server {name}", description=description, epilog=epilog, **options)

    def help_command(self) -> str:
        return f"{self.prog} -h"
