"""Errors of the client commands, and their exit codes."""

from __future__ import annotations

from typing import Final

EXIT_FAILURE: Final = 1
EXIT_USAGE: Final = 2
# The exit code of timeout(1).
EXIT_TIMEOUT: Final = 124
# The exit codes of shells, env(1) and docker for a command that was not run: refused, found but
# not executable, not found.
EXIT_NOT_RUN: Final = 125
EXIT_NOT_EXECUTABLE: Final = 126
EXIT_NOT_FOUND: Final = 127
# The exit code of ssh: few commands use it themselves.
EXIT_CONNECTION: Final = 255


class UsageError(Exception):
    """The arguments, or a file they name, are invalid; the text says how to correct them."""


class CommandError(Exception):
    """The command failed; the text says how to solve the problem, where that is known.

    Without an exit code of its own, the command ends with the `failure_code` of its table row.
    """

    def __init__(self, text: str, exit_code: int | None = None) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class LostConnection(CommandError):
    """There is no connection to the target, or no longer."""
