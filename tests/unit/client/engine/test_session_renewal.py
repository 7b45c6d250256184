"""ClientSession after its end: a new session for new calls, and an error for those that waited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from unittest import mock

import pytest
from tests.support.memory_session import (
    GREETING,
    SESSION,
    Listener,
    MemoryDialer,
    MemoryStream,
    Message,
    SessionScene,
    Size,
    measure,
    outcome,
    play,
)

from exec_server.client.engine import session as module
from exec_server.client.engine.session import ClientSession
from exec_server.errors import ConnectFailed, ConnectionLost, RegistryError, SessionLost
from exec_server.net.stream import ReceiverFactory

OTHER = SESSION.replace("1", "9")


def restarted(stream: MemoryStream, request: Message) -> None:
    """A server that knows no session of old, and makes new ones."""
    if request["params"]["resumeSessionId"] is not None:
        stream.refuse(request, -32600, "unknown session id")
    else:
        stream.answer(request, GREETING | {"sessionId": OTHER})


def in_renewable_session(scene: SessionScene) -> Callable[[], None]:
    def test() -> None:
        async def run() -> None:
            dialer = MemoryDialer()
            async with ClientSession(dialer, reconnect=True) as session:
                stream = await dialer.stream()
                await stream.past_handshake()
                dialer.greet = restarted
                await scene(session, dialer, stream)

        play(run())

    test.__doc__ = scene.__doc__
    return test


async def lose(session: ClientSession, dialer: MemoryDialer, stream: MemoryStream) -> Listener:
    """End the session: the server was restarted."""
    listener = Listener()
    session.subscribe(listener)
    stream.lose()
    resuming = await dialer.stream()
    await resuming.next("initialize")
    await listener.ended
    return listener


async def answer_measure(stream: MemoryStream, size: int) -> None:
    stream.answer(await stream.next("test/measure"), {"size": size})


@in_renewable_session
async def test_the_next_call_opens_a_new_session(
    session: ClientSession, dialer: MemoryDialer, stream: MemoryStream
) -> None:
    renewed: list[str] = []
    session.on_renewed = lambda: renewed.append(str(session.session_id))
    listener = await lose(session, dialer, stream)
    assert renewed == []
    async with asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(measure(session, name)) for name in ("a", "b")]
        new = await dialer.stream()
        await new.past_handshake()
        for size in (1, 2):
            await answer_measure(new, size)
    assert [call.result() for call in calls] == [Size(1), Size(2)]
    assert renewed == [OTHER]
    assert listener.heard == ["disconnected", "lost"]


@in_renewable_session
async def test_calls_that_waited_are_told(
    session: ClientSession, dialer: MemoryDialer, stream: MemoryStream
) -> None:
    """Only those that were not sent are made in the new session."""
    async with asyncio.TaskGroup() as tasks:
        sent = tasks.create_task(measure(session, "sent"))
        retryable = tasks.create_task(measure(session, "retryable", is_retryable=True))
        for _ in range(2):
            await stream.next("test/measure")
        stream.lose()
        unsent = tasks.create_task(measure(session, "unsent"))
        await (await dialer.stream()).next("initialize")
        new = await dialer.stream()
        await new.past_handshake()
        await answer_measure(new, 3)
    assert isinstance(sent.result(), ConnectionLost)
    assert isinstance(retryable.result(), SessionLost)
    assert unsent.result() == Size(3)


@in_renewable_session
async def test_a_broken_server_is_left_and_asked_again(
    session: ClientSession, dialer: MemoryDialer, stream: MemoryStream
) -> None:
    listener = Listener()
    session.subscribe(listener)
    stream.say(b"not json")
    await listener.ended
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(measure(session, "x"))
        new = await dialer.stream()
        await new.past_handshake()
        await answer_measure(new, 1)
    assert call.result() == Size(1)


@in_renewable_session
async def test_no_new_session(
    session: ClientSession, dialer: MemoryDialer, stream: MemoryStream
) -> None:
    """Each call tries again."""
    await lose(session, dialer, stream)
    for text in ("one", "two"):
        dialer.failures = [RegistryError(text)]
        error = await measure(session, "x")
        assert isinstance(error, SessionLost)
        assert str(error) == f"there is no new session: {text}"


@in_renewable_session
async def test_a_server_that_is_away_is_waited_for_once(
    session: ClientSession, dialer: MemoryDialer, stream: MemoryStream
) -> None:
    listener = Listener()
    session.subscribe(listener)

    async def refuse(make_receiver: ReceiverFactory) -> MemoryStream:
        raise ConnectFailed("refused")

    dialer.open = refuse  # type: ignore[method-assign]
    with mock.patch.object(module, "RECOVERY_SECONDS", 0.05):
        stream.lose()
        unsent = await measure(session, "unsent")
    assert isinstance(unsent, SessionLost)
    assert str(unsent) == str(await listener.ended)
    assert session._recovery is not None
    assert session._recovery.done()  # no new session was tried


@in_renewable_session
async def test_closing_ends_the_wait_for_a_new_session(
    session: ClientSession, dialer: MemoryDialer, stream: MemoryStream
) -> None:
    await lose(session, dialer, stream)
    dialer.greet = lambda stream, request: None
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(measure(session, "x"))
        await (await dialer.stream()).next("initialize")
        await session.close()
    assert isinstance(call.result(), SessionLost)
    assert isinstance(await measure(session, "y"), SessionLost)
    assert isinstance(await outcome(session.reconnect()), SessionLost)


# ---- reconnect() ----------------------------------------------------------------------


def in_plain_session(scene: SessionScene) -> Callable[[], None]:
    def test() -> None:
        async def run() -> None:
            dialer = MemoryDialer()
            async with ClientSession(dialer) as session:
                stream = await dialer.stream()
                await stream.past_handshake()
                await scene(session, dialer, stream)

        play(run())

    test.__doc__ = scene.__doc__
    return test


@in_plain_session
async def test_reconnecting_opens_a_new_session_once(
    session: ClientSession, dialer: MemoryDialer, stream: MemoryStream
) -> None:
    await session.reconnect()  # nothing to do
    dialer.greet = restarted
    await lose(session, dialer, stream)
    assert isinstance(await measure(session, "x"), SessionLost)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(3):
            tasks.create_task(session.reconnect())
        new = await dialer.stream()
        await new.past_handshake()
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(measure(session, "x"))
        await answer_measure(new, 1)
    assert call.result() == Size(1)
    assert session.session_id == OTHER


@in_plain_session
async def test_reconnecting_waits_for_a_resumption(
    session: ClientSession, dialer: MemoryDialer, stream: MemoryStream
) -> None:
    stream.lose()
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(session.reconnect())
        await (await dialer.stream()).past_handshake()
        await waiting
    assert session.session_id == SESSION


@in_plain_session
async def test_reconnecting_raises_the_reason(
    session: ClientSession, dialer: MemoryDialer, stream: MemoryStream
) -> None:
    dialer.greet = restarted
    await lose(session, dialer, stream)
    dialer.failures = [ConnectFailed("refused"), RegistryError("forbidden")]
    with pytest.raises(RegistryError, match="forbidden"):
        await session.reconnect()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "RECOVERY_SECONDS", 0.01)
        dialer.greet = lambda stream, request: None
        with pytest.raises(ConnectFailed, match=r"no connection within 0\.01 s: no answer"):
            await session.reconnect()


def test_a_program_is_started_once_more_but_not_again_and_again() -> None:
    @in_plain_session
    async def scene(session: ClientSession, dialer: MemoryDialer, stream: MemoryStream) -> None:
        dialer.can_reconnect = False
        dialer.greet = restarted
        listener = Listener()
        session.subscribe(listener)
        stream.lose()
        await listener.ended
        dialer.failures = [ConnectFailed("cannot start it")]
        with pytest.raises(ConnectFailed, match="cannot start it"):
            await session.reconnect()
        assert dialer.delays == []
        await session.reconnect()
        assert session.session_id == OTHER

    scene()
