"""A daemon that runs processes and file operations for a coding agent, and a client for it.

The client's names are imported when they are first used, so that the daemon starts without them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exec_server.client.connecting import connect
    from exec_server.client.environment import Environment
    from exec_server.client.failures import (
        CommandDenied,
        CommandFailed,
        NotAllCopied,
        SandboxDenied,
        Timeout,
    )
    from exec_server.client.files import Files
    from exec_server.client.process import Process
    from exec_server.client.results import (
        Chunk,
        Entry,
        NotCopied,
        Progress,
        Response,
        Result,
        Stat,
        Transfer,
    )
    from exec_server.embedding import RunningServer, serve
    from exec_server.errors import (
        ConnectFailed,
        ConnectionLost,
        ExecServerError,
        NotFound,
        ProcessLost,
        ProgramNotFound,
        RegistryError,
        RpcError,
        SessionLost,
        StartupError,
        StdinClosed,
        Unsupported,
    )

__version__ = "0.1.0"

__all__ = [
    "Chunk",
    "CommandDenied",
    "CommandFailed",
    "ConnectFailed",
    "ConnectionLost",
    "Entry",
    "Environment",
    "ExecServerError",
    "Files",
    "NotAllCopied",
    "NotCopied",
    "NotFound",
    "Process",
    "ProcessLost",
    "ProgramNotFound",
    "Progress",
    "RegistryError",
    "Response",
    "Result",
    "RpcError",
    "RunningServer",
    "SandboxDenied",
    "SessionLost",
    "StartupError",
    "Stat",
    "StdinClosed",
    "Timeout",
    "Transfer",
    "Unsupported",
    "connect",
    "serve",
]

_FAILURES = ("CommandDenied", "CommandFailed", "NotAllCopied", "SandboxDenied", "Timeout")
_RESULTS = ("Chunk", "Entry", "NotCopied", "Progress", "Response", "Result", "Stat", "Transfer")
_MODULES = {
    "connect": "client.connecting",
    "Environment": "client.environment",
    "Files": "client.files",
    "Process": "client.process",
    "RunningServer": "embedding",
    "serve": "embedding",
}
_MODULES |= dict.fromkeys(_RESULTS, "client.results") | dict.fromkeys(_FAILURES, "client.failures")


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_MODULES.get(name, 'errors')}")
    value: object = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
