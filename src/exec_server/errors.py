"""Every exception, the translation of OSError to wire errors, and texts that are safe to print.

The other end of a connection chooses names and texts; a terminal executes their control characters.
"""

from __future__ import annotations

import sys
from typing import Self

# The reference is a static musl build and its error texts are on the wire, so the texts are those
# of musl where the C library of this machine has others. The numbers are those of Linux.
_MUSL_TEXTS = {
    5: "I/O error",
    11: "Resource temporarily unavailable",
    12: "Out of memory",
    16: "Resource busy",
    18: "Cross-device link",
    24: "No file descriptors available",
    25: "Not a tty",
    29: "Invalid seek",
    36: "Filename too long",
    40: "Symbolic link loop",
    75: "Value too large for data type",
    98: "Address in use",
    110: "Operation timed out",
    122: "Quota exceeded",
}

_ENOENT = 2
_INVALID_REQUEST_ERRNOS = frozenset({1, 13, 22})  # EPERM, EACCES, EINVAL


def printable(text: str, *, keep: str = "") -> str:
    r"""Escape all characters that are not printable, except those in `keep`.

    The escapes are those of Python (`\x1b`, `\n`, `\u202e`). A byte of a file name that is not
    UTF-8 is shown as that byte (`\xff`).
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else _escape(character)
        for character in text
    )


def _escape(character: str) -> str:
    if "\udc80" <= character <= "\udcff":
        return f"\\x{ord(character) & 0xFF:02x}"
    return character.encode("unicode_escape").decode("ascii")


def lossy(text: str) -> str:
    """A text that UTF-8 can carry: U+FFFD for each byte of a file name that is not UTF-8."""
    if text.isascii():
        return text
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    except UnicodeEncodeError:  # half of a surrogate pair, which stands for no byte
        return text.encode("utf-8", "replace").decode()


def missing_package(user: str, package: str, extra: str) -> str:
    """The text of an error: who needs a package of an extra, and how that is installed.

    No package index has exec-server; a bare name could install another program.
    """
    return (
        f"{user} needs {package} (extra `{extra}`): pip install '.[{extra}]' in a checkout of "
        f"exec-server, or pip install 'exec-server[{extra}] @ URL' with the URL of one"
    )


class ExecServerError(Exception):
    """The base class of all exceptions of this package.

    The text has its control characters escaped: a peer may have chosen it, and tracebacks are
    printed to terminals. Attributes such as `message` are unchanged.
    """

    def __str__(self) -> str:
        return printable(super().__str__(), keep="\n")


class RpcError(ExecServerError):
    """A request failed; `code` and the text are sent to the client."""

    code = -32603

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        # The `data` member of the error on the wire: any JSON value.
        self.data: object = None

    def explained(self, message: str) -> Self:
        """A copy with another message."""
        error = type(self)(message)
        error.code = self.code
        error.data = self.data
        return error


class InvalidRequest(RpcError):
    """The request is not allowed, or not in this state."""

    code = -32600


# Changes of texts that do not fit, which `reason` in the `data` of the error names on the wire.
class PatchDoesNotApply(InvalidRequest):
    """A patch is malformed, or does not fit the files that it changes; nothing was changed."""

    reason = "patchDoesNotApply"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.data = {"reason": self.reason}


class EditNotFound(InvalidRequest):
    """The old text of an edit does not occur in the file; nothing was changed."""

    reason = "editNotFound"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.data = {"reason": self.reason}


class EditAmbiguous(InvalidRequest):
    """The old text of an edit occurs several times in the file; nothing was changed."""

    reason = "editAmbiguous"

    @classmethod
    def at(cls, message: str, count: int, lines: list[int]) -> Self:
        """The error for `count` occurrences, the first of which begin in these lines."""
        error = cls(message)
        error.data = {"reason": cls.reason, "count": count, "lines": lines}
        return error

    @property
    def count(self) -> int:
        """How often the text occurs; 0 if the server does not tell."""
        count = self.data.get("count") if isinstance(self.data, dict) else None
        return count if isinstance(count, int) else 0

    @property
    def lines(self) -> tuple[int, ...]:
        """The lines, from 1, in which the first occurrences begin."""
        lines = self.data.get("lines") if isinstance(self.data, dict) else None
        return tuple(lines) if isinstance(lines, list) else ()


class MethodNotFound(RpcError):
    """The server does not know the method."""

    code = -32601


class InvalidParams(RpcError):
    """The params cannot be decoded, or are invalid in combination."""

    code = -32602


class InternalError(RpcError):
    """The operation failed for a reason that has no code of its own."""

    code = -32603


class NotFound(RpcError):
    """A file or a handle does not exist."""

    code = -32004


class ProgramNotFound(InternalError, NotFound):
    """A command cannot be started: its program or its directory does not exist.

    Servers send it with the code of an internal error; the client recognises it by the message.
    """


class SessionAttached(RpcError):
    """The session is in use on another connection."""

    code = -32010


class MalformedMessage(ExecServerError):
    """A message is not JSON-RPC. The error is sent with id -1, and the connection stays open."""


class MalformedAnswer(MalformedMessage):
    """A server sent an answer or a notification whose content cannot be right; only in clients."""


class ProtocolError(ExecServerError):
    """The peer violated the transport protocol; the connection ends with this close code."""

    def __init__(self, close_code: int, reason: str) -> None:
        super().__init__(reason)
        self.close_code = close_code
        self.reason = reason


class RelayError(ExecServerError):
    """The peer violated the relay protocol; its stream ends."""


class CredentialRejected(RelayError):
    """An executor answered a handshake with the message that its own credential is rejected."""

    def __str__(self) -> str:
        return "the registry has rejected the executor's credential"


class ConnectFailed(ExecServerError):
    """A WebSocket could not be opened; `status` and `headers` are those of an HTTP response.

    `reason` is the cause alone. The client adds `url`, the address that it was given, `hint`, a
    sentence about what to try, and of a program that was to serve the last lines of its stderr.
    """

    url: str | None = None
    hint: str = ""
    stderr_lines: tuple[str, ...] = ()

    def __init__(
        self, reason: str, status: int | None = None, headers: list[tuple[str, str]] | None = None
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status
        self.headers = headers or []

    def __str__(self) -> str:
        text = self.reason if self.url is None else f"cannot connect to {self.url}: {self.reason}"
        text = f"{text}; {self.hint}" if self.hint else text
        return printable("\n  ".join((text, *self.stderr_lines)), keep="\n")


class HandshakeReset(ConnectFailed):
    """An executor has reset a relay stream instead of answering its handshake: it may be busy."""


class CertificateRejected(ConnectFailed):
    """The certificate of a server is not the pinned one, or cannot be verified."""


class RegistryError(ExecServerError):
    """The registry refused, could not be reached, or sent an invalid response."""


class RegistryUnavailable(RegistryError):
    """A temporary error of the registry; a retry may succeed."""


class RegistryUnreachable(RegistryError):
    """The registry does not answer, or cannot work now; `summary` is the reason in one line."""

    def __init__(self, text: str, summary: str) -> None:
        super().__init__(text)
        self.summary = summary


class StartupError(ExecServerError):
    """The server cannot start with this command line or on this machine."""


class ConnectionLost(ExecServerError):
    """The connection ended before the response: the request may or may not have been executed.

    The session may continue: the next call waits until it is resumed.
    """


class SessionLost(ExecServerError):
    """The session has ended or cannot be resumed; its processes and handles are gone."""


class ProcessLost(ExecServerError):
    """The server no longer knows a process; its output and exit code are lost."""


class Cancelled(ExecServerError):
    """Another thread or task has cancelled the call; a command that it had started was killed."""


class StdinClosed(ExecServerError, BrokenPipeError):
    """A process has no stdin: started without, closed, or ended with the process."""


class Unsupported(ExecServerError):
    """The server lacks `capability`; `hint` names an alternative."""

    def __init__(self, capability: str, hint: str) -> None:
        super().__init__(capability, hint)
        self.capability = capability
        self.hint = hint

    def __str__(self) -> str:
        return f"the server does not offer {self.capability}: {self.hint}"


def os_error_text(error: OSError) -> str:
    """The text of an operating system error, as in the reference."""
    if error.errno is None:
        return str(error)
    text = _MUSL_TEXTS.get(error.errno) if sys.platform == "linux" else None
    text = text or error.strerror or "Unknown error"
    return f"{text} (os error {error.errno})"


def decode_error_text(error: UnicodeDecodeError) -> str:
    """The words of the reference for bytes that are not UTF-8."""
    if error.reason == "unexpected end of data":
        return f"incomplete utf-8 byte sequence from index {error.start}"
    count = error.end - error.start
    return f"invalid utf-8 sequence of {count} bytes from index {error.start}"


def rpc_error_from_os(error: OSError) -> RpcError:
    """The wire error of a failed file operation."""
    text = os_error_text(error)
    if error.errno == _ENOENT:
        return NotFound(text)
    if error.errno in _INVALID_REQUEST_ERRNOS:
        return InvalidRequest(text)
    return InternalError(text)
