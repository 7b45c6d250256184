"""Environments, processes, HTTP responses, ports and servers without `async`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar, Unpack, cast

from exec_server.client import (
    commands,
    environment,
    http,
    local_server,
    port_forwarding,
    process,
    shell_session,
)
from exec_server.client import connect as client_connect
from exec_server.client.arguments import AnyPath
from exec_server.client.commands import RunOptions
from exec_server.client.connect import ConnectOptions
from exec_server.client.results import Chunk, ConnectionStatus, Line, Result, RunProgress
from exec_server.errors import SessionLost
from exec_server.protocol.process import ProcessId
from exec_server.protocol.sandbox import Denial
from exec_server.protocol.session import Capabilities, EnvironmentInfo
from exec_server.sync.files import Files
from exec_server.sync.thread import (
    CANCEL_SECONDS,
    Attribute,
    Blocking,
    BlockingHandle,
    LoopThread,
    blocking,
    iterate,
    wrapped,
)

P = ParamSpec("P")
T = TypeVar("T")

# Output that waits for the calling thread; more would only make it later. The command waits then.
QUEUED_BYTES: Final = 1_048_576


# Processes and HTTP responses without `async`.
class Process(BlockingHandle[process.Process]):
    """A running command; `close`, or leaving its `with`, kills it with all its descendants.

    A detached one is left running.
    """

    def __iter__(self) -> Iterator[Chunk]:
        output = aiter(self._inner)  # the output is wanted while this generator lives
        while chunks := self._thread.call(output.read_some):
            yield from chunks

    def lines(self) -> Iterator[Line]:
        """The output by lines: texts without their ends, each of one stream."""
        return iterate(self._thread, self._inner.lines())

    id = Attribute[ProcessId]()
    pid = Attribute[int | None]()
    name = Attribute[str | None]()
    argv = Attribute[tuple[str, ...]]()
    exit_code = Attribute[int | None]()
    returncode = Attribute[int | None]()
    is_over = Attribute[bool]()
    sandbox_denied = Attribute[bool]()
    sandbox_denial = Attribute[Denial | None]()
    lost_bytes = Attribute[int]()
    read_some = blocking(process.Process.read_some)
    collect = blocking(process.Process.collect)
    read_until = blocking(process.Process.read_until)
    expect = blocking(process.Process.expect)
    wait_for_output = blocking(process.Process.wait_for_output)
    write = blocking(process.Process.write)
    close_stdin = blocking(process.Process.close_stdin)
    resize = blocking(process.Process.resize)
    screen = blocking(process.Process.screen)
    interrupt = blocking(process.Process.interrupt)
    signal = blocking(process.Process.signal)
    terminate = blocking(process.Process.terminate)
    kill = blocking(process.Process.kill)
    wait = blocking(process.Process.wait)


class ShellSession(BlockingHandle[shell_session.ShellSession]):
    """A shell with its state; `close`, or leaving its `with`, kills it."""

    run = blocking(shell_session.ShellSession.run)


class ResultStream(BlockingHandle[commands.ResultStream]):
    """The results of several commands as they come.

    Leaving the loop or the block, or `close` in any thread, kills the commands that run.
    """

    def __iter__(self) -> Iterator[RunProgress]:
        try:
            yield from iterate(self._thread, self._inner)
        finally:
            self.close()  # the loop was left, or its call cancelled


class HttpStream(BlockingHandle[http.HttpStream]):
    """A response with a streamed body, for `with` or `close`; iterating gives its pieces."""

    def __iter__(self) -> Iterator[bytes]:
        return iterate(self._thread, self._inner)

    status = Attribute[int]()
    headers = Attribute[tuple[tuple[str, str], ...]]()

    def header(self, name: str) -> str | None:
        return self._inner.header(name)


# Forwarded ports without `async`.
class PortForward(BlockingHandle[port_forwarding.PortForward]):
    """A local port that leads to one of the server's machine."""

    remote_port = Attribute[int]()
    host = Attribute[str | None]()
    port = Attribute[int]()
    url = Attribute[str]()


class ReversePort(BlockingHandle[port_forwarding.ReversePort]):
    """A port of the server's machine that leads to a local one."""

    local_port = Attribute[int]()
    port = Attribute[int]()
    url = Attribute[str]()


class Environment(Blocking[environment.Environment]):
    """A machine with an exec-server, connected by `connect` or `local`.

    Use it with `with`, or `close` it.
    """

    def __init__(
        self, make: Callable[[], environment.Environment], *, has_children: bool = False
    ) -> None:
        """Connect now, in a thread; `has_children` if that starts a program."""
        thread = LoopThread(make, has_children=has_children)
        super().__init__(thread, thread.value)
        self._files: Files | None = None

    @classmethod
    def local(cls, *arguments: str, env: Mapping[str, str] | None = None) -> Environment:
        """This machine, through a server on pipes that ends with the environment."""
        return cls(lambda: environment.Environment.local(*arguments, env=env), has_children=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.close(is_interrupted=kind is KeyboardInterrupt)

    def close(self) -> None:
        """Kill all processes and close the connection; running calls raise SessionLost."""
        self._thread.close()

    def cancel_calls(self) -> None:
        """Cancel the running calls of all threads: each raises Cancelled.

        Commands that they have started are killed; processes of `start` go on, and so does the
        environment. For any thread, such as that of a button or of a watchdog; does not wait.
        """
        self._thread.cancel_calls()

    @property
    def files(self) -> Files:
        if self._files is None:
            self._files = Files(self._thread, self._inner.files)
        return self._files

    is_open = Attribute[bool]()
    info = Attribute[EnvironmentInfo]()
    cwd = Attribute[str]()
    home = Attribute[str | None]()
    temp_dir = Attribute[str]()
    capabilities = Attribute[Capabilities]()
    status = Attribute[ConnectionStatus]()

    async def awaited(
        self,
        method: Callable[Concatenate[environment.Environment, P], Coroutine[Any, Any, T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Await a method of the async client in a program's own loop; cancelling it cancels that.

        `await env.awaited(exec_server.Environment.run, ["make"])` kills the command if the task is
        cancelled, which a blocking call in a thread would not.
        """
        return await self._thread.call_from_loop(method, self._inner, *args, **kwargs)

    reconnect = blocking(environment.Environment.reconnect)
    call = blocking(environment.Environment.call)
    run = blocking(environment.Environment.run)
    shell = blocking(environment.Environment.shell)
    python = blocking(environment.Environment.python)
    run_many = blocking(environment.Environment.run_many)
    wait_for_port = blocking(environment.Environment.wait_for_port)
    processes = blocking(environment.Environment.processes)
    detached_processes = blocking(environment.Environment.detached_processes)
    http = blocking(environment.Environment.http)

    run_each = wrapped(environment.Environment.run_each, ResultStream)
    start = wrapped(environment.Environment.start, Process)
    attach = wrapped(environment.Environment.attach, Process)
    shell_session = wrapped(environment.Environment.shell_session, ShellSession)
    http_stream = wrapped(environment.Environment.http_stream, HttpStream)
    forward_port = wrapped(environment.Environment.forward_port, PortForward)
    reverse_port = wrapped(environment.Environment.reverse_port, ReversePort)


def _with_arguments_of(make: Callable[P, object]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Give a function the arguments of another one, for type checkers and `inspect.signature`."""

    def decorate(function: Callable[..., T]) -> Callable[P, T]:
        return cast(Callable[P, T], functools.update_wrapper(function, make, assigned=()))

    return decorate


@_with_arguments_of(client_connect.connect)
def connect(target: str | None = None, **options: Unpack[ConnectOptions]) -> Environment:
    """Connect now; arguments and exceptions are those of `exec_server.connect`.

    `on_network_request` is called in the thread of the connection.
    """
    return Environment(
        lambda: client_connect.connect(target, **options),
        has_children=client_connect.starts_program(target, options),
    )


class RunningServer:
    """A server that runs until `close`, or until its `with` is left."""

    def __init__(self, make: Callable[[], local_server.RunningServer]) -> None:
        """Start the server now, in a thread."""
        self._thread = LoopThread(make, has_children=True)

    def __repr__(self) -> str:
        return repr(self._thread.value).replace("<", "<sync.", 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server with all its processes."""
        self._thread.close()

    @property
    def is_open(self) -> bool:
        return self._thread.value.is_open

    @property
    def url(self) -> str:
        return self._thread.value.url

    @property
    def pid(self) -> int:
        return self._thread.value.pid


@_with_arguments_of(local_server.serve)
def serve(*args: Any, **kwargs: Any) -> RunningServer:
    """Start a server now; arguments and exceptions are those of `exec_server.serve`."""
    return RunningServer(lambda: local_server.serve(*args, **kwargs))


# `run(on_output=…)` calls back in the loop's thread, but notebooks assign output by thread, and a
# KeyboardInterrupt is raised in the main thread only.
def run_streamed(
    on: Environment,
    argv: Iterable[AnyPath],
    receive: Callable[[list[Chunk]], None],
    **options: Unpack[RunOptions],
) -> Result:
    """Run a command as `on.run` does; `receive` gets its output here, an exception kills it."""
    thread, inner = on._thread, on._inner
    run = _StreamedRun(inner, list(argv), options)
    try:
        thread.call(run.start)
        while chunks := thread.call(run.take):
            receive(chunks)
        return thread.call(run.result)
    except BaseException:
        with contextlib.suppress(SessionLost):  # and the command with it
            thread.call(run.cancel)
        raise


class _StreamedRun:
    """A run on the event loop, and the output that was not taken yet."""

    def __init__(
        self, env: environment.Environment, argv: list[AnyPath], options: RunOptions
    ) -> None:
        self._env = env
        self._argv = argv
        self._options = options
        self._future: asyncio.Future[Result] | None = None
        self._chunks: list[Chunk] = []
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()

    async def start(self) -> None:
        self._future = self._env.session.spawn(self._run())
        self._future.add_done_callback(lambda _: self._changed.set())

    async def _run(self) -> Result:
        options: RunOptions = {**self._options, "on_output": self._queue}
        try:
            return await self._env.run(self._argv, **options)
        finally:
            self._ended.set()

    async def _queue(self, chunk: Chunk) -> None:
        while sum(len(each.data) for each in self._chunks) >= QUEUED_BYTES:
            self._changed.clear()
            await self._changed.wait()
        self._chunks.append(chunk)
        self._changed.set()

    async def take(self) -> list[Chunk]:
        """The next output; empty if the command has ended."""
        assert self._future is not None
        while not self._chunks and not self._future.done():
            self._changed.clear()
            await self._changed.wait()
        taken, self._chunks = self._chunks, []
        self._changed.set()
        return taken

    async def result(self) -> Result:
        assert self._future is not None
        return await self._future

    async def cancel(self) -> None:
        """Kill the command if it runs; an unreachable server cannot be told so."""
        if self._future is None or self._future.done():
            return
        self._future.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_SECONDS):
                await self._ended.wait()
