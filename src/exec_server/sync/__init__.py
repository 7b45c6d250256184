"""The client without `async`: the same names, for scripts, threads and notebooks.

    from exec_server import sync

    with sync.Environment.local() as env:  # or sync.connect("ws://127.0.0.1:7700")
        result = env.run(["uname", "-s"], timeout=10, check=True)
        print(result.text, result.exit_code)
        env.files.write_text("/tmp/hello.txt", "hello")
        with env.start(["tail", "-n1", "-f", "/tmp/hello.txt"]) as process:
            print(process.read_until("hello"))
        env.files.remove("/tmp/hello.txt")

`close` takes the place of `aclose`, and `for` and `with` that of `async for` and `async with`;
results and exceptions are those of `exec_server`, whose help explains them. help(sync.Environment)
and help(sync.Files) list what there is.

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
from exec_server.sync.files import (
    FileAppender,
    FileReader,
    Files,
    FileWatch,
    FileWriter,
    TextReader,
    TextWriter,
)

__all__ = [
    "Environment",
    "FileAppender",
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
    "TextReader",
    "TextWriter",
    "connect",
    "serve",
]
