"""A daemon that runs processes and file operations for a coding agent, and a client for it.

The names of the client are imported on first use, so that the daemon starts without them.
"""

# Nothing else is imported here: with `python -m` the working directory comes first until `__main__`
# drops it, and it may have a file of any name, also of `__future__`. The interpreter has loaded
# `importlib` by then.
from importlib import import_module

TYPE_CHECKING = False  # not that of typing, whose import takes long
if TYPE_CHECKING:
    from exec_server.client.commands import Command, OutputLimit, ResultStream
    from exec_server.client.connect import connect
    from exec_server.client.environment import Environment, NetworkRequest
    from exec_server.client.exceptions import (
        AlreadyExists,
        Busy,
        CommandDenied,
        CommandFailed,
        CrossDevice,
        FileError,
        IsADirectory,
        LinkLoop,
        NameTooLong,
        NoSpace,
        NotADirectory,
        NotAFile,
        NotAllCopied,
        NotEmpty,
        NotFound,
        PatternNotFound,
        PermissionDenied,
        PortError,
        ProgramNotFound,
        ReadOnly,
        SandboxDenied,
        Timeout,
        WorkingDirectoryNotFound,
    )
    from exec_server.client.file_watch import FileWatch
    from exec_server.client.files import Files
    from exec_server.client.local_server import RunningServer, serve
    from exec_server.client.output import PatternMatch
    from exec_server.client.port_forwarding import PortForward, ReversePort
    from exec_server.client.process import DetachedProcess, Process
    from exec_server.client.results import (
        ChangedFile,
        Chunk,
        DiskUsage,
        Entry,
        FileChange,
        FileContent,
        Found,
        GrepMatch,
        Line,
        NotCopied,
        Progress,
        Response,
        Result,
        RunProgress,
        Screen,
        ShellResult,
        Stat,
        Transfer,
    )
    from exec_server.client.shell_session import ShellSession
    from exec_server.errors import (
        Cancelled,
        CertificateRejected,
        ConnectFailed,
        ConnectionLost,
        ExecServerError,
        HandshakeReset,
        InternalError,
        InvalidParams,
        InvalidRequest,
        MalformedAnswer,
        MethodNotFound,
        ProcessLost,
        RegistryError,
        RegistryUnavailable,
        RegistryUnreachable,
        RpcError,
        SessionAttached,
        SessionLost,
        StartupError,
        StdinClosed,
        Unsupported,
    )

__version__ = "0.3.0.dev0"

__all__ = [
    "AlreadyExists",
    "Busy",
    "Cancelled",
    "CertificateRejected",
    "ChangedFile",
    "Chunk",
    "Command",
    "CommandDenied",
    "CommandFailed",
    "ConnectFailed",
    "ConnectionLost",
    "CrossDevice",
    "DetachedProcess",
    "DiskUsage",
    "Entry",
    "Environment",
    "ExecServerError",
    "FileChange",
    "FileContent",
    "FileError",
    "FileWatch",
    "Files",
    "Found",
    "GrepMatch",
    "HandshakeReset",
    "InternalError",
    "InvalidParams",
    "InvalidRequest",
    "IsADirectory",
    "Line",
    "LinkLoop",
    "MalformedAnswer",
    "MethodNotFound",
    "NameTooLong",
    "NetworkRequest",
    "NoSpace",
    "NotADirectory",
    "NotAFile",
    "NotAllCopied",
    "NotCopied",
    "NotEmpty",
    "NotFound",
    "OutputLimit",
    "PatternMatch",
    "PatternNotFound",
    "PermissionDenied",
    "PortError",
    "PortForward",
    "Process",
    "ProcessLost",
    "ProgramNotFound",
    "Progress",
    "ReadOnly",
    "RegistryError",
    "RegistryUnavailable",
    "RegistryUnreachable",
    "Response",
    "Result",
    "ResultStream",
    "ReversePort",
    "RpcError",
    "RunProgress",
    "RunningServer",
    "SandboxDenied",
    "Screen",
    "SessionAttached",
    "SessionLost",
    "ShellResult",
    "ShellSession",
    "StartupError",
    "Stat",
    "StdinClosed",
    "Timeout",
    "Transfer",
    "Unsupported",
    "WorkingDirectoryNotFound",
    "connect",
    "serve",
]

# Modules of names; the others are in `errors`.
_MODULES = {
    "client.connect": ("connect",),
    "client.environment": ("Environment", "NetworkRequest"),
    "client.exceptions": (
        *("AlreadyExists", "Busy", "CommandDenied", "CommandFailed", "CrossDevice", "FileError"),
        *("IsADirectory", "LinkLoop", "NameTooLong", "NoSpace", "NotADirectory", "NotAFile"),
        *("NotAllCopied", "NotEmpty", "NotFound", "PatternNotFound", "PermissionDenied"),
        *("PortError", "ProgramNotFound", "ReadOnly", "SandboxDenied", "Timeout"),
        "WorkingDirectoryNotFound",
    ),
    "client.file_watch": ("FileWatch",),
    "client.files": ("Files",),
    "client.local_server": ("RunningServer", "serve"),
    "client.commands": ("Command", "OutputLimit", "ResultStream"),
    "client.output": ("PatternMatch",),
    "client.port_forwarding": ("PortForward", "ReversePort"),
    "client.process": ("DetachedProcess", "Process"),
    "client.results": (
        *("ChangedFile", "Chunk", "DiskUsage", "Entry", "FileChange", "FileContent", "Found"),
        *("GrepMatch", "Line", "NotCopied", "Progress", "Response", "Result", "RunProgress"),
        *("Screen", "ShellResult", "Stat", "Transfer"),
    ),
    "client.shell_session": ("ShellSession",),
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = next((module for module, names in _MODULES.items() if name in names), "errors")
    value: object = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
