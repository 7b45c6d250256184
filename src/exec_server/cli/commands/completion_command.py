"""`exec-server completion`: print a completion script for a shell."""

from __future__ import annotations

import argparse
from typing import Final

from exec_server.cli.commands.command_parser import CommandParser
from exec_server.cli.commands.completion import SHELLS, script
from exec_server.cli.commands.printing import print_text

_DESCRIPTION: Final = """\
Print a script with which a shell completes commands, flags and names of targets:

  bash   source <(exec-server completion bash)                 in ~/.bashrc
  zsh    source <(exec-server completion zsh)                  in ~/.zshrc, after compinit
  fish   exec-server completion fish > ~/.config/fish/completions/exec-server.fish
"""
_EPILOG: Final = """\
examples:
  exec-server completion fish | source             for this fish only
  exec-server completion bash | less               read the script first
"""


def build_parser() -> CommandParser:
    parser = CommandParser("completion", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("shell", choices=SHELLS)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print the script; returns the exit code."""
    print_text(script(arguments.shell))
    return 0
