"""http/request between a connection and answers made up: order, back-pressure, limits, ends."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, closing
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from exec_server.errors import InternalError, InvalidParams, InvalidRequest
from exec_server.host import http as requests
from exec_server.host.http import HttpResources
from exec_server.host.threads import ThreadPool
from exec_server.protocol.decoding import Notice
from exec_server.protocol.http import BodyDeltaParams, Header, RequestParams, RequestResult
from exec_server.server import context as contexts
from exec_server.server.context import (
    ConnectionContext,
    Encoded,
    LazyEvent,
    ServerContext,
    Streamed,
)
from exec_server.server.handlers import http


class Body:
    """An answer whose pieces the test hands out; None is the end."""

    status = 200
    headers: Sequence[tuple[str, str]] = ()

    def __init__(self) -> None:
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.closed = asyncio.Event()

    async def read(self) -> bytes:
        return await self.pieces.get() or b""

    def close(self) -> None:
        self.closed.set()


class Fetch:
    """Answers when the test lets it."""

    def __init__(self) -> None:
        self.asked = 0
        self.go = asyncio.Event()
        self.go.set()
        self.bodies: list[Body] = []

    async def open(self, *_: object, **__: object) -> Body:
        self.asked += 1
        await self.go.wait()
        self.bodies.append(Body())
        return self.bodies[-1]


def _server(resources: HttpResources | None) -> ServerContext:
    nothing = cast(Any, None)
    return ServerContext(
        environment=nothing,
        variables={},
        login_shell="",
        file_threads=nothing,
        decode_threads=nothing,
        inotify=nothing,
        sandboxes=nothing,
        sessions=nothing,
        detached=nothing,
        tasks=nothing,
        http=None if resources is None else lambda: resources,
    )


class World:
    """A context without a connection; records notifications."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.fetch = Fetch()
        self.sent: asyncio.Queue[BodyDeltaParams] = asyncio.Queue()
        self.ended = False
        self.tasks: list[asyncio.Task[None]] = []
        self.group = tasks
        nothing = cast(Any, None)
        server = _server(HttpResources(self.fetch))
        self.writable = LazyEvent()
        self.writable.set()
        self.context = ConnectionContext(server, nothing, self._notify, self._start, self.writable)

    def _notify(self, notice: Notice[msgspec.Struct], params: msgspec.Struct) -> None:
        assert notice.name == "http/request/bodyDelta"
        assert isinstance(params, BodyDeltaParams)
        self.sent.put_nowait(params)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> bool:
        if self.ended:
            coroutine.close()
            return False
        self.tasks.append(self.group.create_task(coroutine))
        return True

    def request(self, **members: Any) -> Awaitable[Any]:
        params = {"method": "GET", "url": "http://h/", "request_id": "r"} | members
        return http.request(self.context, RequestParams(**params))

    def start(self, **members: Any) -> asyncio.Task[Any]:
        return self.group.create_task(cast(Coroutine[Any, Any, Any], self.request(**members)))


@asynccontextmanager
async def _world() -> AsyncIterator[World]:
    async with asyncio.TaskGroup() as tasks:
        world = World(tasks)
        yield world
        for task in world.tasks:
            task.cancel()


def _run(job: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(10), _world() as world:
            await job(world)

    asyncio.run(run())


@pytest.mark.parametrize(
    "members",
    [
        {"url": "http://h/" + "a" * http.INLINE_URL_CHARACTERS},
        {"headers": [Header("a", "b")] * (http.INLINE_HEADERS + 1)},
    ],
)
@pytest.mark.parametrize("stream_response", [True, False])
def test_a_long_request_is_checked_in_a_thread(
    members: dict[str, Any], stream_response: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    build = requests.build_request

    def record(params: RequestParams, variables: dict[str, str]) -> requests.HttpRequest:
        names.append(threading.current_thread().name)
        return build(params, variables)

    monkeypatch.setattr(requests, "build_request", record)

    async def job(world: World) -> None:
        with closing(ThreadPool(1, "check")) as threads:
            world.context.server = replace(world.context.server, file_threads=threads)
            for _ in range(2):
                invalid = members | {"method": "\n", "stream_response": stream_response}
                with pytest.raises(InvalidParams, match="invalid HTTP method"):
                    await world.request(**invalid)
        assert names == ["check_1", "check_1"]

    _run(job)


def test_the_answer_comes_before_the_first_delta() -> None:
    async def job(world: World) -> None:
        head = await world.request(stream_response=True)
        assert head == RequestResult(200, [], b"")
        body = world.fetch.bodies[0]
        body.pieces.put_nowait(b"one")
        assert world.sent.empty()
        assert await world.sent.get() == BodyDeltaParams("r", 1, b"one", False, None)
        body.pieces.put_nowait(None)
        assert await world.sent.get() == BodyDeltaParams("r", 2, b"", True, None)
        assert body.closed.is_set()
        assert world.context.http_streams == set()

    _run(job)


def test_large_pieces_are_divided() -> None:
    async def job(world: World) -> None:
        await world.request(stream_response=True)
        world.fetch.bodies[0].pieces.put_nowait(bytes(http.DELTA_BYTES + 1))
        deltas = [await world.sent.get() for _ in range(2)]
        assert [len(delta.delta_base64) for delta in deltas] == [http.DELTA_BYTES, 1]
        assert [delta.seq for delta in deltas] == [1, 2]

    _run(job)


def test_nothing_is_read_for_a_client_that_takes_nothing() -> None:
    async def job(world: World) -> None:
        await world.request(stream_response=True)
        pieces = world.fetch.bodies[0].pieces
        world.writable.clear()
        for number in range(5):
            pieces.put_nowait(b"%d" % number)
        while pieces.qsize() == 5:
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert (pieces.qsize(), world.sent.empty()) == (4, True)
        world.writable.set()
        received = [(await world.sent.get()).delta_base64 for _ in range(5)]
        assert received == [b"0", b"1", b"2", b"3", b"4"]

    _run(job)


def test_each_waits_for_its_turn_when_the_client_is_slow_again() -> None:
    async def job(world: World) -> None:
        for request_id in ("a", "b"):
            await world.request(stream_response=True, request_id=request_id)
        world.writable.clear()
        for body in world.fetch.bodies:
            body.pieces.put_nowait(b"x")
        notify = world.context.notify

        def slow_again(notice: Notice[msgspec.Struct], params: msgspec.Struct) -> None:
            notify(notice, params)
            world.writable.clear()

        world.context.notify = slow_again
        await asyncio.sleep(0)
        world.writable.set()
        await world.sent.get()
        for _ in range(10):
            await asyncio.sleep(0)
        assert world.sent.empty()

    _run(job)


def test_streams_are_limited() -> None:
    async def job(world: World) -> None:
        for number in range(http.MAX_STREAMS):
            await world.request(stream_response=True, request_id=str(number))
        with pytest.raises(InvalidRequest, match="at most 128 http/request bodies"):
            world.request(stream_response=True)
        world.fetch.bodies[0].pieces.put_nowait(None)
        await world.sent.get()
        await world.request(stream_response=True)

    _run(job)


def test_requests_under_way_are_limited() -> None:
    async def job(world: World) -> None:
        world.fetch.go.clear()
        requests = [world.start() for _ in range(contexts.CONCURRENT_HTTP_REQUESTS + 1)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert world.fetch.asked == contexts.CONCURRENT_HTTP_REQUESTS
        with pytest.raises(InternalError, match="route-aware request timed out"):
            await world.request(timeout_ms=1)
        requests[0].cancel()
        await asyncio.wait(requests[:1])
        while world.fetch.asked == contexts.CONCURRENT_HTTP_REQUESTS:
            await asyncio.sleep(0)
        for request in requests:
            request.cancel()

    _run(job)


def test_a_request_with_time_left_is_sent() -> None:
    async def job(world: World) -> None:
        await world.request(stream_response=True, timeout_ms=60_000)
        assert world.fetch.asked == 1

    _run(job)


def test_a_request_without_time_is_not_sent() -> None:
    async def job(world: World) -> None:
        with pytest.raises(InternalError, match="route-aware request timed out"):
            await world.request(timeout_ms=0)
        assert world.fetch.asked == 0

    _run(job)


def test_a_stream_has_an_id_of_its_own() -> None:
    async def job(world: World) -> None:
        await world.request(stream_response=True)
        with pytest.raises(InvalidParams, match="requestId `r` is already active"):
            world.request(stream_response=True)

    _run(job)


def test_failed_stream_gives_its_id_back() -> None:
    async def job(world: World) -> None:
        world.fetch.go.clear()
        with pytest.raises(InternalError):
            await world.request(stream_response=True, timeout_ms=1)
        assert world.context.http_streams == set()

    _run(job)


def test_stream_of_a_connection_that_has_just_ended_is_closed() -> None:
    async def job(world: World) -> None:
        world.ended = True
        await world.request(stream_response=True)
        assert world.fetch.bodies[0].closed.is_set()

    _run(job)


def test_cancelled_stream_is_closed() -> None:
    async def job(world: World) -> None:
        await world.request(stream_response=True)
        await asyncio.sleep(0)
        world.tasks[0].cancel()
        await world.fetch.bodies[0].closed.wait()
        assert world.sent.empty()

    _run(job)


async def _answer(world: World, request: asyncio.Task[Any], *pieces: bytes) -> Any:
    while not world.fetch.bodies:
        await asyncio.sleep(0)
    for piece in (*pieces, None):
        world.fetch.bodies[0].pieces.put_nowait(piece)
    return await request


def test_whole_answer_waits_until_it_can_be_sent() -> None:
    async def job(world: World) -> None:
        world.writable.clear()
        request = world.start()
        answering = world.group.create_task(_answer(world, request, b"ab", b"c"))
        await asyncio.sleep(0)
        while not world.fetch.bodies or not world.fetch.bodies[0].closed.is_set():
            await asyncio.sleep(0)
        assert not request.done()
        world.writable.set()
        result = await answering
        assert isinstance(result, Encoded)
        assert json.loads(result.text) == {"status": 200, "headers": [], "bodyBase64": "YWJj"}

    _run(job)


def test_long_answer_is_sent_piece_by_piece() -> None:
    async def job(world: World) -> None:
        body = bytes(range(256)) * (http.WHOLE_BYTES // 256) + b"x"
        result = await _answer(world, world.start(), body)
        assert isinstance(result, Streamed)
        assert world.context.server.http is not None
        resources = world.context.server.http()
        free = resources.free_body_bytes
        parts = [part async for part in result.parts]
        assert sum(map(len, parts)) == result.size
        assert max(map(len, parts)) <= http.PIECE_BYTES // 3 * 4
        expected = RequestResult(200, [], body)
        assert msgspec.json.decode(b"".join(parts), type=RequestResult) == expected
        del result
        assert resources.free_body_bytes >= free + len(body)

    _run(job)


def test_server_that_makes_no_requests() -> None:
    async def job(world: World) -> None:
        world.context.server = _server(None)
        with pytest.raises(InternalError, match="makes no HTTP requests"):
            world.request()

    _run(job)
