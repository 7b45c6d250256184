"""Listeners of a process: limits at their bounds, and the ends of connections."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from tests.support.clock import run_in_virtual_time
from tests.support.memory_transport import stream_pair
from tests.support.network import launch

from exec_server.host.event_loop import GuardedTasks
from exec_server.host.threads import ThreadPool
from exec_server.protocol.network import DecisionParams, PolicyParams
from exec_server.proxy import process_proxy as module
from exec_server.proxy.process_proxy import Listeners, ProcessProxy, linger, server_connections
from exec_server.proxy.resources import ProxyResources
from exec_server.proxy.stream import Stream


class FakeSocket:
    """An accepted connection that is only opened and closed."""

    is_closed = False

    def setblocking(self, flag: bool) -> None:
        pass

    def setsockopt(self, *_: Any) -> None:
        pass

    def fileno(self) -> int:
        return -1 if self.is_closed else 99

    def close(self) -> None:
        self.is_closed = True


class FakeListener:
    """A listening socket with connections that wait to be accepted."""

    def __init__(self) -> None:
        self.waiting: list[FakeSocket] = []
        self.error: OSError | None = None

    def accept(self) -> tuple[FakeSocket, tuple[str, int]]:
        if self.error is not None:
            raise self.error
        if not self.waiting:
            raise BlockingIOError
        return self.waiting.pop(0), ("127.0.0.1", 5)


class World:
    """Listeners whose connections stay open until the test ends them."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.resources = ProxyResources(GuardedTasks(tasks), cast(ThreadPool, None), {})
        self.listeners = Listeners(self.resources)
        self.listener = FakeListener()
        self.ends: list[asyncio.Future[None]] = []

    async def handle(self, stream: Stream, client: str) -> None:
        assert client == "127.0.0.1:5"
        end = asyncio.get_running_loop().create_future()
        self.ends.append(end)
        await end
        stream.close()

    async def connect(self) -> FakeSocket:
        accepted = FakeSocket()
        self.listener.waiting.append(accepted)
        self.listeners._accept(cast(socket.socket, self.listener), self.handle)
        await asyncio.sleep(0)
        return accepted

    async def end(self, index: int, error: Exception | None = None) -> None:
        end = self.ends.pop(index)
        if error is None:
            end.set_result(None)
        else:
            end.set_exception(error)
        for _ in range(3):
            await asyncio.sleep(0)


def _run(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            world = World(tasks)
            await scenario(world)
            world.listeners.close()

    asyncio.run(run())


def test_connections_of_a_process_are_limited(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 2)

    async def scenario(world: World) -> None:
        accepted = [await world.connect() for _ in range(3)]
        assert [each.is_closed for each in accepted] == [False, False, True]
        assert "too many connections" in caplog.text
        await world.end(0)
        assert accepted[0].is_closed
        assert not (await world.connect()).is_closed

    _run(scenario)


def test_connections_of_a_server_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "server_connections", lambda: module.MAX_SERVER_CONNECTIONS)

    async def scenario(world: World) -> None:
        world.resources.connections = module.MAX_SERVER_CONNECTIONS - 1  # of other processes
        assert not (await world.connect()).is_closed
        assert world.resources.connections == 1024
        assert (await world.connect()).is_closed
        await world.end(0)
        assert world.resources.connections == 1023
        assert not (await world.connect()).is_closed

    _run(scenario)


@pytest.mark.parametrize(
    ("descriptors", "connections"), [(1 << 20, 1024), (4096, 1024), (1000, 250), (3, 0)]
)
def test_a_quarter_of_the_descriptors_is_for_connections(
    monkeypatch: pytest.MonkeyPatch, descriptors: int, connections: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
    assert server_connections() == connections
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
    assert server_connections() == 1024


def test_failing_connections_are_counted_down(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: World) -> None:
        broken, wrong = await world.connect(), await world.connect()
        await world.end(0, ConnectionResetError())
        assert not caplog.records
        await world.end(0, ValueError("a defect"))
        assert "failed unexpectedly" in caplog.text
        assert broken.is_closed
        assert wrong.is_closed
        assert world.resources.connections == 0
        # A connection that the kernel takes back before it is accepted.
        world.listeners._accept(cast(socket.socket, world.listener), world.handle)

    _run(scenario)


def test_closing_ends_the_connections() -> None:
    async def scenario(world: World) -> None:
        accepted = await world.connect()
        world.listeners.close()
        for _ in range(3):
            await asyncio.sleep(0)
        assert accepted.is_closed

    _run(scenario)


def test_accepting_pauses_without_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            world = World(tasks)
            watched: list[float] = []
            unwatched: list[float] = []
            # The listener has no descriptor.
            monkeypatch.setattr(loop, "add_reader", lambda *_: watched.append(loop.time()))
            monkeypatch.setattr(loop, "remove_reader", lambda _: unwatched.append(loop.time()))
            listener = cast(socket.socket, world.listener)
            world.listener.error = OSError(errno.EMFILE, "Too many open files")
            world.listeners._accept(listener, world.handle)
            assert "Too many open files" in caplog.text
            assert (watched, unwatched) == ([], [0])
            await asyncio.sleep(module.ACCEPT_RETRY_SECONDS)
            assert watched == [module.ACCEPT_RETRY_SECONDS]
            world.listeners._accept(listener, world.handle)
            world.listeners.close()
            await asyncio.sleep(module.ACCEPT_RETRY_SECONDS)
            assert len(watched) == 1
            monkeypatch.undo()

    run_in_virtual_time(run())


# ---- lingering ----------------------------------------------------------------------------


def test_lingering_ends_with_the_process() -> None:
    async def run() -> None:
        process, stream = stream_pair()
        process.writer.write(b"rest")
        process.writer.write_eof()
        await linger(stream)
        assert asyncio.get_running_loop().time() == 0
        assert await process.reader.read() == b""  # its end was sent
        for end in (process, stream):
            end.close()
        await linger(stream)  # which is closed

    run_in_virtual_time(run())


def test_lingering_is_limited_in_time() -> None:
    async def run() -> None:
        process, stream = stream_pair()
        await linger(stream)
        assert asyncio.get_running_loop().time() == module.LINGER_SECONDS == 1
        for end in (process, stream):
            end.close()

    run_in_virtual_time(run())


def test_lingering_is_limited_in_bytes() -> None:
    async def run() -> None:
        process, stream = stream_pair()
        process.writer.write(bytes(module.LINGER_BYTES + 1))
        await linger(stream)
        assert asyncio.get_running_loop().time() == 0
        for end in (process, stream):
            end.close()

    run_in_virtual_time(run())


# ---- associations -------------------------------------------------------------------------


class _Nobody:
    """A Controller that is not needed."""

    def report(self, decision: DecisionParams) -> None:
        raise AssertionError("nothing is decided")

    async def ask(self, question: PolicyParams) -> object:
        raise AssertionError("nothing is asked")


def test_associations_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeAssociation:
        def __init__(self, *_: object) -> None:
            pass

        def close(self) -> None:
            pass

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            resources = ProxyResources(GuardedTasks(tasks), cast(ThreadPool, None), {})
            proxy = ProcessProxy(launch(), "p", _Nobody(), resources)
            with proxy._associate("127.0.0.1:5", 0), proxy._associate("127.0.0.1:6", 0):
                assert resources.connections == 2
                with pytest.raises(OSError), proxy._associate("127.0.0.1:7", 0):
                    raise AssertionError("beyond the limit")
            assert resources.connections == 0
            monkeypatch.setattr(module, "server_connections", lambda: 0)
            with pytest.raises(OSError), proxy._associate("127.0.0.1:7", 0):
                raise AssertionError("beyond the limit of the server")

    monkeypatch.setattr(module, "MAX_ASSOCIATIONS", 2)
    monkeypatch.setattr(module, "UdpAssociation", FakeAssociation)
    asyncio.run(run())


@pytest.mark.parametrize(
    ("masking", "value", "logged"),
    [
        (True, "tok_abcdefghi", None),
        (True, "", None),
        (True, "tok_short", "no pattern of a credential provider matches TOKEN, so it is not mask"),
        (False, "tok_abcdefghi", "credentialProviders without credentialMasking mask nothing"),
    ],
)
def test_an_unmasked_secret_is_logged(
    caplog: pytest.LogCaptureFixture, masking: bool, value: str, logged: str | None
) -> None:
    """By choice no refusal: Codex may list variables that hold no secret at the moment."""
    provider = {"env": ["TOKEN"], "patterns": ["tok_[a-z]{9}"], "url_prefixes": ["https://a.b/"]}
    rules = launch(credentialMasking=masking, credentialProviders={"mine": provider})

    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            resources = ProxyResources(GuardedTasks(tasks), cast(ThreadPool, None), {})
            env = ProcessProxy(rules, "p\n", _Nobody(), resources).mask({"TOKEN": value})
            assert (env["TOKEN"] == value) == (value != "tok_abcdefghi" or not masking)
            resources.close()

    asyncio.run(scenario())
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == (logged is not None)
    for text in texts:
        assert text.startswith(f"process p\\n: {logged}")
        assert "tok_" not in text
