"""Environment: everything that can be done on the machine of one server."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from exec_server.client.dialers import Dialer
from exec_server.client.files import Files
from exec_server.client.http import Headers, HttpStream, fetch
from exec_server.client.launch import AnySandbox, Launcher, words_of
from exec_server.client.places import AnyPath, Places
from exec_server.client.process import Process
from exec_server.client.processes import Processes
from exec_server.client.program import StdioDialer
from exec_server.client.results import Response, Result
from exec_server.client.running import OUTPUT_BYTES, Run
from exec_server.client.session import CLIENT_NAME, ClientSession
from exec_server.client.traffic import Traffic
from exec_server.errors import Unsupported
from exec_server.protocol.method import Call
from exec_server.protocol.process import LIST, Listed
from exec_server.protocol.session import Capabilities, EnvironmentInfo

P = TypeVar("P")
R = TypeVar("R")

# The attributes that an environment gets when it is entered.
_MADE = frozenset({"files", "_traffic", "_processes", "_launcher"})


class Environment:
    """A machine with an exec-server, for `async with`; `connect` and `local` make one.

    Entering connects; it raises ConnectFailed, RegistryError or RpcError. Leaving kills what
    was started and still runs, and closes the connection. In between a lost connection is made
    again and the session resumed, without anybody noticing but for the time that it takes. Calls
    that may not be repeated raise ConnectionLost then. When a session cannot be resumed
    everything raises SessionLost.
    """

    files: Files
    """Reads, writes and transfers files."""

    def __init__(self, dialer: Dialer, *, client_name: str = CLIENT_NAME) -> None:
        self.session = ClientSession(dialer, client_name=client_name)
        """The layer below: subscribe to notifications, answer requests of the server."""
        self._tasks = asyncio.TaskGroup()
        self._exits = AsyncExitStack()

    @classmethod
    def local(cls, *arguments: str, env: Mapping[str, str] | None = None) -> Environment:
        """This machine, through a server of its own that ends with the environment; no socket.

        `arguments` are flags of the server, `env` is its environment (default: ours). It is a
        process of its own because a server reaps every child of the process it is in.
        """
        words = [sys.executable, "-m", "exec_server", "--listen", "stdio", *arguments]
        return cls(StdioDialer(words, env))

    async def __aenter__(self) -> Self:
        await self._exits.enter_async_context(self.session)
        await self._tasks.__aenter__()
        self._traffic = Traffic(self.session, self._tasks)
        self._processes = Processes(self._traffic)
        places = Places(self.info)
        self._launcher = Launcher(places, self.capabilities)
        self.files = Files(self._traffic, places, self.capabilities, self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._processes.close()
        finally:
            try:
                self._traffic.close()
                await self.session.close()  # so that no task waits for an answer
                await self._tasks.__aexit__(None, None, None)
            finally:
                await self._exits.aclose()

    if not TYPE_CHECKING:  # which would take every name for right

        def __getattr__(self, name: str) -> object:
            """For what is not there: so no method needs to look whether it was entered."""
            if name in _MADE:
                raise RuntimeError(
                    "the environment is not connected: use it inside of its `async with`"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def info(self) -> EnvironmentInfo:
        """What the server says of its machine: shell, directories, version."""
        return self._traffic.session.environment_info

    @property
    def capabilities(self) -> Capabilities:
        """What the server offers beyond what all do."""
        return self.info.capabilities

    async def call(self, call: Call[P, R], params: P, *, is_retryable: bool = False) -> R:
        """Any method of the protocol, with its structs from `exec_server.protocol`.

        A request that `is_retryable` is sent again when its answer was lost with a connection;
        otherwise that raises ConnectionLost.
        """
        return await self._traffic.call(call, params, is_retryable=is_retryable)

    # ---- processes --------------------------------------------------------------------

    async def run(
        self,
        argv: Iterable[AnyPath],
        *,
        cwd: AnyPath | None = None,
        env: Mapping[str, AnyPath] | None = None,
        clean_env: bool = False,
        timeout: float | None = None,  # noqa: ASYNC109 - whose end has an output to carry
        input: bytes | None = None,  # noqa: A002 - as subprocess calls it
        sandbox: AnySandbox | None = None,
        tty: bool = False,
        check: bool = False,
        output_limit: int = OUTPUT_BYTES,
    ) -> Result:
        """Run a command to its end, and return its output and exit code.

        It runs in `cwd`, or where the server does, with the server's environment and `env` laid
        over it, or with nothing but `env` if that is to be `clean_env`. Without `input` its stdin
        is empty. A `sandbox` is "read-only", "workspace-write" (of `cwd`) or an object of the
        protocol. Raises RpcError if it cannot be started (ProgramNotFound if there is no such
        program or `cwd`), Timeout with its output until then after `timeout` seconds, and
        CommandFailed if its exit code is not 0 and `check` is set. Cancelled or failed in any
        way, it is killed with all its descendants.
        """
        if input is not None and not isinstance(input, bytes | bytearray | memoryview):
            raise TypeError(f"input must be bytes, not {type(input).__name__}")
        data = bytes(input) if input else None
        words = words_of(argv)
        params = self._launcher.params(
            words,
            cwd=cwd,
            env=env,
            clean_env=clean_env,
            tty=tty,
            size=None,
            stdin=False,
            sandbox=sandbox,
        )
        if data is not None and not tty:
            params = self._launcher.with_input(params, len(data))
        run = Run(
            self._traffic,
            self._processes,
            params,
            argv=tuple(words),
            name=_name(words, cwd),
            output_limit=output_limit,
        )
        can_close = self.capabilities.process_close_stdin or tty
        return await run.result(data=data, can_close=can_close, seconds=timeout, check=check)

    def start(
        self,
        argv: Iterable[AnyPath],
        *,
        cwd: AnyPath | None = None,
        env: Mapping[str, AnyPath] | None = None,
        clean_env: bool = False,
        tty: bool = False,
        size: tuple[int, int] | None = None,
        stdin: bool = False,
        sandbox: AnySandbox | None = None,
    ) -> Process:
        """A command that runs while its `async with` lasts; see Process.

        `size` is rows and columns of its terminal, `stdin` whether a command without one can be
        written to; the rest is as in `run`.
        """
        words = words_of(argv)
        params = self._launcher.params(
            words,
            cwd=cwd,
            env=env,
            clean_env=clean_env,
            tty=tty,
            size=size,
            stdin=stdin,
            sandbox=sandbox,
        )
        return Process(
            self._traffic,
            self._processes,
            self.capabilities,
            params,
            argv=tuple(words),
            name=_name(words, cwd),
        )

    async def processes(self) -> list[Listed]:
        """All processes of this session that the server knows; raises Unsupported if it cannot."""
        if not self.capabilities.process_list:
            raise Unsupported("processList", "it cannot say what runs; keep what start() returned")
        return (await self._traffic.call(LIST, None, is_retryable=True)).processes

    # ---- HTTP -------------------------------------------------------------------------

    async def http(
        self,
        method: str,
        url: str,
        *,
        headers: Headers = (),
        body: bytes | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - it is the server that keeps it
        follow_redirects: bool = True,
    ) -> Response:
        """Have the server make an HTTP request from its machine; any status is an answer.

        Raises RpcError if there is none, and Unsupported if the server makes no requests.
        """
        return await fetch(
            self._traffic,
            method,
            url,
            headers=headers,
            body=body,
            timeout=timeout,
            follow_redirects=follow_redirects,
        )

    def http_stream(
        self,
        method: str,
        url: str,
        *,
        headers: Headers = (),
        body: bytes | None = None,
        timeout: float | None = None,
        follow_redirects: bool = True,
    ) -> HttpStream:
        """The same for `async with`: status and headers, and the body piece by piece."""
        return HttpStream(
            self._traffic,
            method,
            url,
            headers=headers,
            body=body,
            timeout=timeout,
            follow_redirects=follow_redirects,
        )


def _name(words: list[str], cwd: AnyPath | None) -> str:
    """What a command is called if it cannot be started: either of the two may be missing."""
    return words[0] if cwd is None else f"{words[0]} in {os.fspath(cwd)}"
