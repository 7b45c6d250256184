"""An environment whose server is restarted: waiting calls are told, and later ones work again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from tests.support.client import KINDS, start_server
from tests.support.client_targets import Proxy, bounded

from exec_server import ConnectFailed, SessionLost, connect, sync
from exec_server.client.engine import session as session_module
from exec_server.client.environment import Environment


class Restart:
    """A server behind a proxy, which another server replaces."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._servers = contextlib.ExitStack()
        self.proxy: Proxy

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Restart]:
        with self._servers:
            first = self._servers.enter_context(start_server(self._kind))
            async with Proxy(first.url).running() as self.proxy:
                yield self

    def stop(self) -> None:
        self._servers.close()

    async def until_missed(self) -> None:
        """Wait for an attempt to connect to the server that is away."""
        before = self.proxy.accepted
        while self.proxy.accepted == before:
            await asyncio.sleep(0.01)

    def start(self) -> None:
        self.proxy.target = self._servers.enter_context(start_server(self._kind)).url


Play = Callable[[Callable[[Restart], Awaitable[None]]], None]


@pytest.fixture(params=KINDS)
def play(request: pytest.FixtureRequest) -> Play:
    def run(scene: Callable[[Restart], Awaitable[None]]) -> None:
        async def limited() -> None:
            async with Restart(request.param).running() as server:
                await scene(server)

        bounded(limited())

    return run


async def outcome(waiting: Awaitable[Any]) -> Any:
    try:
        return await waiting
    except Exception as error:
        return error


def started(env: Environment) -> int:
    return sum(process.is_started for process in env._processes._processes.values())


def test_a_restart(play: Play) -> None:
    """With `reconnect=True` calls work again, and without it after `reconnect()`."""

    async def scene(server: Restart) -> None:
        automatic = connect(server.proxy.url, reconnect=True)
        async with (
            automatic as env,
            connect(server.proxy.url) as other,
            asyncio.TaskGroup() as all_,
        ):
            process = await env.start(["sh", "-c", "echo before; sleep 100"])
            assert (await anext(process)).data == b"before\n"
            reading = all_.create_task(outcome(anext(process)))
            waiting = all_.create_task(outcome(process.wait()))
            running = all_.create_task(outcome(env.run(["sleep", "100"])))
            other_running = all_.create_task(outcome(other.run(["sleep", "100"])))
            while (started(env), started(other)) != (2, 1):
                await asyncio.sleep(0.01)
            server.stop()
            server.start()
            for lost in (reading, waiting, running, other_running):
                assert isinstance(await lost, SessionLost)
            assert (await env.run(["echo", "after"])).stdout == b"after\n"
            await env.files.write("/dev/null", b"x")
            assert isinstance(await outcome(process.wait()), SessionLost)
            await process.aclose()
            assert isinstance(await outcome(other.run(["true"])), SessionLost)
            await other.reconnect()
            assert (await other.run(["echo", "again"])).stdout == b"again\n"
            async with other.start(["cat"], tty=True) as terminal:
                await terminal.write(b"x\n")
                assert (await anext(terminal)).data.startswith(b"x")

    play(scene)


def test_a_server_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "RECOVERY_SECONDS", 0.3)

    async def scene() -> None:
        async with Restart("ours").running() as server, connect(server.proxy.url) as env:
            server.stop()
            assert isinstance(await outcome(env.run(["true"])), SessionLost)
            with pytest.raises(ConnectFailed, match=r"no connection within 0\.3 s"):
                await env.reconnect()
            monkeypatch.undo()
            async with asyncio.TaskGroup() as tasks:
                waiting = tasks.create_task(env.reconnect())
                await server.until_missed()
                server.start()
                await waiting
            assert await env.run(["true"])

    bounded(scene())


def test_a_command_during_a_restart_waits_for_the_new_server() -> None:
    async def scene() -> None:
        async with (
            Restart("ours").running() as server,
            connect(server.proxy.url, reconnect=True) as env,
        ):
            server.stop()
            while env.session.is_connected:
                await asyncio.sleep(0.01)
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(env.run(["echo", "once"]))
                writing = tasks.create_task(env.files.exists("/"))
                await server.until_missed()
                server.start()
                assert (await running).stdout == b"once\n"
                assert await writing

    bounded(scene())


def test_a_local_server_that_was_killed() -> None:
    async def scene() -> None:
        async with Environment.local() as env:
            error = await outcome(env.run(["sh", "-c", "kill -9 $PPID; sleep 100"]))
            assert isinstance(error, SessionLost)
            await env.reconnect()
            assert await env.run(["true"])

    bounded(scene())


def test_the_same_in_threads() -> None:
    with sync.Environment.local() as env:
        with pytest.raises(SessionLost):
            env.run(["sh", "-c", "kill -9 $PPID; sleep 100"])
        env.reconnect()
        assert env.run(["echo", "again"]).stdout == b"again\n"
        env.reconnect()
        assert env.files.exists("/")


def test_a_session_is_kept_for_the_retention_that_was_granted() -> None:
    """Longer than the server keeps others; what has ended meanwhile is there, its loss counted."""

    async def scene(url: str) -> None:
        async with Proxy(url).running() as proxy, connect(proxy.url, retention="1m") as env:
            assert env.session.granted_retention == 60
            ended = await env.start(["sh", "-c", "sleep 0.3; seq 1000000"])
            running = await env.start(["sh", "-c", "echo $$; exec sleep 60"])
            assert await running.read_until(b"\n")
            proxy.is_open = False
            proxy.cut()
            while env.session.is_connected:
                await asyncio.sleep(0.01)
            await asyncio.sleep(1.5)  # several times the retentions of the server
            status = env.status
            assert status.state == "reconnecting"
            assert status.attempt > 1
            assert status.reason
            assert status.gives_up_at is not None
            assert 50 < (status.gives_up_at - status.since).total_seconds() < 61
            proxy.is_open = True
            assert await ended.wait() == 0
            size = sum([len(chunk.data) async for chunk in ended])
            assert size + ended.lost_bytes == len("".join(f"{n}\n" for n in range(1, 1_000_001)))
            assert ended.lost_bytes
            assert env.session.is_connected
            assert running.exit_code is None
        assert not env.session.is_connected

    with start_server("ours", "--session-retention", "0.2", "--process-retention", "0.2") as server:
        bounded(scene(server.url))


@pytest.mark.parametrize("kind", KINDS)
def test_a_retention_that_is_not_granted(kind: str) -> None:
    """Our server has a maximum; the reference ignores the request."""

    async def scene(url: str) -> None:
        async with connect(url, retention="9h") as env:
            assert env.session.granted_retention == (7200 if kind == "ours" else None)
            assert (await env.run(["echo", "x"])).text == "x\n"

    flags = ("--max-session-retention", "2h") if kind == "ours" else ()
    with start_server(kind, *flags) as server:
        bounded(scene(server.url))
