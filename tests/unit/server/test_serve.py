"""Executors run until they fail, are no longer watched, or the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn, cast

import pytest

from exec_server.errors import RegistryError, StartupError
from exec_server.host.threads import ThreadPool
from exec_server.net.server_certificate import ServerCertificate
from exec_server.net.stream import MessageReceiver, MessageStream, ReceiverFactory
from exec_server.server.serve import _reload_on_request, forward_remote


def _make_receiver(stream: MessageStream) -> MessageReceiver:
    raise AssertionError("no connection is made")


class FakeExecutor:
    """Serves until it is cancelled, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.events: list[str] = []
        self._error = error
        self.stop: asyncio.Event | None = None

    async def serve(self, make_receiver: ReceiverFactory, tasks: asyncio.TaskGroup) -> NoReturn:
        assert make_receiver is _make_receiver
        self.events.append("serving")
        if self._error is not None:
            raise self._error
        try:
            while True:
                await asyncio.sleep(1000)
        finally:
            self.events.append("cancelled")


async def _forever() -> None:
    await asyncio.get_running_loop().create_future()


def _forward(executor: FakeExecutor, watch: Callable[[], Any] = _forever) -> None:
    async def run() -> None:
        stop = executor.stop = asyncio.Event()
        async with asyncio.timeout(20):
            await forward_remote(executor, lambda _: _make_receiver, stop, watch=watch)

    asyncio.run(run())


def test_an_executor_is_cancelled_when_the_server_stops() -> None:
    executor = FakeExecutor()

    async def watch() -> None:
        while not executor.events:
            await asyncio.sleep(0)
        assert executor.stop is not None
        executor.stop.set()
        await _forever()

    _forward(executor, watch)
    assert executor.events == ["serving", "cancelled"]


def test_an_executor_is_cancelled_when_the_watch_ends() -> None:
    executor = FakeExecutor()

    async def watch() -> None:
        while not executor.events:
            await asyncio.sleep(0)

    _forward(executor, watch)
    assert executor.events == ["serving", "cancelled"]


@pytest.mark.parametrize("error", [RegistryError("refused"), StartupError("impossible")])
def test_the_failure_of_an_executor_is_raised(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        _forward(FakeExecutor(error))


def test_the_failure_of_the_watch_is_raised() -> None:
    async def watch() -> None:
        raise StartupError("gone")

    executor = FakeExecutor()
    with pytest.raises(StartupError, match="gone"):
        _forward(executor, watch)


def test_a_certificate_that_cannot_be_read_again_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The reload runs in a thread, once for each request, and a failure does not end it."""
    caplog.set_level("INFO")
    failures = [None, StartupError("cannot read --tls-key k")]
    reloaded = asyncio.Event()

    class Threads:
        async def run(self, reload: Callable[[], None]) -> None:
            reload()

    class Certificate:
        def reload(self) -> None:
            reloaded.set()
            if (failure := failures.pop()) is not None:
                raise failure

    async def body() -> None:
        requested = asyncio.Event()
        certificate = cast(ServerCertificate, Certificate())
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            task = tasks.create_task(
                _reload_on_request(certificate, requested, cast(ThreadPool, Threads()))
            )
            for _ in range(2):
                requested.set()
                await reloaded.wait()
                reloaded.clear()
            task.cancel()

    asyncio.run(body())
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]
    assert "the former certificate stays in use: cannot read --tls-key k" in caplog.text
