"""What a session says of its connection, and how long it tries to get it back."""

from __future__ import annotations

import asyncio
import datetime

import msgspec
import pytest
from tests.support.memory_session import (
    GREETING,
    Listener,
    MemoryDialer,
    MemoryStream,
    in_environment,
    in_session,
    play,
    turns,
)
from tests.support.memory_session import Scene as EnvironmentScene

from exec_server.client.engine import recovery
from exec_server.client.engine import session as module
from exec_server.client.engine.messages import InitializeRequest
from exec_server.client.engine.session import ClientSession
from exec_server.errors import ConnectFailed
from exec_server.net.stream import ReceiverFactory

GRANTING = {**GREETING, "sessionRetentionSeconds": 28_800}


def state(session: ClientSession) -> str:
    return session.status.state


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def test_every_state() -> None:
    async def scene() -> None:
        dialer = MemoryDialer()
        session = ClientSession(dialer, reconnect=True)
        assert state(session) == "closed"
        async with session:
            stream = await dialer.stream()
            await stream.past_handshake()
            connected = session.status
            assert (connected.state, connected.reason) == ("connected", None)
            dialer.failures = [ConnectFailed("refused")] * 1000
            stream.lose()
            await turns(20)
            reconnecting = session.status
            assert (reconnecting.state, reconnecting.reason) == ("reconnecting", "refused")
            assert reconnecting.attempt > 1
            assert connected.since <= reconnecting.since <= now()
            assert reconnecting.gives_up_at is not None
            assert 40 < (reconnecting.gives_up_at - now()).total_seconds() <= 45
            dialer.failures = [ConnectFailed("forbidden", 403)]
            listener = Listener()
            session.subscribe(listener)
            await listener.ended
            await turns()
            lost = session.status
            assert lost.state == "lost"
            assert lost.reason == "the session could not be resumed: forbidden"
            await session.reconnect()
            assert state(session) == "connected"
        assert state(session) == "closed"

    play(scene())


def test_the_session_is_tried_for_as_long_as_it_was_granted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    boot = [1000.0]
    monkeypatch.setattr(module, "boot_time", lambda: boot[0])

    async def scene() -> None:
        dialer = MemoryDialer()
        dialer.greet = lambda stream, request: stream.answer(request, GRANTING)
        async with ClientSession(dialer, retention=100_000) as session:
            stream = await dialer.stream()
            assert (await stream.past_handshake())["sessionRetentionSeconds"] == 100_000
            assert session.granted_retention == 28_800
            listener = Listener()
            session.subscribe(listener)

            async def refuse(make_receiver: ReceiverFactory) -> MemoryStream:
                boot[0] += 1000  # of which the loop notices nothing
                raise ConnectFailed("refused")

            dialer.retry_delay = lambda attempt: 0.0  # type: ignore[method-assign]
            monkeypatch.setattr("exec_server.client.engine.attempts.MAX_DELAY_SECONDS", 0.0)
            monkeypatch.setattr(dialer, "open", refuse)
            stream.lose()
            assert str(await listener.ended) == (
                "the session could not be resumed: no connection within 28800 s: refused"
            )
            assert boot[0] >= 29_800

    play(scene())


@in_session
async def test_a_server_that_does_not_grant_is_tried_as_before(
    session: ClientSession, dialer: MemoryDialer, stream: MemoryStream
) -> None:
    assert session.granted_retention is None
    dialer.failures = [ConnectFailed("refused")] * 3
    stream.lose()
    await turns()
    assert session._attempts is not None
    assert session._attempts.seconds == module.RECOVERY_SECONDS
    await (await dialer.stream()).past_handshake()


@in_environment
async def test_a_start_is_repeated_as_long_as_its_session_is_kept(scene: EnvironmentScene) -> None:
    processes = scene.env._processes
    assert processes._resend_seconds() == recovery.OLDER_RESEND_SECONDS
    scene.env.session.granted_retention = 28_800
    assert processes._resend_seconds() == 28_800 + recovery.RESEND_SECONDS


def test_an_accepted_connection_wins_over_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time ends in the moment in which the answer to `initialize` is there."""
    monkeypatch.setattr(module, "RECOVERY_SECONDS", 0.05)
    monkeypatch.setattr(module, "LAST_ATTEMPT_SECONDS", 0.01)

    async def scene() -> None:
        dialer = MemoryDialer()
        async with ClientSession(dialer) as session:
            stream = await dialer.stream()
            await stream.past_handshake()
            use = session._use

            def use_late(*arguments: object) -> None:
                use(*arguments)  # type: ignore[arg-type]
                assert session._attempts is not None
                session._attempts.seconds = 0
                recovering = session._recovery
                assert recovering is not None

            monkeypatch.setattr(session, "_use", use_late)
            stream.lose()
            await (await dialer.stream()).past_handshake()
            await asyncio.sleep(0.1)
            assert state(session) == "connected"

    play(scene())


def test_no_retention_is_asked_for_by_default() -> None:
    assert b"etention" not in msgspec.json.encode(
        InitializeRequest("c", None, ClientSession(MemoryDialer())._retention)
    )


def test_a_session_that_is_not_kept_is_lost_at_once() -> None:
    async def scene() -> None:
        dialer = MemoryDialer()
        greeting = {**GREETING, "sessionRetentionSeconds": 0}
        dialer.greet = lambda stream, request: stream.answer(request, greeting)
        async with ClientSession(dialer, retention=0) as session:
            stream = await dialer.stream()
            await stream.past_handshake()
            listener = Listener()
            session.subscribe(listener)
            stream.lose()
            assert "no connection within 0 s: connection lost" in str(await listener.ended)

    play(scene())
