"""ClientSession when links are lost: what is sent again, what fails, what ends the session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.client import scaled
from tests.support.memory_session import (
    GREETING,
    SESSION,
    Listener,
    MemoryDialer,
    MemoryStream,
    Message,
    Size,
    in_session,
    measure,
)

from exec_server import errors
from exec_server.client.engine import session as module
from exec_server.client.engine.session import ClientSession
from exec_server.errors import ConnectFailed, ConnectionLost, RegistryUnavailable, SessionLost
from exec_server.net.stream import ReceiverFactory

MALFORMED = [
    b"",
    b"not json",
    b"[]",
    b"{}",
    b'{"id":2}',
    b'{"id":null,"result":1}',
    b'{"id":2,"error":{"code":"x","message":""}}',
    b'{"id":2,"error":{"code":1}}',
    b'{"method":5}',
    b'{"result":1}',
    b"\xff",
    b'{"method":"process/closed","params":{"processId":"p"}}',
    b'{"method":"process/output","params":{"processId":"p","seq":1,"stream":"other","chunk":""}}',
    b'{"method":"process/output","params":{"processId":"p","seq":1,"stream":"pty","chunk":"?"}}',
    b'{"method":"process/output"}',
]
UNREADABLE = b'{"error":{"code":-32600,"message":"failed to parse"},"id":-1}'


@pytest.mark.parametrize("message", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_message_ends_the_session(message: bytes) -> None:
    """Its content is lost: a process would seem to have ended in order without that output."""

    @in_session
    async def scene(session: ClientSession, dialer: MemoryDialer, stream: MemoryStream) -> None:
        listener = Listener()
        session.subscribe(listener)
        async with asyncio.TaskGroup() as tasks:
            calls = [
                tasks.create_task(measure(session, "x", is_retryable=is_retryable))
                for is_retryable in (False, True)
            ]
            for _ in calls:
                await stream.next("test/measure")
            stream.say(message)
            assert stream.closed is not None
            assert stream.closed[0] == 1002
            stream.notify_output(1)  # of a connection that is no more
        for call in calls:
            assert isinstance(call.result(), SessionLost)
            assert str(call.result()).startswith("malformed message from the server: ")
        assert listener.heard == ["lost"]

    scene()


@in_session
async def test_a_request_that_the_server_cannot_read_drops_the_connection(
    session: ClientSession, dialer: MemoryDialer, stream: MemoryStream
) -> None:
    """The answer does not tell which request it is for."""
    async with asyncio.TaskGroup() as tasks:
        lost = tasks.create_task(measure(session, "once"))
        kept = tasks.create_task(measure(session, "again", is_retryable=True))
        for _ in range(2):
            await stream.next("test/measure")
        stream.say(UNREADABLE)
        assert stream.closed is not None
        assert stream.closed[0] == 1002
        new = await dialer.stream()
        await new.past_handshake()
        new.answer(await new.next("test/measure"), {"size": 1})
    assert isinstance(lost.result(), ConnectionLost)
    assert kept.result() == Size(1)


@in_session
async def test_a_server_that_sends_requests_and_reads_no_answers_is_dropped(
    session: ClientSession, dialer: MemoryDialer, stream: MemoryStream
) -> None:
    stream.say({"id": 1, "method": "x", "params": {}})
    assert (await stream.next())["id"] == 1
    stream.receiver.pause_writing()
    stream.say({"id": 2, "method": "x", "params": {}})
    assert stream.closed == (1000, "the server sends requests and reads no answers")
    assert stream.is_quiet
    await (await dialer.stream()).past_handshake()


@in_session
async def test_what_may_be_repeated_is_sent_again_first_and_in_order(
    session: ClientSession, dialer: MemoryDialer, stream: MemoryStream
) -> None:
    async with asyncio.TaskGroup() as tasks:
        again = [tasks.create_task(measure(session, n, is_retryable=True)) for n in ("a", "b")]
        once = tasks.create_task(measure(session, "c"))
        queued = tasks.create_task(measure(session, "d"))
        for _ in range(3):
            await stream.next("test/measure")
        dialer.failures = [ConnectFailed("not yet")]
        stream.lose()
        late = tasks.create_task(measure(session, "e"))
        new = await dialer.stream()
        assert (await new.past_handshake())["resumeSessionId"] == SESSION
        names = []
        for number in range(4):
            request = await new.next("test/measure")
            assert request["id"] == 2 + number
            names.append(request["params"]["name"])
            new.answer(request, {"size": number})
    assert names == ["a", "b", "d", "e"]
    assert isinstance(once.result(), ConnectionLost)
    assert str(once.result()) == "no answer: connection lost"
    assert [call.result() for call in (*again, queued, late)] == [Size(n) for n in range(4)]
    assert stream.closed is None


@in_session
async def test_a_cancelled_call_is_not_sent_again(
    session: ClientSession, dialer: MemoryDialer, stream: MemoryStream
) -> None:
    async with asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(measure(session, n, is_retryable=True)) for n in ("a", "b")]
        for _ in range(2):
            await stream.next("test/measure")
        calls[0].cancel()
        await asyncio.wait([calls[0]])
        stream.lose()
        new = await dialer.stream()
        await new.past_handshake()
        request = await new.next("test/measure")
        assert request["params"] == {"name": "b"}
        new.answer(request, {"size": 1})
        assert new.is_quiet


@in_session
async def test_subscribers_hear_of_the_resumption_before_anything_else(
    session: ClientSession, dialer: MemoryDialer, stream: MemoryStream
) -> None:
    listener = Listener()
    session.subscribe(listener)

    def greet(new: MemoryStream, request: Message) -> None:
        new.answer(request, GREETING)
        new.notify_output(5)  # in the same breath

    dialer.greet = greet
    stream.notify_output(1)
    stream.lose()
    new = await dialer.stream()
    await new.past_handshake()
    assert listener.heard == [
        ("process/output", 1),
        "disconnected",
        "resumed",
        ("process/output", 5),
    ]


@in_session
async def test_a_link_may_be_lost_again_as_soon_as_it_is_there(
    session: ClientSession, dialer: MemoryDialer, stream: MemoryStream
) -> None:
    listener = Listener()
    session.subscribe(listener)
    losses = 5

    def greet(new: MemoryStream, request: Message) -> None:
        nonlocal losses
        new.answer(request, GREETING)
        losses -= 1
        if losses:
            new.lose()

    dialer.greet = greet
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(measure(session, "x", is_retryable=True))
        await stream.next("test/measure")
        stream.lose()
        for _ in range(5):
            new = await dialer.stream()
            await new.past_handshake()
            request = await new.next("test/measure")
        new.answer(request, {"size": 1})
    assert call.result() == Size(1)
    assert listener.heard == ["disconnected", "resumed"] * 5


def _refusal(code: int, text: str) -> Callable[[MemoryStream, Message], None]:
    return lambda stream, request: stream.refuse(request, code, text)


def test_passing_failures_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INITIALIZE_SECONDS", scaled(0.05))

    @in_session
    async def scene(session: ClientSession, dialer: MemoryDialer, stream: MemoryStream) -> None:
        greetings: list[Callable[[MemoryStream, Message], None]] = [
            _refusal(-32010, "already attached"),
            lambda new, request: new.lose(),
            lambda new, request: new.say(b"garbage"),
            lambda new, request: None,
            lambda new, request: new.answer(request, GREETING),
        ]

        def greet(new: MemoryStream, request: Message) -> None:
            greetings.pop(0)(new, request)

        dialer.greet = greet
        dialer.failures = [
            ConnectFailed("refused"),
            ConnectFailed("busy", 503),
            RegistryUnavailable("x"),
        ]
        stream.lose()
        for _ in range(5):
            new = await dialer.stream()
        await new.past_handshake()
        assert dialer.delays == [0, 1, 2, 3, 4, 5, 6]
        # The next loss counts anew.
        dialer.failures = [ConnectFailed("refused")]
        greetings.append(lambda new, request: new.answer(request, GREETING))
        new.lose()
        await (await dialer.stream()).past_handshake()
        assert dialer.delays[7:] == [0]

    scene()


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (ConnectFailed("HTTP error: 401 Unauthorized", 401), "HTTP error: 401 Unauthorized"),
        (ConnectFailed("HTTP error: 403 Forbidden", 403), "HTTP error: 403 Forbidden"),
        (ConnectFailed("HTTP error: 404 Not Found", 404), "HTTP error: 404 Not Found"),
        (errors.RegistryError("forbidden"), "forbidden"),
        (
            _refusal(-32600, "unknown session id x"),
            "unknown session id x; the server was probably restarted",
        ),
        (_refusal(-32603, "broken"), "broken"),
        (
            lambda stream, request: stream.answer(request, GREETING | {"sessionId": "other"}),
            "exec-server initialized an unexpected session",
        ),
    ],
)
def test_other_failures_end_the_session(failure: Any, text: str) -> None:
    @in_session
    async def scene(session: ClientSession, dialer: MemoryDialer, stream: MemoryStream) -> None:
        listener = Listener()
        session.subscribe(listener)
        if isinstance(failure, Exception):
            dialer.failures = [failure]
        else:
            dialer.greet = failure
        async with asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(measure(session, n, is_retryable=True)) for n in ("a", "b")]
            for _ in range(2):
                await stream.next("test/measure")
            stream.lose()
            calls.append(tasks.create_task(measure(session, "late")))
            error = await listener.ended
        assert str(error) == f"the session could not be resumed: {text}"
        for call in calls:
            assert isinstance(call.result(), SessionLost)
            assert str(call.result()) == str(error)
        assert isinstance(await measure(session, "afterwards"), SessionLost)
        assert listener.heard == ["disconnected", "lost"]
        assert dialer.delays == []

    scene()


def test_recovery_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECOVERY_SECONDS", 0.05)

    @in_session
    async def scene(session: ClientSession, dialer: MemoryDialer, stream: MemoryStream) -> None:
        listener = Listener()
        session.subscribe(listener)

        async def refuse(make_receiver: ReceiverFactory) -> MemoryStream:
            raise ConnectFailed("refused")

        dialer.open = refuse  # type: ignore[method-assign]
        stream.lose()
        assert str(await listener.ended) == (
            "the session could not be resumed: no connection within 0.05 s: refused"
        )

    scene()


def test_recovery_has_an_attempt_just_before_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECOVERY_SECONDS", 2.0)
    monkeypatch.setattr(module, "LAST_ATTEMPT_SECONDS", 1.95)

    @in_session
    async def scene(session: ClientSession, dialer: MemoryDialer, stream: MemoryStream) -> None:
        dialer.retry_delay = lambda attempt: 1000.0  # type: ignore[method-assign]
        dialer.failures = [ConnectFailed("refused")]
        stream.lose()
        await (await dialer.stream()).past_handshake()

    scene()


def test_a_request_that_ends_every_connection_is_not_sent_for_ever() -> None:
    @in_session
    async def scene(session: ClientSession, dialer: MemoryDialer, stream: MemoryStream) -> None:
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(measure(session, "poison", is_retryable=True))
            for _ in range(module.MAX_SENDS):
                await stream.next("test/measure")
                stream.lose()
                stream = await dialer.stream()
                await stream.past_handshake()
        assert isinstance(call.result(), ConnectionLost)
        assert stream.is_quiet

    scene()


def test_what_cannot_reconnect_ends_with_its_link() -> None:
    @in_session
    async def scene(session: ClientSession, dialer: MemoryDialer, stream: MemoryStream) -> None:
        dialer.can_reconnect = False
        listener = Listener()
        session.subscribe(listener)
        async with asyncio.TaskGroup() as tasks:
            calls = [
                tasks.create_task(measure(session, "a", is_retryable=True)),
                tasks.create_task(measure(session, "b")),
            ]
            for _ in calls:
                await stream.next("test/measure")
            stream.lose()
        assert [str(call.result()) for call in calls] == ["connection lost"] * 2
        assert all(isinstance(call.result(), SessionLost) for call in calls)
        assert listener.heard == ["lost"]

    scene()
