"""FileWatch with a session that is the test: changes, overflow, reconnecting, the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from exec_server.client import file_watch as module
from exec_server.client.exceptions import NotFound
from exec_server.client.file_watch import FileWatch
from exec_server.client.results import FileChange
from exec_server.errors import InternalError, SessionLost
from exec_server.errors import NotFound as RpcNotFound
from exec_server.protocol import files as wire
from exec_server.protocol.files import MISSING_CHANGED, Done, MissingChangedParams
from exec_server.protocol.paths import PathUri

pytestmark = pytest.mark.quick

_OVERFLOW = FileChange("", "overflow")


class Session:
    """Records calls, and runs the tasks of the watch."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.subscribers: list[FileWatch] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.failure: Exception | None = None

    def subscribe(self, subscriber: FileWatch) -> Callable[[], None]:
        self.subscribers.append(subscriber)
        return lambda: self.subscribers.remove(subscriber)

    async def call(self, call: object, params: Any, *, is_retryable: bool = False) -> Done:
        self.calls.append(params)
        if self.failure is not None:
            raise self.failure
        return Done()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(work))

    def send(self, *names: str, **members: Any) -> None:
        """A notification for the watch that was made last."""
        watch_id = next(each.watch_id for each in reversed(self.calls))
        changes = [wire.Change(name, "created") for name in names]
        values: dict[str, Any] = {"overflow": False, "closed": False} | members
        params = wire.ChangedParams(watch_id, changes, **values)
        for subscriber in list(self.subscribers):
            subscriber.on_notice(wire.CHANGED, params)


def _watch(session: Session) -> FileWatch:
    path = PathUri.from_text("/w")
    return FileWatch(cast(Any, session), path, "w", recursive=True, sandbox=None)


def play(scene: Callable[[Session, FileWatch], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        session = Session()
        await scene(session, _watch(session))
        assert session.subscribers == []

    asyncio.run(run())


def test_changes_are_iterated_until_the_watch_is_closed() -> None:
    async def scene(session: Session, watch: FileWatch) -> None:
        assert repr(watch) == "<FileWatch w, not open>"
        async with watch:
            session.send("a", "b")
            assert [await anext(watch), await anext(watch)] == [
                FileChange("a", "created"),
                FileChange("b", "created"),
            ]
            later = asyncio.get_running_loop().create_task(_next(watch))
            await asyncio.sleep(0)
            session.send("c")
            assert await later == FileChange("c", "created")
            watch.on_notice(MISSING_CHANGED, MissingChangedParams(1))
            watch.on_notice(wire.CHANGED, wire.ChangedParams(0, [], True, True))
            watch.on_disconnected()
        assert isinstance(session.calls[-1], wire.UnwatchParams)
        assert [change async for change in watch] == []
        await watch.aclose()
        assert len(session.calls) == 2

    play(scene)


async def _next(watch: FileWatch) -> FileChange:
    return await anext(watch)


def test_awaiting_begins_the_watch() -> None:
    async def scene(session: Session, watch: FileWatch) -> None:
        assert await watch is watch
        assert (watch.is_open, len(session.calls)) == (True, 1)
        session.send("a")
        assert await anext(watch) == FileChange("a", "created")
        await watch.aclose()
        assert [change async for change in watch] == []

    play(scene)


def test_iteration_begins_the_watch() -> None:
    async def scene(session: Session, watch: FileWatch) -> None:
        first = asyncio.get_running_loop().create_task(_next(watch))
        while not session.subscribers:
            await asyncio.sleep(0)
        session.send("a")
        assert await first == FileChange("a", "created")
        session.failure = SessionLost("gone")
        await watch.aclose()  # the end of the session is no error here

    play(scene)


def test_unread_changes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNREAD", 2)

    async def scene(session: Session, watch: FileWatch) -> None:
        async with watch:
            session.send("a", "b", "c", "d")
            assert [await anext(watch), await anext(watch)] == [
                _OVERFLOW,
                FileChange("d", "created"),
            ]
            session.send("e", overflow=True)
            assert [await anext(watch), await anext(watch)] == [
                _OVERFLOW,
                FileChange("e", "created"),
            ]

    play(scene)


def test_the_end_of_the_directory_ends_the_iteration() -> None:
    async def scene(session: Session, watch: FileWatch) -> None:
        async with watch:
            session.send("a", closed=True)
            assert [change.path async for change in watch] == ["a"]
        assert len(session.calls) == 1

    play(scene)


def test_an_error_of_the_server_is_raised() -> None:
    async def scene(session: Session, watch: FileWatch) -> None:
        async with watch:
            session.send(closed=True, error="too many")
            with pytest.raises(InternalError, match="w: too many"):
                await anext(watch)

    play(scene)


def test_a_path_that_cannot_be_watched() -> None:
    async def scene(session: Session, watch: FileWatch) -> None:
        session.failure = RpcNotFound("No such file or directory (os error 2)")
        with pytest.raises(NotFound) as failed:
            await anext(watch)
        assert failed.value.filename == "w"

    play(scene)


def test_a_resumed_session_is_watched_again() -> None:
    async def scene(session: Session, watch: FileWatch) -> None:
        async with watch:
            watch.on_resumed()
            await asyncio.wait(session.tasks)
            assert await anext(watch) == _OVERFLOW
            first, second = session.calls
            assert first.watch_id < second.watch_id
            session.send("a")
            assert (await anext(watch)).path == "a"
            watch.on_resumed()
        await asyncio.wait(session.tasks)  # it was closed before it was watched again
        assert session.calls[-1] == wire.UnwatchParams(watch._params.watch_id)

    play(scene)


def test_a_session_that_is_lost() -> None:
    async def scene(session: Session, watch: FileWatch) -> None:
        async with watch:
            watch.on_resumed()
            session.failure = RpcNotFound("gone (os error 2)")
            await asyncio.wait(session.tasks)
            await anext(watch)
            with pytest.raises(NotFound):
                await anext(watch)
        other = _watch(session)
        session.failure = None
        async with other:
            other.on_lost(SessionLost("the end"))
            with pytest.raises(SessionLost, match="the end"):
                await anext(other)

    play(scene)
