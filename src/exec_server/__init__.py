"""Run commands and change files on another machine: a daemon for coding agents, and its client.

`exec-server --listen ws://127.0.0.1:7700` serves a machine; `connect` gives an Environment of it,
and `Environment.local()` one of this machine, with a server of its own:

    import asyncio
    from exec_server import Environment  # or connect("ws://127.0.0.1:7700")

    async def main():
        async with Environment.local() as env:
            result = await env.run(["uname", "-s"], timeout=10, check=True)
            print(result.text, result.exit_code)
            await env.files.write_text("/tmp/hello.txt", "hello")
            async with env.start(["tail", "-n1", "-f", "/tmp/hello.txt"]) as process:
                print(await process.read_until("hello"))
            await env.files.remove("/tmp/hello.txt")

    asyncio.run(main())

Where to look next:

    exec_server.sync    the same without async, for scripts, threads and notebooks
    Environment         commands, files, ports and HTTP requests: help(exec_server.Environment)
    Files, Process      env.files, and what env.start() gives
    ExecServerError     the base of all exceptions; FileError is an OSError, Timeout a TimeoutError
    exec-server --help  the command line: exec, cp, ls, grep, port, mcp and others

docs/tutorial.md in the repository is a tour, docs/client.md the guide with examples of everything.
"""

# The names are imported on first use, so that the daemon starts without the client.

# Nothing else is imported here: with `python -m` the working directory comes first until `__main__`
# drops it, and it may have a file of any name, also of `__future__`. The interpreter has loaded
# `importlib` by then.
from importlib import import_module

TYPE_CHECKING = False  # not that of typing, whose import takes long
if TYPE_CHECKING:
    from exec_server.client.arguments import AnyNetworkProxy, AnyPath, AnySandbox
    from exec_server.client.commands import (
        Command,
        OnOutput,
        OutputLimit,
        OutputTarget,
        ResultStream,
        RunOptions,
    )
    from exec_server.client.connect import ConnectOptions, connect
    from exec_server.client.environment import Environment, NetworkRequest, OnNetworkRequest
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
    from exec_server.client.http import Headers, HttpStream
    from exec_server.client.local_server import RunningServer, serve
    from exec_server.client.output import Lines, Pattern, PatternMatch
    from exec_server.client.port_forwarding import PortForward, ReversePort
    from exec_server.client.process import DetachedProcess, OutputIterator, Process
    from exec_server.client.results import (
        ChangedFile,
        Chunk,
        ConnectionStatus,
        DiskUsage,
        Entry,
        FileChange,
        FileContent,
        Found,
        GrepCount,
        GrepMatch,
        Line,
        NotCopied,
        Planned,
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
    from exec_server.client.transfer.archive import AnyArchive
    from exec_server.client.transfer.open_file import FileAppender, FileReader, FileWriter
    from exec_server.client.transfer.text_file import TextReader, TextWriter
    from exec_server.errors import (
        Cancelled,
        CertificateRejected,
        ConnectFailed,
        ConnectionLost,
        EditAmbiguous,
        EditNotFound,
        ExecServerError,
        HandshakeReset,
        InternalError,
        InvalidParams,
        InvalidRequest,
        MalformedAnswer,
        MethodNotFound,
        PatchDoesNotApply,
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
    from exec_server.protocol.decoding import Call
    from exec_server.protocol.process import (
        DetachedProcessInfo,
        EndedBy,
        ProcessId,
        ProcessInfo,
        Stream,
    )
    from exec_server.protocol.sandbox import Denial, Operation
    from exec_server.protocol.session import Capabilities, EnvironmentInfo, Shell

__version__ = "0.3.0.dev0"

__all__ = [
    "AlreadyExists",
    "AnyArchive",
    "AnyNetworkProxy",
    "AnyPath",
    "AnySandbox",
    "Busy",
    "Call",
    "Cancelled",
    "Capabilities",
    "CertificateRejected",
    "ChangedFile",
    "Chunk",
    "Command",
    "CommandDenied",
    "CommandFailed",
    "ConnectFailed",
    "ConnectOptions",
    "ConnectionLost",
    "ConnectionStatus",
    "CrossDevice",
    "Denial",
    "DetachedProcess",
    "DetachedProcessInfo",
    "DiskUsage",
    "EditAmbiguous",
    "EditNotFound",
    "EndedBy",
    "Entry",
    "Environment",
    "EnvironmentInfo",
    "ExecServerError",
    "FileAppender",
    "FileChange",
    "FileContent",
    "FileError",
    "FileReader",
    "FileWatch",
    "FileWriter",
    "Files",
    "Found",
    "GrepCount",
    "GrepMatch",
    "HandshakeReset",
    "Headers",
    "HttpStream",
    "InternalError",
    "InvalidParams",
    "InvalidRequest",
    "IsADirectory",
    "Line",
    "Lines",
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
    "OnNetworkRequest",
    "OnOutput",
    "Operation",
    "OutputIterator",
    "OutputLimit",
    "OutputTarget",
    "PatchDoesNotApply",
    "Pattern",
    "PatternMatch",
    "PatternNotFound",
    "PermissionDenied",
    "Planned",
    "PortError",
    "PortForward",
    "Process",
    "ProcessId",
    "ProcessInfo",
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
    "RunOptions",
    "RunProgress",
    "RunningServer",
    "SandboxDenied",
    "Screen",
    "SessionAttached",
    "SessionLost",
    "Shell",
    "ShellResult",
    "ShellSession",
    "StartupError",
    "Stat",
    "StdinClosed",
    "Stream",
    "TextReader",
    "TextWriter",
    "Timeout",
    "Transfer",
    "Unsupported",
    "WorkingDirectoryNotFound",
    "connect",
    "serve",
]

# Modules of names; the others are in `errors`.
_MODULES = {
    "client.arguments": ("AnyNetworkProxy", "AnyPath", "AnySandbox"),
    "client.commands": (
        *("Command", "OnOutput", "OutputLimit", "OutputTarget", "ResultStream", "RunOptions"),
    ),
    "client.connect": ("ConnectOptions", "connect"),
    "client.environment": ("Environment", "NetworkRequest", "OnNetworkRequest"),
    "client.exceptions": (
        *("AlreadyExists", "Busy", "CommandDenied", "CommandFailed", "CrossDevice", "FileError"),
        *("IsADirectory", "LinkLoop", "NameTooLong", "NoSpace", "NotADirectory", "NotAFile"),
        *("NotAllCopied", "NotEmpty", "NotFound", "PatternNotFound", "PermissionDenied"),
        *("PortError", "ProgramNotFound", "ReadOnly", "SandboxDenied", "Timeout"),
        *("WorkingDirectoryNotFound",),
    ),
    "client.file_watch": ("FileWatch",),
    "client.files": ("Files",),
    "client.http": ("Headers", "HttpStream"),
    "client.local_server": ("RunningServer", "serve"),
    "client.output": ("Lines", "Pattern", "PatternMatch"),
    "client.port_forwarding": ("PortForward", "ReversePort"),
    "client.process": ("DetachedProcess", "OutputIterator", "Process"),
    "client.results": (
        *("ChangedFile", "Chunk", "ConnectionStatus", "DiskUsage", "Entry", "FileChange"),
        *("FileContent", "Found", "GrepCount", "GrepMatch", "Line", "NotCopied", "Planned"),
        *("Progress", "Response", "Result", "RunProgress", "Screen", "ShellResult", "Stat"),
        *("Transfer",),
    ),
    "client.shell_session": ("ShellSession",),
    "client.transfer.archive": ("AnyArchive",),
    "client.transfer.open_file": ("FileAppender", "FileReader", "FileWriter"),
    "client.transfer.text_file": ("TextReader", "TextWriter"),
    "protocol.decoding": ("Call",),
    "protocol.process": ("DetachedProcessInfo", "EndedBy", "ProcessId", "ProcessInfo", "Stream"),
    "protocol.sandbox": ("Denial", "Operation"),
    "protocol.session": ("Capabilities", "EnvironmentInfo", "Shell"),
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
