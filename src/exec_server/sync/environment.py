"""Environments and servers without `async`."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

from exec_server.client import connect as client_connect
from exec_server.client import environment, local_server
from exec_server.client.connect import ConnectOptions
from exec_server.client.local_server import DEFAULT_LISTEN
from exec_server.protocol.session import Capabilities, EnvironmentInfo
from exec_server.sync.files import Files
from exec_server.sync.ports import PortForward, ReversePort
from exec_server.sync.process import HttpStream, Process
from exec_server.sync.thread import Blocking, LoopThread, blocking, wrapped

P = ParamSpec("P")
T = TypeVar("T")


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

    @property
    def files(self) -> Files:
        if self._files is None:
            self._files = Files(self._thread, self._inner.files)
        return self._files

    @property
    def is_open(self) -> bool:
        return self._inner.is_open

    @property
    def info(self) -> EnvironmentInfo:
        return self._inner.info

    @property
    def cwd(self) -> str:
        return self._inner.cwd

    @property
    def home(self) -> str | None:
        return self._inner.home

    @property
    def temp_dir(self) -> str:
        return self._inner.temp_dir

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

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

    start = wrapped(environment.Environment.start, Process)
    attach = wrapped(environment.Environment.attach, Process)
    http_stream = wrapped(environment.Environment.http_stream, HttpStream)
    forward_port = wrapped(environment.Environment.forward_port, PortForward)
    reverse_port = wrapped(environment.Environment.reverse_port, ReversePort)


def connect(target: str | None = None, **options: Unpack[ConnectOptions]) -> Environment:
    """Connect now; arguments and exceptions are those of `exec_server.connect`.

    `on_network_request` is called in the thread of the connection.
    """
    return Environment(
        lambda: client_connect.connect(target, **options),
        has_children=isinstance(target, str) and target.startswith("stdio:"),
    )


class RunningServer:
    """A server that runs until `close`, or until its `with` is left."""

    def __init__(self, make: Callable[[], local_server.RunningServer]) -> None:
        """Start the server now, in a thread."""
        self._thread = LoopThread(make, has_children=True)

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


def serve(
    listen: str = DEFAULT_LISTEN,
    *arguments: str,
    token: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> RunningServer:
    """Start a server now; arguments and exceptions are those of `exec_server.serve`."""
    return RunningServer(
        lambda: local_server.serve(listen, *arguments, token=token, env=env, cwd=cwd)
    )
