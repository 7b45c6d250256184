"""`exec-server version`: print the version."""

from __future__ import annotations

import argparse
from typing import Final

from exec_server import __version__
from exec_server.cli.commands.command_parser import CommandParser
from exec_server.cli.commands.printing import print_text

_DESCRIPTION: Final = """\
Print the version of exec-server. `exec-server info TARGET` shows the version of a server.
"""
_EPILOG: Final = """\
examples:
  exec-server version                              name and version
  exec-server version | cut -d ' ' -f 2            the version alone
"""


def build_parser() -> CommandParser:
    return CommandParser("version", description=_DESCRIPTION, epilog=_EPILOG)


def run(_: argparse.Namespace) -> int:
    """Print name and version; returns the exit code."""
    print_text(f"exec-server {__version__}\n")
    return 0
