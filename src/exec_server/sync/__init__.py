"""The client without `async`: the same names, for scripts, threads and notebooks.

    from exec_server import sync

    with sync.connect("ws://127.0.0.1:7700") as env:
        print(env.run(["uname", "-a"]).text)

Every connection has a thread with an event loop of its own, which performs the calls of any number
of threads. An exception during a call, such as the KeyboardInterrupt of Ctrl-C, cancels the call
and so kills the process that it had started.
"""

from exec_server.sync.environment import (
    Environment,
    HttpStream,
    PortForward,
    Process,
    ResultStream,
    ReversePort,
    RunningServer,
    ShellSession,
    connect,
    serve,
)
from exec_server.sync.files import FileReader, Files, FileWatch, FileWriter

__all__ = [
    "Environment",
    "FileReader",
    "FileWatch",
    "FileWriter",
    "Files",
    "HttpStream",
    "PortForward",
    "Process",
    "ResultStream",
    "ReversePort",
    "RunningServer",
    "ShellSession",
    "connect",
    "serve",
]
