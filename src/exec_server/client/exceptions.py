"""Exceptions about commands, sandboxes, ports and transfers, with their results."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from typing import Final

from exec_server.client.file_errors import error_number
from exec_server.client.results import Result, Transfer
from exec_server.errors import ExecServerError, RpcError
from exec_server.printable import printable
from exec_server.protocol.sandbox import Denial

# Of the end of stderr in the text of an exception: enough for the message of a compiler or of a
# traceback, and not for a log.
STDERR_LINES: Final = 10
STDERR_CHARACTERS: Final = 1000

_NUMBER: Final = re.compile(r" \(os error \d+\)$")


class SandboxDenied(ExecServerError, PermissionError):
    """An operation failed, probably because of its sandbox.

    `denial` is the server's account of it, or None. The text has its path and its rule. `errno` is
    EACCES or EPERM, also where the kernel reported a read-only file system.
    """

    def __init__(self, text: str, denial: Denial | None = None, number: int = errno.EACCES) -> None:
        super().__init__(text)
        self.denial = denial
        self.errno = number
        self.strerror = "denied by the sandbox"
        self.filename = None if denial is None else denial.path

    def __reduce__(self) -> tuple[Callable[..., SandboxDenied], tuple[object, ...]]:
        return type(self), (self.args[0], self.denial, self.errno)

    def __str__(self) -> str:
        text: str = self.args[0]
        account = _account(self.denial, text)
        return printable(f"{_NUMBER.sub('', text)}{account}" if account else text, keep="\n")


class CommandFailed(ExecServerError):
    """A command run with `check` had an exit code other than 0; see `result`.

    The text has the end of its stderr, and not its arguments, which may contain secrets.
    """

    def __init__(self, result: Result) -> None:
        super().__init__(result)
        self.result = result

    def __str__(self) -> str:
        return printable(f"{self._summary()}{_end_of(self.result.stderr)}", keep="\n")

    def _summary(self) -> str:
        return f"{self.result.argv[0]} ended with exit code {self.result.exit_code}"


class CommandDenied(CommandFailed, SandboxDenied):
    """A checked command failed, probably because of its sandbox."""

    def __init__(self, result: Result) -> None:
        super().__init__(result)
        self.denial = result.sandbox_denial
        self.filename = None if self.denial is None else self.denial.path

    def __reduce__(self) -> tuple[Callable[..., SandboxDenied], tuple[object, ...]]:
        return type(self), (self.result,)

    def _summary(self) -> str:
        return f"{super()._summary()}: denied by its sandbox{_account(self.denial, '')}"


def _account(denial: Denial | None, text: str) -> str:
    """The path, unless the text has it, and the rule of a denial, as far as they are known."""
    if denial is None:
        return ""
    has_path = denial.path is not None and denial.path not in text
    place = f"{denial.operation or 'access'} {denial.path}" if has_path else None
    known = ": ".join(part for part in (place, denial.rule) if part)
    return f" ({known})" if known else ""


def _end_of(stderr: bytes) -> str:
    """The last lines of stderr, below the text of an exception."""
    text = stderr[-4 * STDERR_CHARACTERS :].decode("utf-8", "replace").rstrip()
    lines = text[-STDERR_CHARACTERS:].split("\n")[-STDERR_LINES:]
    if len(stderr) > 4 * STDERR_CHARACTERS or "\n".join(lines) != text:
        lines.insert(0, "…")
    return "".join(f"\n  {line}" for line in lines) if text else ""


class Timeout(ExecServerError, TimeoutError):
    """A command was killed after its timeout; `result` has its output so far.

    If `is_killed` is false, its end was not reported: the server does not answer. It kills the
    command when it gets the request, or gives up the session.
    """

    def __init__(self, seconds: float, result: Result, *, is_killed: bool = True) -> None:
        super().__init__(seconds, result)
        self.seconds = seconds
        self.result = result
        self.is_killed = is_killed

    def __str__(self) -> str:
        text = f"{self.result.argv[0]} did not end within {self.seconds:g} s"
        if self.is_killed:
            return f"{text} and was killed"
        return f"{text}; it may still run, because the server did not report its end"


class PortError(RpcError, OSError):
    """The server cannot listen on a port; `errno` is EADDRINUSE if another program does."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.errno = error_number(message)
        self.strerror = _NUMBER.sub("", message).rpartition(": ")[2]

    def __str__(self) -> str:
        return printable(self.message, keep="\n")


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
