"""ClientSession over in-memory links: handshake, calls, limits, notifications, closing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any, cast

import msgspec
import pytest
from tests.support.memory_session import (
    ENVIRONMENT,
    GREETING,
    MEASURE,
    SESSION,
    Listener,
    MemoryDialer,
    MemoryStream,
    Message,
    Name,
    Size,
    in_session,
    measure,
    play,
)

from exec_server import errors
from exec_server.client.engine import server_requests, session
from exec_server.client.engine.recovery import RemoteProcesses, Sink
from exec_server.client.engine.server_features import PROBES
from exec_server.client.engine.session import ClientSession, Closing
from exec_server.errors import ConnectFailed, RegistryUnavailable, SessionLost
from exec_server.protocol import files, process
from exec_server.protocol.decoding import Notice
from exec_server.protocol.session import STATUS, Capabilities, EnvironmentStatus

# ---- the handshake --------------------------------------------------------------------


def test_the_handshake_is_that_of_the_reference() -> None:
    async def scene() -> None:
        dialer = MemoryDialer()
        async with ClientSession(dialer, client_name="me") as session:
            stream = await dialer.stream()
            assert stream.raw == [
                b'{"id":1,"method":"initialize","params":{"clientName":"me","resumeSessionId":null}}',
                b'{"method":"initialized","params":{}}',
            ]
            assert session.session_id == SESSION
            assert session.environment_info.shell.path == "/bin/sh"
            assert not session.environment_info.capabilities.fs_watch_missing
        assert stream.closed == (1000, "the session was closed")

    play(scene())


CLOSING = msgspec.json.decode(msgspec.json.encode(GREETING))
CLOSING["environmentInfo"]["capabilities"] = {"sessionClose": True}


def test_closing_ends_the_session_on_the_server() -> None:
    async def scene() -> None:
        dialer = MemoryDialer()
        dialer.greet = lambda stream, request: stream.answer(request, CLOSING)
        async with ClientSession(dialer) as session, asyncio.TaskGroup() as tasks:
            stream = await dialer.stream()
            await stream.past_handshake()
            sent = [tasks.create_task(measure(session, name)) for name in "abcd"]
            for _ in range(dialer.calls_in_flight):
                await stream.next("test/measure")
            closing = tasks.create_task(session.close())
            request = await stream.next("session/close")
            for call in sent:
                assert isinstance(await call, SessionLost)
            assert stream.closed is None
            assert not closing.done()
            stream.answer(request, {})
            await closing
        assert stream.closed == (1000, "the session was closed")
        assert stream.is_quiet
        assert dialer.closings[0] is Closing.ENDED

    play(scene())


def test_closing_does_not_wait_long_for_a_silent_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "CLOSE_SECONDS", 0.01)

    async def scene(*, is_silent: bool) -> None:
        dialer = MemoryDialer()
        dialer.greet = lambda stream, request: stream.answer(request, CLOSING)
        async with ClientSession(dialer) as opened:
            stream = await dialer.stream()
            await stream.past_handshake()
            opened.is_silent = is_silent
        assert stream.is_quiet is is_silent
        assert dialer.closings == [Closing.SILENT]

    play(scene(is_silent=False))
    play(scene(is_silent=True))


def test_closing_without_a_connection_asks_nothing() -> None:
    async def scene() -> None:
        dialer = MemoryDialer()
        dialer.greet = lambda stream, request: stream.answer(request, CLOSING)
        async with ClientSession(dialer):
            stream = await dialer.stream()
            await stream.past_handshake()
            dialer.failures = [ConnectFailed("refused")] * 1000
            stream.lose()
        assert dialer.closings == [Closing.ORDERLY]

    play(scene())


def test_a_relay_carries_no_binary_messages_whatever_the_server_says() -> None:
    """A server behind `exec-server forward` sees a WebSocket."""
    greeting = json.loads(json.dumps(GREETING))
    greeting["environmentInfo"]["capabilities"] = dict.fromkeys(
        ("fsBinary", "processBinary", "processList"), True
    )

    async def scene() -> None:
        dialer = MemoryDialer()
        dialer.greet = lambda stream, request: stream.answer(request, greeting)
        async with ClientSession(dialer) as session:
            known = Capabilities(process_list=True)
            assert session.features.capabilities == known
            assert session.environment_info.capabilities == known

    play(scene())


def test_a_server_that_does_not_describe_itself_is_asked() -> None:
    async def scene() -> None:
        dialer = MemoryDialer()
        dialer.greet = lambda stream, request: stream.answer(request, {"sessionId": SESSION})

        async def serve() -> None:
            stream = await dialer.stream()
            await stream.past_handshake()
            request = await stream.next("environment/info")
            description = {"cwd": "file:///w", "userHomeDir": "file:///h", "capabilities": None}
            for probe in PROBES:
                stream.refuse(await stream.next(probe.method), -32601, "unknown")
            stream.answer(request, ENVIRONMENT | description)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(serve())
            async with ClientSession(dialer) as session:
                assert session.environment_info.cwd == "file:///w"
                assert not session.features.has_walk

    play(scene())


def test_the_connection_may_end_while_the_server_is_asked() -> None:
    async def scene() -> None:
        dialer = MemoryDialer()
        dialer.greet = lambda stream, request: stream.answer(request, {"sessionId": SESSION})

        async def serve() -> None:
            stream = await dialer.stream()
            await stream.past_handshake()
            await stream.next("environment/info")
            stream.lose()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(serve())
            with pytest.raises(ConnectFailed, match="connection ended during initialize"):
                async with ClientSession(dialer):
                    raise AssertionError("there is no session")

    play(scene())


def test_a_server_that_answers_no_question_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "INFO_SECONDS", 0.01)

    async def scene() -> None:
        dialer = MemoryDialer()
        dialer.greet = lambda stream, request: stream.answer(request, {"sessionId": SESSION})
        with pytest.raises(ConnectFailed, match="timed out waiting for environment/info"):
            async with ClientSession(dialer):
                raise AssertionError("there is no session")

    play(scene())


def test_a_lost_connection_to_a_server_without_sessions_is_a_lost_session() -> None:
    async def scene() -> None:
        dialer = MemoryDialer()
        described = {"environmentInfo": ENVIRONMENT}
        dialer.greet = lambda stream, request: stream.answer(request, described)
        async with ClientSession(dialer) as session:
            stream = await dialer.stream()
            await stream.past_handshake()
            assert session.session_id is None
            listener = Listener()
            session.subscribe(listener)
            async with asyncio.TaskGroup() as tasks:
                measuring = tasks.create_task(measure(session, "a", is_retryable=True))
                await stream.next("test/measure")
                stream.lose()
            error = measuring.result()
            assert isinstance(error, SessionLost)
            assert str(error) == "the server has no sessions to resume: connection lost"
            assert listener.heard == ["lost"]

    play(scene())


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (ConnectFailed("refused"), ConnectFailed),
        (RegistryUnavailable("offline"), RegistryUnavailable),
    ],
)
def test_a_first_connection_that_fails_is_not_tried_again(
    failure: Exception, kind: type[Exception]
) -> None:
    async def scene() -> None:
        dialer = MemoryDialer()
        dialer.failures = [failure]
        with pytest.raises(kind, match=str(failure)):
            async with ClientSession(dialer):
                raise AssertionError("there is no session")
        assert (dialer.delays, dialer.closed) == ([], 1)

    play(scene())


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        ({"error": {"code": -32600, "message": "no"}}, errors.InvalidRequest, "no"),
        ({"result": {"sessionId": 1}}, errors.MalformedMessage, "answer to initialize: Expected"),
        ({"result": []}, errors.MalformedMessage, "answer to initialize: Expected `object`"),
        (
            {"result": GREETING | {"environmentInfo": {}}},
            errors.MalformedMessage,
            "environment: Object missing required field `shell`",
        ),
    ],
)
def test_a_useless_answer_to_initialize_is_fatal(
    answer: Message, kind: type[Exception], text: str
) -> None:
    async def scene() -> None:
        dialer = MemoryDialer()
        dialer.greet = lambda stream, request: stream.say({"id": request["id"]} | answer)
        with pytest.raises(kind, match=text):
            async with ClientSession(dialer):
                raise AssertionError("there is no session")
        assert (await dialer.stream()).closed is not None
        assert dialer.closed == 1

    play(scene())


def test_a_server_that_does_not_answer_initialize_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "INITIALIZE_SECONDS", 0.01)

    async def scene() -> None:
        dialer = MemoryDialer()
        dialer.greet = lambda stream, request: None
        with pytest.raises(ConnectFailed, match=r"timed out waiting .* initialize .* after 0\.01s"):
            async with ClientSession(dialer):
                raise AssertionError("there is no session")
        stream = await dialer.stream()
        assert stream.closed is not None
        stream.say({"id": 1, "result": GREETING})  # too late
        assert len(stream.raw) == 1

    play(scene())


# ---- calls ----------------------------------------------------------------------------


@in_session
async def test_answers_find_their_callers_in_any_order(
    session: ClientSession, dialer: MemoryDialer, stream: MemoryStream
) -> None:
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(measure(session, "first"))
        second = tasks.create_task(measure(session, "second"))
        requests = [await stream.next("test/measure") for _ in range(2)]
        assert [request["id"] for request in requests] == [2, 3]
        assert [request["params"] for request in requests] == [
            {"name": "first"},
            {"name": "second"},
        ]
        stream.say({"id": "2", "result": {"size": 7}})  # not an id of ours
        stream.answer(requests[1], {"size": 2, "unknown": []})
        stream.answer(requests[0], {"size": 1})
    assert (first.result(), second.result()) == (Size(1), Size(2))


@in_session
async def test_a_call_without_params_sends_null(
    session: ClientSession, dialer: MemoryDialer, stream: MemoryStream
) -> None:
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(session.call(STATUS, None))
        request = await stream.next("environment/status")
        assert request == {"id": 2, "method": "environment/status", "params": None}
        stream.answer(request, {"status": "ready"})
    assert call.result() == EnvironmentStatus("ready")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (-32600, errors.InvalidRequest),
        (-32601, errors.MethodNotFound),
        (-32602, errors.InvalidParams),
        (-32603, errors.InternalError),
        (-32004, errors.NotFound),
        (-32010, errors.SessionAttached),
        (-5, errors.RpcError),
    ],
)
def test_errors_are_told_by_their_code(code: int, kind: type[errors.RpcError]) -> None:
    @in_session
    async def scene(session: ClientSession, dialer: MemoryDialer, stream: MemoryStream) -> None:
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(measure(session, "x"))
            stream.refuse(await stream.next("test/measure"), code, "what happened", {"more": 1})
        error = call.result()
        assert type(error) is kind
        assert (error.code, error.message, error.data) == (code, "what happened", {"more": 1})

    scene()


@in_session
async def test_an_answer_that_does_not_fit_fails_its_call_alone(
    session: ClientSession, dialer: MemoryDialer, stream: MemoryStream
) -> None:
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(measure(session, "x"))
        stream.answer(await stream.next("test/measure"), {"size": "large"})
    assert isinstance(call.result(), errors.MalformedMessage)
    assert str(call.result()).startswith("answer to test/measure: Expected `int`, got `str`")
    assert stream.closed is None


@in_session
async def test_no_more_calls_than_the_server_bears(
    session: ClientSession, dialer: MemoryDialer, stream: MemoryStream
) -> None:
    async with asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(measure(session, str(n))) for n in range(5)]
        requests = [await stream.next("test/measure") for _ in range(3)]
        assert stream.is_quiet
        for number in range(5):
            stream.answer(requests[number], {"size": number})
            if number < 2:
                requests.append(await stream.next("test/measure"))
    assert [call.result() for call in calls] == [Size(number) for number in range(5)]


@in_session
async def test_a_cancelled_call_counts_until_it_is_answered(
    session: ClientSession, dialer: MemoryDialer, stream: MemoryStream
) -> None:
    async with asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(measure(session, str(n))) for n in range(4)]
        requests = [await stream.next("test/measure") for _ in range(3)]
        calls[0].cancel()
        await asyncio.wait([calls[0]])
        assert stream.is_quiet
        stream.answer(requests[0], {"size": 0})
        requests.append(await stream.next("test/measure"))
        for request in requests[1:]:
            stream.answer(request, {"size": 1})
    assert calls[0].cancelled()
    assert [call.result() for call in calls[1:]] == [Size(1)] * 3


@in_session
async def test_a_call_cancelled_before_its_turn_is_never_sent(
    session: ClientSession, dialer: MemoryDialer, stream: MemoryStream
) -> None:
    async with asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(measure(session, str(n))) for n in range(5)]
        requests = [await stream.next("test/measure") for _ in range(3)]
        calls[3].cancel()
        await asyncio.wait([calls[3]])
        stream.answer(requests[0], {"size": 1})
        requests.append(await stream.next("test/measure"))
        assert requests[-1]["params"] == {"name": "4"}
        for request in requests[1:]:
            stream.answer(request, {"size": 1})


@in_session
async def test_a_posted_call_is_sent_in_order_and_its_answer_discarded(
    session: ClientSession, dialer: MemoryDialer, stream: MemoryStream
) -> None:
    session.post(MEASURE, Name("first"))
    session.post(MEASURE, Name("second"))
    for name in ("first", "second"):
        request = await stream.next("test/measure")
        assert request["params"] == {"name": name}
        stream.refuse(request, -32600, "no")
    session.post(MEASURE, Name("lost"))
    await stream.next("test/measure")
    stream.lose()
    stream = await dialer.stream()
    await stream.past_handshake()
    assert stream.is_quiet
    session._end("for a test")
    session.post(MEASURE, Name("too late"))
    assert stream.is_quiet


@in_session
async def test_calls_wait_while_the_server_takes_nothing(
    session: ClientSession, dialer: MemoryDialer, stream: MemoryStream
) -> None:
    stream.receiver.pause_writing()
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(measure(session, "x"))
        await asyncio.sleep(0)
        assert stream.is_quiet
        stream.receiver.resume_writing()
        stream.answer(await stream.next("test/measure"), {"size": 1})
    assert call.result() == Size(1)


@in_session
async def test_a_call_in_another_event_loop_is_refused(
    session: ClientSession, dialer: MemoryDialer, stream: MemoryStream
) -> None:
    async def spawn() -> None:
        await session.spawn(asyncio.sleep(0))

    for use in (lambda: session.call(MEASURE, Name("x")), spawn, session.reconnect):
        with pytest.raises(RuntimeError, match="this session belongs to another event loop"):
            await asyncio.to_thread(asyncio.run, use())
    assert stream.is_quiet


def test_a_call_after_the_event_loop_is_refused_in_another_one() -> None:
    opened: list[ClientSession] = []

    @in_session
    async def scene(session: ClientSession, dialer: MemoryDialer, stream: MemoryStream) -> None:
        opened.append(session)

    scene()
    [closed] = opened
    processes = RemoteProcesses(closed)

    async def spawn() -> None:
        await closed.spawn(asyncio.sleep(0))

    async def register() -> None:
        processes.open(cast(Sink, None))

    for use in (lambda: closed.call(MEASURE, Name("x")), spawn, register, closed.reconnect):
        with pytest.raises(RuntimeError, match="this session belongs to another event loop"):
            asyncio.run(use())


def test_a_request_that_no_server_takes_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MESSAGE_BYTES", 200)

    @in_session
    async def scene(session: ClientSession, dialer: MemoryDialer, stream: MemoryStream) -> None:
        error = await measure(session, "x" * 200)
        assert isinstance(error, errors.InvalidRequest)
        assert stream.is_quiet

    scene()


# ---- what the server says by itself ---------------------------------------------------


@in_session
async def test_notifications_come_in_order_to_all_subscribers(
    session: ClientSession, dialer: MemoryDialer, stream: MemoryStream
) -> None:
    class Broken(Listener):
        def on_notice(self, notice: Notice[Any], params: Any) -> None:
            raise ValueError("a bug")

    leaving, staying = Listener(), Listener()
    session.subscribe(Broken())
    leave = session.subscribe(leaving)
    session.subscribe(staying)
    stream.notify_output(1)
    stream.say({"method": "something/new", "params": {"seq": 9}})
    leave()
    exited = {"processId": "p", "seq": 2, "exitCode": 0, "sandboxDenied": False}
    stream.say({"method": "process/exited", "params": exited})
    stream.say({"method": "process/closed", "params": {"processId": "p", "seq": 3}})
    assert leaving.heard == [("process/output", 1)]
    assert staying.heard == [("process/output", 1), ("process/exited", 2), ("process/closed", 3)]


@in_session
async def test_notices_are_typed(
    session: ClientSession, dialer: MemoryDialer, stream: MemoryStream
) -> None:
    heard: list[Any] = []
    listener = Listener()
    listener.on_notice = lambda notice, params: heard.append((notice, params))  # type: ignore[method-assign]
    session.subscribe(listener)
    stream.notify_output(1)
    stream.say({"method": "fs/missingChanged", "params": {"watchId": 4}})
    assert heard == [
        (process.OUTPUT, process.OutputParams(process.ProcessId("p"), 1, "stdout", b"x")),
        (files.MISSING_CHANGED, files.MissingChangedParams(4)),
    ]


@in_session
async def test_requests_of_the_server_are_answered(
    session: ClientSession, dialer: MemoryDialer, stream: MemoryStream
) -> None:
    async def handler(params: Name) -> Size:
        if params.name == "refuse":
            raise errors.NotFound("not here")
        if params.name == "fail":
            raise ValueError("a bug")
        return Size(len(params.name))

    session.answer(MEASURE, handler)
    for request_id, name in enumerate(["four", "refuse", "fail"]):
        stream.say({"id": request_id, "method": "test/measure", "params": {"name": name}})
    stream.say({"id": "x", "method": "other/method", "params": None})
    assert await stream.next() == {
        "id": "x",
        "error": {
            "code": -32601,
            "message": "exec-server client does not implement `other/method` yet",
        },
    }
    assert await stream.next() == {"id": 0, "result": {"size": 4}}
    assert await stream.next() == {"id": 1, "error": {"code": -32004, "message": "not here"}}
    assert await stream.next() == {
        "id": 2,
        "error": {"code": -32603, "message": "the client failed"},
    }


def test_the_server_cannot_ask_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_requests, "MAX_REQUESTS", 2)

    @in_session
    async def scene(session: ClientSession, dialer: MemoryDialer, stream: MemoryStream) -> None:
        async def handler(params: Name) -> Size:
            await asyncio.Event().wait()
            raise AssertionError("never")

        session.answer(MEASURE, handler)
        for request_id in range(3):
            stream.say({"id": request_id, "method": "test/measure", "params": {"name": ""}})
        answer = await stream.next()
        assert (answer["id"], answer["error"]["code"]) == (2, -32603)
        # The two handlers that never end do not keep the session from closing.

    scene()


# ---- holding and closing --------------------------------------------------------------


@in_session
async def test_reading_stops_while_anybody_holds(
    session: ClientSession, dialer: MemoryDialer, stream: MemoryStream
) -> None:
    session.pause_reading()
    session.pause_reading()
    assert not stream.receiving
    session.resume_reading()
    assert not stream.receiving
    stream.lose()
    new = await dialer.stream()
    await new.past_handshake()
    assert not new.receiving
    session.resume_reading()
    assert new.receiving


@in_session
async def test_closing_ends_calls_and_subscriptions(
    session: ClientSession, dialer: MemoryDialer, stream: MemoryStream
) -> None:
    listener = Listener()
    session.subscribe(listener)
    async with asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(measure(session, str(n), is_retryable=True)) for n in range(5)]
        for _ in range(3):
            await stream.next("test/measure")
        await session.close()
    for call in calls:
        assert isinstance(call.result(), SessionLost)
        assert str(call.result()) == "the session was closed"
    assert stream.closed == (1000, "the session was closed")
    assert listener.heard == ["lost"]
    assert isinstance(await measure(session, "x"), SessionLost)
    dialer.closed = 0  # leaving the scene closes it once more, which does no harm


def test_closing_ends_a_recovery() -> None:
    @in_session
    async def scene(session: ClientSession, dialer: MemoryDialer, stream: MemoryStream) -> None:
        dialer.greet = lambda new, request: None
        stream.lose()
        new = await dialer.stream()
        await new.next("initialize")
        await session.close()
        assert new.closed is not None
        dialer.closed = 0

    scene()


def test_what_the_body_raises_is_not_wrapped() -> None:
    async def scene() -> None:
        dialer = MemoryDialer()
        with pytest.raises(KeyError, match="mine"):
            async with ClientSession(dialer):
                raise KeyError("mine")
        assert dialer.closed == 1

    play(scene())


@pytest.mark.parametrize("moment", ["connected", "recovering", "initializing"])
def test_cancellation_leaves_nothing_behind(moment: str) -> None:
    async def scene() -> None:
        dialer = MemoryDialer()
        if moment == "initializing":
            dialer.greet = lambda stream, request: None

        async def use() -> None:
            async with ClientSession(dialer) as session:
                await session.call(MEASURE, Name("x"), is_retryable=True)

        async with asyncio.TaskGroup() as tasks:
            user = tasks.create_task(use())
            stream = await dialer.stream()
            await stream.next("initialize")
            if moment != "initializing":
                await stream.next("initialized")
                await stream.next("test/measure")
            if moment == "recovering":
                dialer.greet = lambda stream, request: None
                stream.lose()
                stream = await dialer.stream()
                await stream.next("initialize")
            user.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await user
        assert user.cancelled()
        assert stream.closed is not None
        assert dialer.closed == 1

    play(scene())
