"""fs/watch: the changes of a watch as notifications, its end, and the limit of a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from exec_server.errors import InvalidRequest, RpcError
from exec_server.filesystem.watch import Batch, ChangeWatch
from exec_server.protocol import files as wire
from exec_server.protocol.files import CanonicalizeResult
from exec_server.protocol.paths import PathUri
from exec_server.server.context import ConnectionContext, LazyEvent, ServerContext
from exec_server.server.handlers import files


class Policy:
    """A policy that limits reads, and a worker that finds every path."""

    def __init__(self, *, is_trusted_read: bool = False) -> None:
        self.is_trusted_read = is_trusted_read

    def perform(self, call: object, params: Any) -> CanonicalizeResult:
        return CanonicalizeResult(f"{params.path.uri}/real")

    def explain(self, params: object, error: OSError) -> RpcError:
        return RpcError(f"explained {error.errno}")

    def visible(self, paths: list[str]) -> list[str]:
        return paths


class World:
    """A context without a connection; threads run at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, policy: Policy | None = None) -> None:
        monkeypatch.setattr(files, "GATHER_SECONDS", 0)
        monkeypatch.setattr(ChangeWatch, "open", self._open)
        self.opened: list[tuple[str, object]] = []
        self.failure: Exception | None = None
        self.sent: asyncio.Queue[wire.ChangedParams] = asyncio.Queue()
        self.tasks: list[asyncio.Task[None]] = []
        nothing = cast(Any, None)
        server = ServerContext(
            environment=nothing,
            variables={},
            login_shell="",
            file_threads=cast(Any, SimpleNamespace(run=self._run)),
            decode_threads=nothing,
            inotify=lambda: cast(Any, SimpleNamespace(remove_listener_later=lambda _: None)),
            sandboxes=cast(
                Any, SimpleNamespace(files=SimpleNamespace(policy_for=lambda *_, **__: policy))
            ),
            sessions=nothing,
            detached=nothing,
            tasks=nothing,
        )
        writable = LazyEvent()
        writable.set()
        self.context = ConnectionContext(server, nothing, self._notify, self._start, writable)

    def _open(self, path: str, visible: object) -> None:
        if self.failure is not None:
            raise self.failure
        self.opened.append((path, visible))

    def _notify(self, notice: object, params: object) -> None:
        assert isinstance(params, wire.ChangedParams)
        self.sent.put_nowait(params)

    def _run(self, function: Callable[..., Any], *arguments: object) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> bool:
        self.tasks.append(asyncio.get_running_loop().create_task(coroutine))
        return True

    async def watch(self, watch_id: int = 1, sandbox: Any = None) -> ChangeWatch:
        path = PathUri.from_wire("/w")
        await files.watch(self.context, wire.WatchParams(watch_id, path, sandbox=sandbox))
        return self.context.change_watches[watch_id]

    async def end(self) -> None:
        await asyncio.wait(self.tasks)


def play(
    monkeypatch: pytest.MonkeyPatch,
    scene: Callable[[World], Coroutine[Any, Any, None]],
    policy: Policy | None = None,
) -> None:
    async def run() -> None:
        await scene(World(monkeypatch, policy))

    asyncio.run(run())


def test_changes_are_sent_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(world: World) -> None:
        watched = await world.watch(7)
        watched._changes.add("b", "created")
        watched._changes.add("a", "deleted")
        watched.wake.set()
        changes = [wire.Change("a", "deleted"), wire.Change("b", "created")]
        assert await world.sent.get() == wire.ChangedParams(7, changes, False, False)
        watched.wake.set()  # nothing has changed
        watched._changes.overflow()
        assert await world.sent.get() == wire.ChangedParams(7, [], True, False)
        watched._fail("too many")
        watched.wake.set()
        assert await world.sent.get() == wire.ChangedParams(7, [], False, True, "too many")
        await world.end()
        assert world.context.change_watches == {}

    play(monkeypatch, scene)


def test_changes_are_settled_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(world: World) -> None:
        watched = await world.watch()
        monkeypatch.setattr(watched, "settle", lambda batch: Batch({"x": "created"}, False))
        watched._forgotten.append(1)
        watched.wake.set()
        assert (await world.sent.get()).changes == [wire.Change("x", "created")]
        monkeypatch.setattr(watched, "settle", lambda batch: Batch({}, False))
        watched._forgotten.append(1)
        watched.wake.set()  # nothing to report
        files.unwatch(world.context, wire.UnwatchParams(1))
        await world.end()
        assert world.sent.empty()

    play(monkeypatch, scene)


def test_a_watch_that_ends_meanwhile_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(world: World) -> None:
        watched = await world.watch()
        watched._changes.add("a", "created")
        watched._new.append("a")

        def settle(batch: Batch) -> Batch:
            files.unwatch(world.context, wire.UnwatchParams(1))
            return batch

        monkeypatch.setattr(watched, "settle", settle)
        watched.wake.set()
        await world.end()
        files.unwatch(world.context, wire.UnwatchParams(1))  # again
        assert world.sent.empty()

    play(monkeypatch, scene)


def test_a_full_send_buffer_delays_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(world: World) -> None:
        watched = await world.watch()
        world.context.writable.clear()
        watched._changes.add("a", "created")
        watched.wake.set()
        for _ in range(10):
            await asyncio.sleep(0)
        assert world.sent.empty()
        watched._changes.add("b", "created")
        world.context.writable.set()
        assert len((await world.sent.get()).changes) == 2
        world.context.close()
        assert (watched.has_ended, world.context.change_watches) == (True, {})
        watched.wake.set()
        await world.end()

    play(monkeypatch, scene)


def test_ids_and_the_limit_of_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(world: World) -> None:
        monkeypatch.setattr(files, "MAX_WATCHES", 1)
        await world.watch(1)
        with pytest.raises(InvalidRequest, match="watch 1 already exists"):
            await world.watch(1)
        with pytest.raises(InvalidRequest, match="at most 1 watches"):
            await world.watch(2)
        files.unwatch(world.context, wire.UnwatchParams(1))
        world.failure = FileNotFoundError(2, "missing")
        with pytest.raises(FileNotFoundError):
            await world.watch(3)
        assert world.context.change_watches == {}
        await world.end()

    play(monkeypatch, scene)


def test_a_connection_that_ends_while_a_watch_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(world: World) -> None:
        monkeypatch.setattr(ChangeWatch, "open", lambda *_: world.context.close())
        with pytest.raises(KeyError):
            await world.watch()
        assert world.tasks == []

    play(monkeypatch, scene)


def test_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy()

    async def confined(world: World) -> None:
        await world.watch(sandbox=object())
        assert world.opened == [("/w/real", policy.visible)]
        world.failure = PermissionError(13, "denied")
        with pytest.raises(RpcError, match="explained 13"):
            await world.watch(2, sandbox=object())
        for task in world.tasks:
            task.cancel()

    async def trusted(world: World) -> None:
        await world.watch(sandbox=object())
        assert world.opened == [("/w", None)]
        for task in world.tasks:
            task.cancel()

    play(monkeypatch, confined, policy)
    play(monkeypatch, trusted, Policy(is_trusted_read=True))
