"""ClientSession over WebSockets: refused, cut, and to servers that forget or stay away."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.support.client import KINDS, start_server
from tests.support.client_targets import (
    COUNTED,
    LOOPS,
    Proxy,
    Recorder,
    Run,
    bounded,
    exercise,
    outcome,
    ready,
    until_lost,
)

from exec_server.client.engine import session as session_module
from exec_server.client.engine.dialers import WebSocketDialer
from exec_server.client.engine.session import ClientSession
from exec_server.errors import ConnectFailed, ConnectionLost, SessionLost
from exec_server.protocol import process
from exec_server.protocol.process import ProcessId


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", LOOPS)
def test_a_session_over_a_websocket(kind: str, run: Run) -> None:
    with start_server(kind) as server:
        bounded(exercise(WebSocketDialer(server.url)), run)


def test_a_token_opens_the_door(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("correct-horse-battery-staple")
    flags = ("--ws-auth", "capability-token", "--ws-token-file", "token")

    async def scene(url: str) -> None:
        await exercise(WebSocketDialer(url, token="correct-horse-battery-staple"))
        with pytest.raises(ConnectFailed) as refused:
            await exercise(WebSocketDialer(url, token="wrong-horse"))
        assert refused.value.status == 401
        assert "wrong-horse" not in str(refused.value)

    with start_server("ours", *flags, cwd=tmp_path) as server:
        bounded(scene(server.url))


def test_nobody_there() -> None:
    with start_server("ours") as server:
        url = server.url
    with pytest.raises(ConnectFailed, match="Connection refused"):
        bounded(exercise(WebSocketDialer(url)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", LOOPS)
def test_no_output_is_lost_when_the_connection_is_cut(kind: str, run: Run) -> None:
    cuts = 5

    async def scene(url: str) -> None:
        async with Proxy(url).running() as proxy:
            async with (
                ClientSession(WebSocketDialer(proxy.url)) as session,
                asyncio.TaskGroup() as tasks,
            ):
                first = session.session_id
                recorder = Recorder(session, tasks)

                def cut() -> None:
                    # Once for each connection, as soon as it has brought output.
                    if proxy.accepted == recorder.resumed + 1 <= cuts:
                        proxy.cut()

                recorder.on_output = cut
                await recorder.count()
                await recorder.complete.wait()
                assert session.session_id == first
            assert recorder.output == COUNTED
            assert recorder.resumed == cuts

    with start_server(kind) as server:
        bounded(scene(server.url), run)


def test_calls_at_the_moment_of_a_cut() -> None:
    async def scene(url: str) -> None:
        async with (
            Proxy(url).running() as proxy,
            ClientSession(WebSocketDialer(proxy.url)) as session,
            asyncio.TaskGroup() as tasks,
        ):
            await Recorder(session, tasks).start("/bin/sleep", "1000")
            poll = process.ReadParams(ProcessId("p"), 0, None, 300)
            once = tasks.create_task(outcome(session.call(process.READ, poll)))
            again = tasks.create_task(session.call(process.READ, poll, is_retryable=True))
            await ready(session)  # so the server has them
            proxy.cut()
            assert isinstance(await once, ConnectionLost)
            assert await ready(session)  # made during recovery
            assert not (await again).exited

    with start_server("ours") as server:
        bounded(scene(server.url))


def test_a_server_that_does_not_know_the_session_ends_it() -> None:
    async def scene(url: str, other: str) -> None:
        async with (
            Proxy(url).running() as proxy,
            ClientSession(WebSocketDialer(proxy.url)) as session,
        ):
            proxy.target = other
            proxy.cut()
            with pytest.raises(SessionLost, match=f"unknown session id {session.session_id}"):
                await until_lost(session)

    with start_server("ours") as server, start_server("ours") as other:
        bounded(scene(server.url, other.url))


def test_a_server_that_stays_away_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "RECOVERY_SECONDS", 0.3)

    async def scene(url: str) -> None:
        async with (
            Proxy(url).running() as proxy,
            ClientSession(WebSocketDialer(proxy.url)) as session,
        ):
            proxy.target = "ws://127.0.0.1:1"
            proxy.cut()
            with pytest.raises(SessionLost, match=r"no connection within 0\.3 s"):
                await until_lost(session)
            assert proxy.accepted > 2

    with start_server("ours") as server:
        bounded(scene(server.url))
