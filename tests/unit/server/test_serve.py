"""Executors run until they fail, are no longer watched, or the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from exec_server.errors import InternalError, RegistryError, StartupError
from exec_server.host import libc
from exec_server.host.event_loop import GuardedTasks
from exec_server.host.threads import ThreadPool
from exec_server.net.stream import MessageReceiver, MessageStream, ReceiverFactory, StreamRevoked
from exec_server.net.tls_acceptor import ServerCertificate
from exec_server.sandbox.sandboxes import Sandboxes
from exec_server.server import serve
from exec_server.server.serve import _load_when_idle, _reload_on_request, forward_remote
from exec_server.server.session import SessionRegistry


def _make_receiver(stream: MessageStream) -> MessageReceiver:
    raise AssertionError("no connection is made")


class FakeExecutor:
    """Serves until it is cancelled, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.events: list[str] = []
        self._error = error
        self.stop: asyncio.Event | None = None

    async def serve(
        self, make_receiver: ReceiverFactory, stream_revoked: StreamRevoked, tasks: GuardedTasks
    ) -> NoReturn:
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


def test_tasks_of_an_executor_end_before_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    events = []

    class Executor(FakeExecutor):
        async def serve(
            self, make_receiver: ReceiverFactory, stream_revoked: StreamRevoked, tasks: GuardedTasks
        ) -> NoReturn:
            tasks.create_task(write())
            tasks.create_task(hang())
            raise RegistryError("refused")

    async def write() -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        events.append("written")

    async def hang() -> None:
        try:
            await _forever()
        finally:
            events.append("cancelled")

    monkeypatch.setattr(serve, "END_SECONDS", 0.05)
    with pytest.raises(RegistryError):
        _forward(Executor())
    assert events == ["written", "cancelled"]


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


class FakeSandboxes:
    """Sandboxes that are loaded by the first, or by no, attempt."""

    def __init__(self, error: Exception | None = None) -> None:
        self.is_loaded = False
        self.attempts = 0
        self._error = error

    def load(self) -> None:
        self.attempts += 1
        if self._error is not None:
            raise self._error
        self.is_loaded = True


class FakeSessions:
    has_had_clients = False


async def _load(sandboxes: FakeSandboxes, sessions: FakeSessions) -> None:
    threads = ThreadPool(1, "test")
    try:
        await _load_when_idle(cast(Sandboxes, sandboxes), cast(SessionRegistry, sessions), threads)
    finally:
        threads.close()


def test_sandboxes_are_loaded_once_an_idle_server_has_had_a_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve, "SWEEP_SECONDS", 0)
    sandboxes, sessions = FakeSandboxes(), FakeSessions()
    used = iter([0.0, 0.0, 1.0, 2.0, 3.0, 3.0])  # idle without a client, busy, idle

    def process_time() -> float:
        now = next(used)
        sessions.has_had_clients = now >= 1
        assert sandboxes.attempts == 0
        return now

    monkeypatch.setattr("time.process_time", process_time)
    asyncio.run(_load(sandboxes, sessions))
    assert (sandboxes.attempts, list(used)) == (1, [])


@pytest.mark.parametrize("error", [OSError("no memory"), ImportError("moved away")])
def test_sandboxes_that_cannot_be_loaded_do_not_end_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    monkeypatch.setattr(serve, "SWEEP_SECONDS", 0)
    sandboxes, sessions = FakeSandboxes(error), FakeSessions()
    sessions.has_had_clients = True
    asyncio.run(_load(sandboxes, sessions))
    assert (sandboxes.attempts, sandboxes.is_loaded) == (1, False)
    assert str(error) in caplog.text


class FakeClient:
    """An HTTP client that answers with itself."""

    def __init__(self) -> None:
        self.closed = 0

    async def open(self, *_: object, repeatable: bool) -> FakeClient:
        return self

    async def close(self) -> None:
        self.closed += 1


def test_the_http_client_is_made_once_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "import_module", lambda name: SimpleNamespace(Client=FakeClient))

    async def scenario() -> None:
        with closing(ThreadPool(1, "test")) as threads:
            client = serve._LazyHttpClient(threads)
            await client.close()  # was never used
            async with asyncio.TaskGroup() as tasks:
                opening = [
                    tasks.create_task(client.open("GET", "http://h/", [], b"", repeatable=True))
                    for _ in range(2)
                ]
            first, second = (cast(Any, task.result()) for task in opening)
            assert first is second
            await client.close()
            assert first.closed == 1

    asyncio.run(scenario())


def test_a_sweep_drops_idle_sandboxes_and_returns_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve, "SWEEP_SECONDS", 0)
    monkeypatch.setattr(libc, "return_freed_memory", lambda: calls.append("return"))
    calls: list[str] = []

    def drop_idle() -> None:
        calls.append("drop")
        raise ValueError("a bug")

    async def run(function: Callable[[], None]) -> None:
        function()
        if len(calls) == 6:
            raise InternalError("enough")

    sessions = SimpleNamespace(expire_overdue=lambda: calls.append("expire"))

    sandboxes, threads = SimpleNamespace(drop_idle=drop_idle), SimpleNamespace(run=run)
    with pytest.raises(InternalError, match="enough"):
        asyncio.run(serve._sweep(cast(Any, sandboxes), cast(Any, sessions), cast(Any, threads)))
    assert calls == ["expire", "drop", "return"] * 2
    assert "a bug" in caplog.text
