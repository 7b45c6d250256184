"""What the client raises about commands, sandboxes and transfers, with what is known of them."""

from __future__ import annotations

from exec_server.client.results import Result, Transfer
from exec_server.errors import ExecServerError
from exec_server.protocol.sandbox import Denial


class SandboxDenied(ExecServerError):
    """A sandbox is, as far as one can tell, what made an operation fail.

    `denial` is the server's own account of it, if it gives one.
    """

    def __init__(self, text: str, denial: Denial | None = None) -> None:
        super().__init__(text)
        self.denial = denial


class CommandFailed(ExecServerError):
    """A command that was to be checked ended with another exit code than 0; see `result`."""

    def __init__(self, result: Result) -> None:
        super().__init__(result)
        self.result = result

    def __str__(self) -> str:
        # Not the arguments and not the output: both may hold what is nobody's business.
        return f"{self.result.argv[0]} ended with exit code {self.result.exit_code}"


class CommandDenied(CommandFailed, SandboxDenied):
    """The same, and its sandbox seems to be the reason."""

    def __init__(self, result: Result) -> None:
        super().__init__(result)
        self.denial = result.sandbox_denial

    def __str__(self) -> str:
        return f"{super().__str__()}: denied by its sandbox"


class Timeout(ExecServerError, TimeoutError):
    """A command took too long and was killed; `result` has its output until then."""

    def __init__(self, seconds: float, result: Result) -> None:
        super().__init__(seconds, result)
        self.seconds = seconds
        self.result = result

    def __str__(self) -> str:
        return f"{self.result.argv[0]} did not end within {self.seconds:g} s and was killed"


class NotAllCopied(ExecServerError):
    """Some of a tree could not be copied; `transfer.failed` has each with its reason."""

    def __init__(self, transfer: Transfer) -> None:
        super().__init__(transfer)
        self.transfer = transfer

    def __str__(self) -> str:
        first, *others = self.transfer.failed
        more = f", and {len(others)} more" if others else ""
        return f"not everything was copied: {first.error}{more}"
