"""A server that answers anything: every call of the client ends, with a result or an error of ours.

The server takes a right answer and changes parts of it, repeats it, answers requests that were not
made, and sends notifications with any numbers. After some messages it goes away for good.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import tempfile
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.client import DEFAULT_TIMEOUT, scaled
from tests.support.examples import examples
from tests.support.memory_environment import OURS
from tests.support.memory_session import MemoryStream, Message

from exec_server.client.environment import Environment
from exec_server.errors import ConnectFailed, ExecServerError
from exec_server.net.stream import ReceiverFactory

STAT = {
    "isDirectory": True,
    "isFile": False,
    "isSymlink": False,
    "size": 4096,
    "createdAtMs": 1,
    "modifiedAtMs": 2,
}
READ = {
    "chunks": [{"seq": 1, "stream": "stdout", "chunk": "eA=="}],
    "nextSeq": 2,
    "exited": True,
    "exitCode": 0,
    "closed": True,
    "failure": None,
    "sandboxDenied": False,
    "firstSeq": 1,
    "lostBytes": 0,
}
ANSWERS: dict[str, Any] = {
    "process/start": {"processId": "p", "sandboxType": "none"},
    "process/read": READ,
    "process/terminate": {"running": False},
    "process/write": {"status": "accepted"},
    "process/closeStdin": {},
    "fs/getMetadata": STAT,
    "fs/readFile": {"dataBase64": "eA=="},
    "fs/open": {"handleId": "h"},
    "fs/readBlock": {"chunk": "eA==", "eof": True},
    "fs/writeBlock": {},
    "fs/close": {},
    "fs/readDirectory": {
        "entries": [{"fileName": "a", "isDirectory": False, "isFile": True}],
    },
    "fs/walk": {
        "entries": [{"path": "file:///d/a", "kind": "directory"}],
        "errors": [{"path": "file:///d/b", "message": "no"}],
        "truncated": False,
    },
    "fs/canonicalize": {"path": "file:///d"},
    "http/request": {"status": 200, "headers": [{"name": "a", "value": "b"}], "bodyBase64": ""},
}

scalars = (
    st.none()
    | st.booleans()
    | st.sampled_from([-1, 0, 1, 2, 3, 2**31, 2**63, 2**64, 10**400, -(2**70), 1.5, 1e300])
    | st.sampled_from(["", "/", "..", "\x00", "\x1b[2J", "file:///", "file:///d/../x", "!", "eA=="])
    | st.text(max_size=8)
)
values = st.recursive(
    scalars,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=4), below),
    max_leaves=6,
)


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places in a JSON value."""
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value)))
    return [at, *(path for key in keys for path in paths(value[key], (*at, key)))]


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[path[0]] = changed(value[path[0]], path[1:], new)
    return copied


class HostileStream(MemoryStream):
    """Answers each request by drawing from `data`, until its messages are used up."""

    def __init__(self, make_receiver: ReceiverFactory, data: st.DataObject) -> None:
        super().__init__(make_receiver)
        self._data = data
        self._left = 24
        self._process_id = "p"
        self._leaving: asyncio.TimerHandle | None = None
        self.interruption: BaseException | None = None

    def send(self, message: bytes) -> None:
        loop = asyncio.get_running_loop()
        request = json.loads(message)
        if self.interruption is not None:
            return
        if request.get("method") == "initialize":
            loop.call_soon(self.answer, request, OURS)
        elif "id" in request and "method" in request:
            loop.call_soon(self._answer_anything, request)

    def close(self, code: int, reason: str) -> None:
        if self.closed is None:
            super().close(code, reason)

    def _answer_anything(self, request: Message) -> None:
        """Answer, or keep the exception by which Hypothesis ends an example in a draw.

        The event loop would swallow it, and the client would wait for an answer.
        """
        try:
            self._draw_answers(request)
        except BaseException as interruption:
            self.interruption = interruption
            self._leave()

    def _draw_answers(self, request: Message) -> None:
        if request["method"] == "process/start":
            self._process_id = request["params"]["processId"]
        for said in self._data.draw(st.lists(self._messages(request), max_size=4)):
            self._left -= 1
            self.receiver.message_received(said if isinstance(said, bytes) else encoded(said))
        if self._data.draw(st.booleans()):
            self.receiver.message_received(encoded(self._right_answer(request)))
        self._left -= 1
        if self._leaving is not None:
            self._leaving.cancel()
        # A request without an answer is not an error of the client: it waits for one.
        delay = 0.02 if self._left > 0 else 0.0
        self._leaving = asyncio.get_running_loop().call_later(delay, self._leave)

    def _leave(self) -> None:
        if self.closed is None:
            self.closed = (0, "gone")
            self.lose()

    def _right_answer(self, request: Message) -> Message:
        return {"id": request["id"], "result": ANSWERS.get(request["method"], {})}

    def _messages(self, request: Message) -> st.SearchStrategy[Any]:
        right = self._right_answer(request)
        wrong = st.builds(
            lambda path, new: changed(right, path, new),
            st.sampled_from(paths(right)),
            values,
        )
        error = {"code": -32603, "message": "x (os error 5)", "data": {"sandboxDenial": 5}}
        refusals = st.builds(
            lambda path, new: {"id": request["id"], "error": changed(error, path, new)},
            st.sampled_from(paths(error)),
            values,
        )
        return wrong | wrong | refusals | self._notices() | st.binary(max_size=12)

    def _notices(self) -> st.SearchStrategy[Any]:
        numbers = st.integers(-1, 6) | st.sampled_from([2**62, 2**63, 2**64, 10**30])
        of = st.sampled_from([self._process_id, "other"])
        output = {"stream": "stdout", "chunk": "eHl6"}
        exit_ = {"exitCode": 0, "sandboxDenied": False}
        events = st.sampled_from([("output", output), ("exited", exit_), ("closed", {})])
        return st.builds(
            lambda event, process, seq: {
                "method": f"process/{event[0]}",
                "params": {"processId": process, "seq": seq, **event[1]},
            },
            events,
            of,
            numbers,
        )


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


class HostileDialer:
    """One connection, and no other after it."""

    can_reconnect = True
    calls_in_flight = 16

    def __init__(self, data: st.DataObject) -> None:
        self._data = data
        self._stream: HostileStream | None = None

    @property
    def interruption(self) -> BaseException | None:
        return None if self._stream is None else self._stream.interruption

    async def open(self, make_receiver: ReceiverFactory) -> HostileStream:
        if self._stream is not None:
            raise ConnectFailed("gone", 404)
        self._stream = HostileStream(make_receiver, self._data)
        return self._stream

    def retry_delay(self, attempt: int) -> float:
        return 0.0

    async def close(self) -> None:
        pass


async def iterate(env: Environment) -> None:
    async with env.start(["x"], stdin=True) as process:
        await process.write(b"x")
        async for _ in process:
            pass
        await process.wait()


async def walk(env: Environment) -> None:
    async for _ in env.files.walk("/d", follow_links=True):
        pass


async def stream(env: Environment) -> None:
    async with env.http_stream("GET", "http://h/") as response:
        async for _ in response:
            pass


async def download(env: Environment) -> None:
    with tempfile.TemporaryDirectory() as directory:
        await env.files.download("/d", os.path.join(directory, "x"), check=False)


async def upload(env: Environment) -> None:
    with tempfile.TemporaryDirectory() as directory:
        await env.files.upload(directory, "/d", check=False)


async def write(env: Environment) -> None:
    async with env.files.open("/d/x", "wb") as file:
        await file.write(b"x")


CALLS: dict[str, Callable[[Environment], Awaitable[object]]] = {
    "run": lambda env: env.run(["x"], input=b"x"),
    "iterate": iterate,
    "read": lambda env: env.files.read("/d/x"),
    "list": lambda env: env.files.list("/d"),
    "exists": lambda env: env.files.exists("/d"),
    "copy": lambda env: env.files.copy("/d", "/e"),
    "disk usage": lambda env: env.files.disk_usage("/d"),
    "walk": walk,
    "write": write,
    "http": stream,
    "download": download,
    "upload": upload,
}


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_call_ends_with_a_result_or_an_error_of_ours(name: str, data: st.DataObject) -> None:
    records: list[str] = []

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    dialer = HostileDialer(data)

    async def scene() -> None:
        async with asyncio.timeout(scaled(DEFAULT_TIMEOUT)):
            async with Environment(dialer) as env:
                try:
                    await CALLS[name](env)
                except ExecServerError:
                    pass
        assert asyncio.all_tasks() == {asyncio.current_task()}

    recorder = Recorder(logging.WARNING)
    logging.getLogger("exec_server").addHandler(recorder)
    try:
        asyncio.run(scene())
    finally:
        logging.getLogger("exec_server").removeHandler(recorder)
    if dialer.interruption is not None:
        raise dialer.interruption
    assert records == []  # a subscriber that fails is logged, and its event is lost
