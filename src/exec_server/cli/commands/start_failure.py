"""From the error of a start to the exit code of shells, with a hint where the cause is known."""

from __future__ import annotations

import errno
import re
import shlex
from typing import Final

from exec_server.cli.commands.connection import error_text
from exec_server.cli.commands.errors import (
    EXIT_NOT_EXECUTABLE,
    EXIT_NOT_FOUND,
    EXIT_NOT_RUN,
    CommandError,
)
from exec_server.client.exceptions import ProgramNotFound, error_number
from exec_server.errors import ExecServerError, RpcError

# The server's machine is short of something; the program itself can be executed.
_SHORTAGES: Final = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})
_SHELL_SYNTAX: Final = re.compile(r"[\s|&;<>]")


def start_failure(error: ExecServerError, argv: list[str], label: str) -> CommandError:
    """The error of a command that could not be started on the target `label`."""
    text = f"{label}: {error_text(error)}"
    if isinstance(error, ProgramNotFound):
        return CommandError(f"{text}{_hint(argv)}", EXIT_NOT_FOUND)
    number = error_number(error.message) if isinstance(error, RpcError) else None
    if number is None or number in _SHORTAGES:
        return CommandError(text, EXIT_NOT_RUN)
    return CommandError(text, EXIT_NOT_EXECUTABLE)


def _hint(argv: list[str]) -> str:
    if len(argv) != 1 or _SHELL_SYNTAX.search(argv[0]) is None:
        return ""
    return (
        "\nThe command is a single word. Write its words without quotes, or let a shell read it: "
        f"sh -c {shlex.quote(argv[0])}"
    )
