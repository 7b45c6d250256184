"""The flags that `exec` and `shell` share."""

from __future__ import annotations

import argparse

from exec_server.cli.argument_parser import ArgumentParser
from exec_server.cli.commands.access_flags import add_access_flags


def add_execution_flags(parser: ArgumentParser) -> None:
    """Add directory, environment, sandbox, user, escape character, and the access flags."""
    add_command_flags(parser)
    add_escape_flag(parser)
    add_access_flags(parser)


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
