"""Exceptions about commands, sandboxes and transfers, with their results."""

from __future__ import annotations

from exec_server.client.results import Result, Transfer
from exec_server.errors import ExecServerError
from exec_server.protocol.sandbox import Denial


class SandboxDenied(ExecServerError):
    """An operation failed, probably because of its sandbox.

    `denial` is the server's account of it, or None.
    """

    def __init__(self, text: str, denial: Denial | None = None) -> None:
        super().__init__(text)
        self.denial = denial


class CommandFailed(ExecServerError):
    """A command run with `check` had an exit code other than 0; see `result`."""

    def __init__(self, result: Result) -> None:
        super().__init__(result)
        self.result = result

    def __str__(self) -> str:
        # Without arguments and output: both may contain secrets.
        return f"{self.result.argv[0]} ended with exit code {self.result.exit_code}"


class CommandDenied(CommandFailed, SandboxDenied):
    """A checked command failed, probably because of its sandbox."""

    def __init__(self, result: Result) -> None:
        super().__init__(result)
        self.denial = result.sandbox_denial

    def __str__(self) -> str:
        return f"{super().__str__()}: denied by its sandbox"


class Timeout(ExecServerError, TimeoutError):
    """A command was killed after its timeout; `result` has its output so far."""

    def __init__(self, seconds: float, result: Result) -> None:
        super().__init__(seconds, result)
        self.seconds = seconds
        self.result = result

    def __str__(self) -> str:
        return f"{self.result.argv[0]} did not end within {self.seconds:g} s and was killed"


class PatternNotFound(ExecServerError, EOFError):
    """The output of a process ended without a pattern, or was too long; see `output`.

    The output stays unread.
    """

    def __init__(self, pattern: object, output: bytes, *, is_over: bool) -> None:
        super().__init__(pattern, output)
        self.pattern = pattern
        self.output = output
        self._is_over = is_over

    def __str__(self) -> str:
        # Without the output, which may contain secrets.
        if self._is_over:
            return f"the output ended without {self.pattern!r}"
        return f"{len(self.output)} bytes of output are without {self.pattern!r}"


class NotAllCopied(ExecServerError):
    """Parts of a tree could not be copied; `transfer.failed` has each with its error."""

    def __init__(self, transfer: Transfer) -> None:
        super().__init__(transfer)
        self.transfer = transfer

    def __str__(self) -> str:
        first, *others = self.transfer.failed
        more = f", and {len(others)} more" if others else ""
        return f"not everything was copied: {first.error}{more}"
