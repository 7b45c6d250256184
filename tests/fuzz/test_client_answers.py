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
from tests.support.memory_session import OURS, MemoryStream, Message

from exec_server.client.engine.session import Closing
from exec_server.client.environment import Environment
from exec_server.errors import ConnectFailed, ExecServerError
from exec_server.net.stream import ReceiverFactory

# A script: for each request the messages that follow, and whether the right answer does.
Script = list[tuple[list[tuple[str, Any]], bool]]
# After as many messages the server leaves.
MAX_MESSAGES = 24

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
    "fs/readDirectory": {"entries": [{"fileName": "a", "isDirectory": False, "isFile": True}]},
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


# How a part of an answer is changed: a number that chooses the part, and its new value.
changes = st.tuples(st.integers(0, 63), values)
ERROR = {"code": -32603, "message": "x (os error 5)", "data": {"sandboxDenial": 5}}
EVENTS: list[tuple[str, dict[str, Any]]] = [
    ("output", {"stream": "stdout", "chunk": "eHl6"}),
    ("exited", {"exitCode": 0, "sandboxDenied": False}),
    ("closed", {}),
]
numbers = st.integers(-1, 6) | st.sampled_from([2**62, 2**63, 2**64, 10**30])
messages = (
    st.tuples(st.just("answer"), changes)
    | st.tuples(st.just("answer"), changes)
    | st.tuples(st.just("refusal"), changes)
    | st.tuples(st.just("notice"), st.tuples(st.sampled_from(EVENTS), st.booleans(), numbers))
    | st.tuples(st.just("garbage"), st.binary(max_size=12))
)
# The messages after each request, and whether the right answer follows them. They are drawn before
# the client runs: the order of its requests may differ from run to run, a draw must not.
scripts = st.lists(st.tuples(st.lists(messages, max_size=3), st.booleans()), max_size=8)


class HostileStream(MemoryStream):
    """Answers each request by its script, until there is none or enough was said."""

    def __init__(self, make_receiver: ReceiverFactory, script: Script) -> None:
        super().__init__(make_receiver)
        self._script = iter(script)
        self._left = MAX_MESSAGES
        self._process_id = "p"
        self._leaving: asyncio.TimerHandle | None = None

    def send(self, message: bytes) -> None:
        loop = asyncio.get_running_loop()
        request = json.loads(message)
        if request.get("method") == "initialize":
            loop.call_soon(self.answer, request, OURS)
        elif "id" in request and "method" in request:
            loop.call_soon(self._answer_anything, request)

    def close(self, code: int, reason: str) -> None:
        if self.closed is None:
            super().close(code, reason)

    def _answer_anything(self, request: Message) -> None:
        if request["method"] == "process/start":
            self._process_id = request["params"]["processId"]
        said, is_answered = next(self._script, ([], False))
        for kind, content in said:
            self._left -= 1
            self.receiver.message_received(self._message(request, kind, content))
        if is_answered:
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

    def _message(self, request: Message, kind: str, content: Any) -> bytes:
        if kind == "garbage":
            return bytes(content)
        if kind == "notice":
            (name, params), is_ours, seq = content
            process = self._process_id if is_ours else "other"
            params = {"processId": process, "seq": seq, **params}
            return encoded({"method": f"process/{name}", "params": params})
        if kind == "refusal":
            return encoded({"id": request["id"], "error": changed_at(ERROR, *content)})
        return encoded(changed_at(self._right_answer(request), *content))


def changed_at(value: Any, number: int, new: Any) -> Any:
    places = paths(value)
    return changed(value, places[number % len(places)], new)


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


class HostileDialer:
    """One connection, and no other after it."""

    can_reconnect = True
    calls_in_flight = 16

    def __init__(self, script: Script) -> None:
        self._script = script
        self._stream: HostileStream | None = None

    async def open(self, make_receiver: ReceiverFactory) -> HostileStream:
        if self._stream is not None:
            raise ConnectFailed("gone", 404)
        self._stream = HostileStream(make_receiver, self._script)
        return self._stream

    def retry_delay(self, attempt: int) -> float:
        return 0.0

    async def close(self, closing: Closing) -> None:
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
@given(script=scripts)
def test_every_call_ends_with_a_result_or_an_error_of_ours(name: str, script: Script) -> None:
    records: list[str] = []

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    async def scene() -> None:
        async with asyncio.timeout(scaled(DEFAULT_TIMEOUT)):
            async with Environment(HostileDialer(script)) as env:
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
    assert records == []  # a subscriber that fails is logged, and its event is lost
