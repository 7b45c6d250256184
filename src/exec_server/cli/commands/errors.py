"""Errors of the client commands, and their exit codes."""

from __future__ import annotations

from typing import Final

EXIT_FAILURE: Final = 1
EXIT_USAGE: Final = 2
# The exit code of ssh: few commands use it themselves.
EXIT_EXEC_FAILED: Final = 255
# The exit code of timeout(1).
EXIT_TIMEOUT: Final = 124


class UsageError(Exception):
    """The arguments, or a file they name, are invalid; the text says how to correct them."""


class CommandError(Exception):
    """The command failed; the text says how to solve the problem, where that is known."""
