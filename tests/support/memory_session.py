"""In-memory links for ClientSession and Environment: the server is the test; scenes with it."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from exec_server.client.engine.session import ClientSession, Closing
from exec_server.client.environment import Environment
from exec_server.client.process import Process
from exec_server.errors import SessionLost
from exec_server.net.stream import ReceiverFactory
from exec_server.protocol.decoding import Call, Notice, Params, Result
from tests.support.client import DEFAULT_TIMEOUT, scaled

SESSION = "11111111-2222-4333-8444-555555555555"
ENVIRONMENT = {"shell": {"name": "sh", "path": "/bin/sh"}}
GREETING = {"sessionId": SESSION, "environmentInfo": ENVIRONMENT}
Message = dict[str, Any]


class Name(Params, frozen=True):
    wire_name = "Name"
    name: str


class Size(Result, frozen=True):
    size: int


MEASURE = Call("test/measure", Name, Size)


class MemoryStream:
    """A MessageStream whose other end is the test."""

    origin = "message from memory"
    is_strict = False

    def __init__(self, make_receiver: ReceiverFactory) -> None:
        self.raw: list[bytes] = []
        self.receiving = True
        self.closed: tuple[int, str] | None = None
        self._sent: asyncio.Queue[Message] = asyncio.Queue()
        self._greet: Callable[[Message], None] | None = None
        self.receiver = make_receiver(self)

    def greet_with(self, greet: Callable[[MemoryStream, Message], None]) -> None:
        self._greet = lambda request: greet(self, request)

    def send(self, message: bytes) -> None:
        self.raw.append(message)
        decoded = json.loads(message)
        if decoded.get("method") == "initialize" and self._greet is not None:
            asyncio.get_running_loop().call_soon(self._greet, decoded)
        self._sent.put_nowait(decoded)

    async def send_parts(self, parts: AsyncIterator[bytes], size: int) -> None:
        raise AssertionError("clients send whole messages")

    def unsent(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.receiving = False

    def resume_reading(self) -> None:
        self.receiving = True

    def probe(self) -> None:
        raise AssertionError("nobody wants the session of a client")

    def close(self, code: int, reason: str) -> None:
        assert self.closed is None
        self.closed = (code, reason)
        asyncio.get_running_loop().call_soon(self.receiver.connection_lost)

    # ---- actions of the server ---------------------------------------------------------

    async def next(self, method: str | None = None) -> Message:
        """The next message of the client."""
        message = await self._sent.get()
        assert message.get("method") == method, message
        return message

    async def past_handshake(self) -> Message:
        """The params of `initialize`, when the whole handshake is there."""
        request = await self.next("initialize")
        assert request["id"] == 1
        assert await self.next("initialized") == {"method": "initialized", "params": {}}
        params: Message = request["params"]
        return params

    @property
    def is_quiet(self) -> bool:
        return self._sent.empty()

    def say(self, message: object) -> None:
        text = message if isinstance(message, bytes) else json.dumps(message).encode()
        self.receiver.message_received(text)

    def answer(self, request: Message, result: object) -> None:
        self.say({"id": request["id"], "result": result})

    def refuse(self, request: Message, code: int, message: str, data: object = None) -> None:
        error = {"code": code, "message": message} | ({} if data is None else {"data": data})
        self.say({"error": error, "id": request["id"]})

    def notify_output(self, seq: int) -> None:
        params = {"processId": "p", "seq": seq, "stream": "stdout", "chunk": "eA=="}
        self.say({"method": "process/output", "params": params})

    def lose(self) -> None:
        self.receiver.connection_lost()


class MemoryDialer:
    """Opens in-memory links; fails first with the given errors."""

    can_reconnect = True
    calls_in_flight = 3

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.delays: list[int] = []
        self.closed = 0
        self.closings: list[Closing] = []
        self.greet: Callable[[MemoryStream, Message], None] = lambda stream, request: stream.answer(
            request, GREETING
        )
        self._streams: asyncio.Queue[MemoryStream] = asyncio.Queue()

    async def open(self, make_receiver: ReceiverFactory) -> MemoryStream:
        if self.failures:
            raise self.failures.pop(0)
        stream = MemoryStream(make_receiver)
        stream.greet_with(self.greet)
        self._streams.put_nowait(stream)
        return stream

    def retry_delay(self, attempt: int) -> float:
        self.delays.append(attempt)
        return 0.0

    async def close(self, closing: Closing) -> None:
        self.closed += 1
        self.closings.append(closing)

    async def stream(self) -> MemoryStream:
        """The next link that was opened."""
        return await self._streams.get()


class Listener:
    """A subscriber that records events."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.ended: asyncio.Future[SessionLost] = asyncio.get_running_loop().create_future()

    def on_notice(self, notice: Notice[Any], params: Any) -> None:
        self.heard.append((notice.name, params.seq))

    def on_disconnected(self) -> None:
        self.heard.append("disconnected")

    def on_resumed(self) -> None:
        self.heard.append("resumed")

    def on_lost(self, error: SessionLost) -> None:
        self.heard.append("lost")
        self.ended.set_result(error)


SessionScene = Callable[[ClientSession, MemoryDialer, MemoryStream], Awaitable[None]]


def play(scene: Coroutine[Any, Any, None]) -> None:
    """Run a scene in a loop that has no task left at its end."""

    async def run() -> None:
        async with asyncio.timeout(scaled(DEFAULT_TIMEOUT)):
            await scene
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def in_session(scene: SessionScene) -> Callable[[], None]:
    """A test that begins with a session on its first link."""

    def test() -> None:
        async def run() -> None:
            dialer = MemoryDialer()
            async with ClientSession(dialer) as session:
                stream = await dialer.stream()
                await stream.past_handshake()
                await scene(session, dialer, stream)
            assert dialer.closed == 1

        play(run())

    test.__doc__ = scene.__doc__
    return test


async def outcome(waiting: Awaitable[Any]) -> Any:
    """The result, or the exception instead of it."""
    try:
        return await waiting
    except Exception as error:
        return error


def measure(session: ClientSession, name: str, *, is_retryable: bool = False) -> Any:
    return outcome(session.call(MEASURE, Name(name), is_retryable=is_retryable))


OURS = {
    "sessionId": SESSION,
    "environmentInfo": {
        "shell": {"name": "sh", "path": "/bin/sh"},
        "cwd": "file:///home",
        "capabilities": {
            "processCloseStdin": True,
            "processReadLoss": True,
            "processSignals": True,
            "processTerminateExited": True,
        },
    },
}


# A server that can pause the output of one process.
PAUSING = msgspec.json.decode(msgspec.json.encode(OURS))
PAUSING["environmentInfo"]["capabilities"]["processFlowControl"] = True


class Scene:
    """An environment, the link that it has now, and the process `p` that it starts."""

    def __init__(self, env: Environment, dialer: MemoryDialer, stream: MemoryStream) -> None:
        self.env = env
        self.dialer = dialer
        self.stream = stream
        self.process_id = ""

    async def started(self, **options: Any) -> Process:
        """A process whose start the server has answered."""
        process = self.env.start(["p"], **options)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(process.__aenter__())
            request = await self.stream.next("process/start")
            self.process_id = request["params"]["processId"]
            self.accept(request)
        return process

    def accept(self, request: Message) -> None:
        answer = {"processId": request["params"]["processId"], "sandboxType": "none"}
        self.stream.answer(request, answer)

    def say(self, method: str, seq: int, **params: Any) -> None:
        said = {"processId": self.process_id, "seq": seq, **params}
        self.stream.say({"method": f"process/{method}", "params": said})

    def output(self, seq: int, data: bytes = b"x") -> None:
        self.say("output", seq, stream="stdout", chunk=base64.b64encode(data).decode())

    def exited(self, seq: int, code: int = 0) -> None:
        self.say("exited", seq, exitCode=code, sandboxDenied=False)

    async def reconnected(self) -> None:
        self.stream.lose()
        self.stream = await self.dialer.stream()
        await self.stream.past_handshake()

    async def answer_read(self, *chunks: tuple[int, bytes], **others: Any) -> Message:
        """Answer a process/read; returns its params."""
        request = await self.stream.next("process/read")
        last = chunks[-1][0] if chunks else 0
        answer = {
            "chunks": [
                {"seq": seq, "stream": "stdout", "chunk": base64.b64encode(data).decode()}
                for seq, data in chunks
            ],
            "nextSeq": last + 1,
            "exited": False,
            "exitCode": None,
            "closed": False,
            "failure": None,
            "sandboxDenied": False,
        }
        self.stream.answer(request, answer | others)
        params: Message = request["params"]
        return params


def in_environment(
    scene: Callable[[Scene], Awaitable[None]], greeting: Message = OURS
) -> Callable[[], None]:
    """A test that begins with an environment; processes that still run at its end are killed."""

    def test() -> None:
        async def run() -> None:
            dialer = MemoryDialer()
            dialer.greet = lambda stream, request: stream.answer(request, greeting)
            async with Environment(dialer) as env:
                stream = await dialer.stream()
                await stream.past_handshake()
                played = Scene(env, dialer, stream)
                await scene(played)
                # The scene does not answer the kills of the end.
                env._processes._processes.clear()
            assert dialer.closed

        play(run())

    test.__doc__ = scene.__doc__
    return test


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
