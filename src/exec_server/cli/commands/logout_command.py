"""`exec-server logout`: forget the tokens for a registry."""

from __future__ import annotations

import argparse
from typing import Final

from exec_server.cli.commands.command_parser import CommandParser
from exec_server.cli.commands.errors import CommandError, UsageError
from exec_server.cli.commands.logins import normalise_url, remove
from exec_server.cli.commands.printing import print_text

_DESCRIPTION: Final = """\
Forget the tokens for a registry that `exec-server login` has stored. The tokens themselves stay
valid: `exec-server registry token revoke` ends them, on the registry.
"""
_EPILOG: Final = """\
examples:
  exec-server logout https://registry.example.net
  exec-server logout http://127.0.0.1:7800
"""


def build_parser() -> CommandParser:
    parser = CommandParser("logout", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("url", metavar="URL", help="the URL of the registry")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Remove the login; returns the exit code."""
    from exec_server.errors import StartupError

    try:
        url = normalise_url(arguments.url)
    except StartupError as error:
        raise UsageError(str(error)) from None
    if not remove(url):
        raise CommandError(f"there is no login for {url}; `exec-server login --list` lists them")
    print_text(f"Logged out of {url}.\n")
    return 0
