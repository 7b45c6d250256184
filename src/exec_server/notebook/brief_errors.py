"""The errors of the magics; IPython prints their texts, without tracebacks.

A traceback would show the code of the magic, and a user looks for the fault in the command.
"""

from __future__ import annotations

from exec_server.client.exceptions import CommandFailed, Timeout
from exec_server.errors import ExecServerError
from exec_server.printable import printable


class _Brief(BaseException):
    def _render_traceback_(self) -> list[str]:
        """The lines that IPython prints instead of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class RemoteError(_Brief, ExecServerError):
    """The command was not run, or its end is unknown."""

    def __str__(self) -> str:
        return printable(str(self.args[0]), keep="\n")


class RemoteCommandFailed(_Brief, CommandFailed):
    """The command had an exit code other than 0; its output is in the cell, or in `result`."""

    def __str__(self) -> str:
        result = self.result
        is_denied = result.sandbox_denied or result.sandbox_denial is not None
        denied = ", denied by its sandbox" if is_denied else ""
        return f"exit code {result.exit_code} after {result.duration:.1f} s{denied}"


class RemoteTimeout(_Brief, Timeout):
    """The command was killed after its timeout."""

    def __str__(self) -> str:
        return f"killed after {self.seconds:g} s"


class RemoteInterrupt(_Brief, KeyboardInterrupt):
    """The user has interrupted the kernel."""

    def __str__(self) -> str:
        return "the command was killed"
