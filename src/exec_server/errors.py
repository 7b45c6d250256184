"""Every exception of the program, and the one translation from OSError to the wire."""

from __future__ import annotations

from typing import Self

# The reference is a static musl build and its error texts are on the wire, so the
# wording is musl's wherever the C library of this machine would say it differently.
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


class ExecServerError(Exception):
    """The root of everything this package raises on purpose."""


class RpcError(ExecServerError):
    """A request failed; the client gets `code` and the text."""

    code = -32603

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        # Something more for clients that want to know; plain JSON.
        self.data: object = None

    def explained(self, message: str) -> Self:
        """The same error in other words."""
        error = type(self)(message)
        error.code = self.code
        error.data = self.data
        return error


class InvalidRequest(RpcError):
    code = -32600


class MethodNotFound(RpcError):
    code = -32601


class InvalidParams(RpcError):
    code = -32602


class InternalError(RpcError):
    code = -32603


class NotFound(RpcError):
    """There is no such file, or no such handle."""

    code = -32004


class ProgramNotFound(InternalError, NotFound):
    """A command cannot be started: its program or its directory does not exist.

    Servers answer that with the code of an internal error; the client tells it by the text.
    """


class SessionAttached(RpcError):
    code = -32010


class MalformedMessage(ExecServerError):
    """A message is no JSON-RPC: answered with id -1, and the connection goes on."""


class ProtocolError(ExecServerError):
    """The peer broke the rules of the transport: the connection ends with this close code."""

    def __init__(self, close_code: int, reason: str) -> None:
        super().__init__(reason)
        self.close_code = close_code
        self.reason = reason


class RelayError(ExecServerError):
    """The peer broke the rules of the relay: its stream ends."""


class ConnectFailed(ExecServerError):
    """A WebSocket could not be opened; `status` and `headers` if there was an HTTP answer."""

    def __init__(
        self, reason: str, status: int | None = None, headers: list[tuple[str, str]] | None = None
    ) -> None:
        super().__init__(reason)
        self.status = status
        self.headers = headers or []


class RegistryError(ExecServerError):
    """The registry refused, could not be reached, or gave a useless answer."""


class RegistryBusy(RegistryError):
    """The same for now: asking again may help."""


class StartupError(ExecServerError):
    """The command line or the machine does not allow the server to start."""


class ConnectionLost(ExecServerError):
    """The connection ended before the answer came: whether the request was carried out is unknown.

    The session may go on: the next call waits until it has been resumed.
    """


class SessionLost(ExecServerError):
    """The session has ended or cannot be resumed, and all that it owned is gone."""


# ---- what the client raises beside that -------------------------------------------------


class ProcessLost(ExecServerError):
    """The server does not know a process any more, so its output and its exit code are gone."""


class StdinClosed(ExecServerError, BrokenPipeError):
    """A process takes no input: it was started without, its input was closed, or it has ended."""


class Unsupported(ExecServerError):
    """The server lacks `capability`; `hint` says what can be done instead."""

    def __init__(self, capability: str, hint: str) -> None:
        super().__init__(capability, hint)
        self.capability = capability
        self.hint = hint

    def __str__(self) -> str:
        return f"the server does not offer {self.capability}: {self.hint}"


def os_error_text(error: OSError) -> str:
    """The text of an operating system error as the reference words it."""
    if error.errno is None:
        return str(error)
    text = _MUSL_TEXTS.get(error.errno) or error.strerror or "Unknown error"
    return f"{text} (os error {error.errno})"


def rpc_error_from_os(error: OSError) -> RpcError:
    """The wire error of a failed file operation."""
    text = os_error_text(error)
    if error.errno == _ENOENT:
        return NotFound(text)
    if error.errno in _INVALID_REQUEST_ERRNOS:
        return InvalidRequest(text)
    return InternalError(text)
