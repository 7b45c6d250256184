"""fs/grep: the slots that all clients share, those of a connection, and ripgrep."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from exec_server.errors import InternalError, InvalidParams
from exec_server.protocol import files as wire
from exec_server.protocol.paths import PathUri
from exec_server.server.context import CONCURRENT_SEARCHES, CONNECTION_SEARCHES
from exec_server.server.handlers import files


class Scene:
    """A server whose searches end when the test says so; `running` names their connections."""

    def __init__(self) -> None:
        self.running: list[tuple[str, asyncio.Future[wire.GrepResult]]] = []
        self._server = SimpleNamespace(
            ripgrep=None,
            sandboxes=SimpleNamespace(files=None),
            search_slots=asyncio.Semaphore(CONCURRENT_SEARCHES),
        )

    def connect(self, name: str) -> Any:
        def in_thread(*_: object) -> asyncio.Future[wire.GrepResult]:
            self.running.append((name, asyncio.get_running_loop().create_future()))
            return self.running[-1][1]

        return SimpleNamespace(
            server=self._server,
            in_thread=in_thread,
            search_slots=asyncio.Semaphore(CONNECTION_SEARCHES),
        )

    async def names(self) -> list[str]:
        """The connections of the searches that run, once every task waits."""
        for _ in range(10):
            await asyncio.sleep(0)
        return [name for name, _ in self.running]

    def end(self) -> None:
        for _, future in self.running:
            future.set_result(wire.GrepResult([], False))
        self.running.clear()


def _grep(context: Any) -> Any:
    return files.grep(context, wire.GrepParams(PathUri.from_wire("/"), "x"))


def test_a_connection_leaves_a_slot_to_others() -> None:
    async def scene() -> None:
        scene = Scene()
        many, other = scene.connect("many"), scene.connect("other")
        async with asyncio.TaskGroup() as tasks:
            for _ in range(CONNECTION_SEARCHES + 2):
                tasks.create_task(_grep(many))
            assert await scene.names() == ["many"] * CONNECTION_SEARCHES
            tasks.create_task(_grep(other))
            assert await scene.names() == ["many"] * CONNECTION_SEARCHES + ["other"]
            scene.end()
            assert await scene.names() == ["many"] * 2
            scene.end()

    asyncio.run(scene())


def test_further_searches_of_all_clients_wait() -> None:
    async def scene() -> None:
        scene = Scene()
        async with asyncio.TaskGroup() as tasks:
            for index in range(CONCURRENT_SEARCHES + 1):
                tasks.create_task(_grep(scene.connect(str(index))))
            assert await scene.names() == list(map(str, range(CONCURRENT_SEARCHES)))
            scene.end()
            assert await scene.names() == [str(CONCURRENT_SEARCHES)]
            scene.end()

    asyncio.run(scene())


def test_a_search_of_a_client_that_has_gone_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    overs = []
    monkeypatch.setattr(files, "_search", lambda ripgrep, is_over, params: overs.append(is_over))

    async def scene() -> None:
        context = Scene().connect("x")
        context.in_thread = lambda perform, operation, params: (
            operation.function(params) or asyncio.get_running_loop().create_future()
        )
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(_grep(context))
            while not overs:
                await asyncio.sleep(0)
            assert not overs[0].is_set()
            task.cancel()
        assert overs[0].is_set()

    asyncio.run(scene())


def test_a_search_takes_no_user() -> None:
    async def scene() -> None:
        params = wire.GrepParams(PathUri.from_wire("/"), "x", user="ann")
        with pytest.raises(InvalidParams, match="fs/grep takes no user"):
            async with asyncio.timeout(5):
                await files.grep(Scene().connect("c"), params)

    asyncio.run(scene())


def test_a_search_only_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def choose(*_: object, reading: bool) -> NoReturn:
        asked.append(reading)
        raise InternalError("refused")

    monkeypatch.setattr(files, "choose_access", choose)

    async def scene() -> None:
        with pytest.raises(InternalError, match="refused"):
            await _grep(Scene().connect("c"))

    asyncio.run(scene())
    assert asked == [True]


def test_ripgrep_is_used_if_the_system_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []

    def run(argv: list[str], *_: object, env: dict[str, str]) -> None:
        runs.append((argv[0], env))

    monkeypatch.setattr(files, "run_helper", run)
    params = wire.GrepParams(PathUri.from_text(str(tmp_path)), "x")
    for program in (None, "/usr/bin/rg"):
        assert files._search(program, threading.Event(), params) == wire.GrepResult([], False)
    assert runs == [("/usr/bin/rg", {"LC_ALL": "C.UTF-8"})]
