"""Detached commands without a server, for unit tests of the commands that use them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Generator
from types import ModuleType
from typing import Any

import pytest

from exec_server.client.results import Chunk
from exec_server.client.targets import Target
from exec_server.errors import ExecServerError, InvalidRequest
from exec_server.protocol.process import DetachedProcessInfo, ProcessId

TARGET = Target(label="box", url="ws://127.0.0.1:7700")


def listed(name: str = "web", **members: Any) -> DetachedProcessInfo:
    values: dict[str, Any] = {
        "argv": ["node", "app.js"],
        "tty": False,
        "running": True,
        "exit_code": None,
        "closed": False,
        "next_seq": 4,
        "pid": 7,
        "started_at_ms": 0,
        "attached": 1,
        "max_lifetime_ms": None,
        "idle_timeout_ms": None,
        "ended_by": None,
    }
    return DetachedProcessInfo(name, **(values | members))


class FakeProcess:
    """A DetachedProcess that has said some chunks and exits."""

    def __init__(self, environment: FakeEnvironment, name: str, after: int) -> None:
        self._environment = environment
        self.name = name
        self.after = after
        self.id = ProcessId("p")
        self.tty = False
        self.has_stdin = True
        self.lost_bytes = environment.lost_bytes
        self.calls: list[object] = []

    def __await__(self) -> Generator[Any, None, FakeProcess]:
        return self._open().__await__()

    async def _open(self) -> FakeProcess:
        if self._environment.failure is not None:
            raise self._environment.failure
        if self.name not in [each.name for each in self._environment.listed]:
            raise InvalidRequest(f"unknown detached process {self.name}")
        self._environment.opened.append(self)
        return self

    async def aclose(self) -> None:
        self.calls.append("aclose")

    async def read_some(self) -> list[Chunk]:
        chunks, self._environment.chunks = self._environment.chunks, []
        return chunks

    async def wait(self) -> int:
        return 3

    async def write(self, data: bytes) -> None:
        self.calls.append(data)

    async def terminate(self) -> None:
        self.calls.append("terminate")

    async def kill(self) -> None:
        self.calls.append("kill")

    async def signal(self, name: str | int) -> None:
        self.calls.append(name)
        if name == "NONSENSE":
            raise InvalidRequest("unknown signal")


class FakeEnvironment:
    """The detached processes of a server."""

    def __init__(self, *processes: DetachedProcessInfo) -> None:
        self.listed = list(processes)
        self.chunks: list[Chunk] = []
        self.lost_bytes = 0
        self.failure: ExecServerError | None = None
        self.opened: list[FakeProcess] = []
        self.started: list[tuple[list[str], dict[str, Any]]] = []
        self.answers: list[Any] = []
        self.asked: list[Any] = []
        self.info: Any = None
        self.session = self

    async def detached_processes(self) -> list[DetachedProcessInfo]:
        return self.listed

    def attach(self, name: str, *, after: int = 0) -> FakeProcess:
        return FakeProcess(self, name, after)

    def start(self, argv: list[str], **options: Any) -> FakeProcess:
        self.started.append((argv, options))
        self.listed.append(listed("new"))
        return FakeProcess(self, "new", 0)

    async def call(self, call: object, params: object, *, is_retryable: bool) -> Any:
        self.asked.append(params)
        return self.answers.pop(0)

    def open_in(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> FakeEnvironment:
        """Let `open_environment` of a module return this environment."""

        @contextlib.asynccontextmanager
        async def open_environment(
            target: Target, on_stderr: object = None, on_status: object = None
        ) -> AsyncIterator[FakeEnvironment]:
            assert target is TARGET
            yield self

        monkeypatch.setattr(module, "open_environment", open_environment)
        return self
