"""run_streamed with an environment of this module, without a connection."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast

import pytest

from exec_server import sync
from exec_server.client.engine import session
from exec_server.client.results import Chunk, Result
from exec_server.sync import environment
from exec_server.sync.environment import run_streamed
from exec_server.sync.thread import Blocking, LoopThread

RESULT = Result(("x",), b"", b"", 0, 0.0)
Work = Callable[[Callable[[Chunk], Awaitable[None]]], Coroutine[Any, Any, None]]


class FakeEnvironment:
    """Runs `work` instead of a command; it is its own session."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.was_cancelled = threading.Event()

    @property
    def session(self) -> FakeEnvironment:
        return self

    async def __aenter__(self) -> FakeEnvironment:
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.__aexit__(None, None, None)

    def spawn(self, work: Coroutine[Any, Any, Result]) -> asyncio.Future[Result]:
        return session.start_background(self._tasks, work)

    async def run(
        self, argv: list[str], *, on_output: Callable[[Chunk], Awaitable[None]], cwd: str
    ) -> Result:
        assert (argv, cwd) == (["x"], "/")
        try:
            await self.work(on_output)
        except asyncio.CancelledError:
            self.was_cancelled.set()
            raise
        return RESULT


def run(fake: FakeEnvironment, receive: Callable[[list[Chunk]], None]) -> Result:
    thread = LoopThread(lambda: fake)
    try:
        return run_streamed(cast(sync.Environment, Blocking(thread, fake)), ["x"], receive, cwd="/")
    finally:
        thread.close()


def test_output_arrives_in_the_calling_thread_and_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment, "QUEUED_BYTES", 10)
    sizes: list[int] = []
    threads = set()

    async def work(on_output: Callable[[Chunk], Awaitable[None]]) -> None:
        for _ in range(100):
            await on_output(Chunk("stdout", b"1234"))

    def receive(chunks: list[Chunk]) -> None:
        sizes.append(sum(len(chunk.data) for chunk in chunks))
        threads.add(threading.current_thread())

    assert run(FakeEnvironment(work), receive) is RESULT
    assert sum(sizes) == 400
    assert max(sizes) <= 12
    assert threads == {threading.current_thread()}


def test_an_error_of_the_receiver_cancels_the_command() -> None:
    async def work(on_output: Callable[[Chunk], Awaitable[None]]) -> None:
        await on_output(Chunk("stdout", b"x"))
        await asyncio.Event().wait()

    def receive(chunks: list[Chunk]) -> None:
        raise KeyboardInterrupt

    fake = FakeEnvironment(work)
    with pytest.raises(KeyboardInterrupt):
        run(fake, receive)
    assert fake.was_cancelled.is_set()


def test_an_error_of_the_command_is_raised() -> None:
    async def work(on_output: Callable[[Chunk], Awaitable[None]]) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(FakeEnvironment(work), lambda chunks: None)
