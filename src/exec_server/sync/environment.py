"""Environments and servers without `async`."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Mapping
from typing import Self

from exec_server import embedding
from exec_server.client import connecting, environment
from exec_server.client.session import CLIENT_NAME
from exec_server.embedding import DEFAULT_LISTEN, RunningServer
from exec_server.protocol.session import Capabilities, EnvironmentInfo
from exec_server.sync.files import Files
from exec_server.sync.process import HttpStream, Process
from exec_server.sync.thread import Blocking, LoopThread, blocking, wrapped


class Environment(Blocking[environment.Environment]):
    """A machine with an exec-server; `connect` and `local` give one that is connected.

    For `with`, or until `close`.
    """

    def __init__(
        self, make: Callable[[], environment.Environment], *, has_children: bool = False
    ) -> None:
        """Connect now, in a thread; `has_children` if that is to a program that is started."""
        thread = LoopThread(make, has_children=has_children)
        super().__init__(thread, thread.value)
        self.files = Files(thread, thread.value.files)

    @classmethod
    def local(cls, *arguments: str, env: Mapping[str, str] | None = None) -> Environment:
        """This machine, through a server of its own that ends with the environment."""
        return cls(lambda: environment.Environment.local(*arguments, env=env), has_children=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill what still runs and close the connection; calls under way raise SessionLost."""
        self._thread.close()

    @property
    def info(self) -> EnvironmentInfo:
        return self._inner.info

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    call = blocking(environment.Environment.call)
    run = blocking(environment.Environment.run)
    processes = blocking(environment.Environment.processes)
    http = blocking(environment.Environment.http)

    start = wrapped(environment.Environment.start, Process)
    http_stream = wrapped(environment.Environment.http_stream, HttpStream)


def connect(
    target: str | None = None,
    *,
    token: str | None = None,
    registry: str | None = None,
    environment_id: str | None = None,
    executor_key: str | None = None,
    account_id: str | None = None,
    tls: ssl.SSLContext | None = None,
    allow_insecure_token: bool = False,
    client_name: str = CLIENT_NAME,
) -> Environment:
    """Connect now; arguments and exceptions are those of `exec_server.connect`."""
    return Environment(
        lambda: connecting.connect(
            target,
            token=token,
            registry=registry,
            environment_id=environment_id,
            executor_key=executor_key,
            account_id=account_id,
            tls=tls,
            allow_insecure_token=allow_insecure_token,
            client_name=client_name,
        ),
        has_children=target is not None and target.startswith("stdio:"),
    )


class serve:  # noqa: N801 - it is used like the function of the same name
    """Run a server, for `with`; the arguments are those of `exec_server.serve`."""

    def __init__(
        self,
        listen: str = DEFAULT_LISTEN,
        *arguments: str,
        token: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> None:
        self._make = lambda: embedding.serve(listen, *arguments, token=token, env=env, cwd=cwd)

    def __enter__(self) -> RunningServer:
        self._thread = LoopThread(self._make, has_children=True)
        return self._thread.value

    def __exit__(self, *_: object) -> None:
        self._thread.close()
