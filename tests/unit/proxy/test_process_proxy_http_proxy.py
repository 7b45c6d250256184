"""HttpProxy over connections in memory: times, refusals, and both directions of an exchange."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest
from tests.support.clock import run_in_virtual_time
from tests.support.memory_transport import stream_pair
from tests.support.network import launch

from exec_server.protocol.network import DecisionParams, PolicyParams
from exec_server.proxy import http_exchange as module
from exec_server.proxy.decider import Decider
from exec_server.proxy.policy import NetworkPolicy
from exec_server.proxy.process_proxy import HttpProxy
from exec_server.proxy.stream import TransportStream
from exec_server.proxy.upstream import Route, Upstream


class World(Upstream):
    """A proxy whose origins are in memory; also its Controller."""

    def __init__(self) -> None:
        domains = {"a.test": "allow", "gone.test": "allow", "bad.test": "deny"}
        policy = NetworkPolicy(launch(domains=domains))
        super().__init__(None)
        self.reports: list[DecisionParams] = []
        self.routes: list[Route] = []
        self.origins: asyncio.Queue[TransportStream] = asyncio.Queue()
        self.client, served = stream_pair()
        self._ends = [self.client, served]
        decider = Decider("p", policy, self, self.resolve, self.forwards)
        self.proxy = HttpProxy(served, "127.0.0.1:5", decider, self)

    def report(self, decision: DecisionParams) -> None:
        self.reports.append(decision)

    async def ask(self, question: PolicyParams) -> object:
        raise AssertionError("nobody is asked")

    async def resolve(self, host: str) -> Sequence[str]:
        return ("8.8.4.4",) if host == "gone.test" else ("8.8.8.8",)

    async def connect(self, route: Route) -> TransportStream:
        self.routes.append(route)
        if "8.8.4.4" in route.addresses:
            raise OSError("nothing there")
        inner, outer = stream_pair()
        self._ends += (inner, outer)
        self.origins.put_nowait(outer)
        return inner

    def close(self) -> None:
        for end in self._ends:
            end.writer.close()

    def send(self, text: str) -> None:
        self.client.writer.write(text.replace("\n", "\r\n").encode())

    async def head(self, stream: TransportStream | None = None) -> str:
        return (await (stream or self.client).reader.readuntil(b"\r\n\r\n")).decode()


def _run(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        world = World()
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            served = tasks.create_task(world.proxy.serve())
            await scenario(world)
            world.client.writer.close()
            await served
        world.close()

    asyncio.run(run())


def _run_until_end(scenario: Callable[[World], Awaitable[None]]) -> None:
    """The proxy ends the connection, and not the client."""

    async def run() -> None:
        world = World()
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            served = tasks.create_task(world.proxy.serve())
            await scenario(world)
            await served
        world.close()

    asyncio.run(run())


def _time_until_end(*sent: str) -> float:
    """Seconds until the proxy ends a connection whose process sends nothing more."""

    async def run() -> float:
        world = World()
        for text in sent:
            world.send(text)
        await world.proxy.serve()
        world.close()
        return asyncio.get_running_loop().time()

    return run_in_virtual_time(run())


_REFUSED = "GET http://bad.test/ HTTP/1.1\nHost: bad.test\n\n"


_HIDDEN = "DELETE /hidden HTTP/1.1\nHost: a.test\n\n"


@pytest.mark.parametrize(
    "options",
    [
        *("content-length", "close, Content-Length", "Transfer-Encoding", "host", "Authorization"),
        *("keep-alive\nConnection: Content-Length", "x,\n CONTENT-LENGTH"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "CONNECT"])
def test_framing_headers_that_connection_names(method: str, options: str) -> None:
    """The origin would read the body as further requests."""

    async def scenario(world: World) -> None:
        target = "a.test:80" if method == "CONNECT" else "http://a.test/"
        length = len(_HIDDEN.replace("\n", "\r\n"))
        world.send(
            f"{method} {target} HTTP/1.1\nHost: a.test\nConnection: {options}\n"
            f"Content-Length: {length}\n\n{_HIDDEN}"
        )
        head = await world.head()
        assert head.startswith("HTTP/1.1 400 Bad Request\r\n")
        assert "connection: close\r\n" in head
        assert world.origins.empty()

    _run_until_end(scenario)


def test_an_origin_cannot_hide_the_length_of_its_response() -> None:
    """The process would take the next response, of another host, for a part of this body."""

    async def scenario(world: World) -> None:
        world.send("GET http://a.test/ HTTP/1.1\nHost: a.test\n\n")
        origin = await world.origins.get()
        await world.head(origin)
        origin.writer.write(
            b"HTTP/1.1 200 OK\r\nConnection: content-length\r\nContent-Length: 2\r\n\r\nok"
        )
        assert (await world.head()).startswith("HTTP/1.1 502 Bad Gateway\r\n")

    _run_until_end(scenario)


def test_slow_heads_are_cut_off() -> None:
    assert _time_until_end("GET http://a.test/") == module.HEAD_SECONDS == 30
    # Also the head of a request that has come with the one before it.
    assert _time_until_end(_REFUSED + "GET http://a.test/") == module.HEAD_SECONDS


def test_idle_connections_are_closed() -> None:
    assert _time_until_end() == module.IDLE_SECONDS == 300
    assert _time_until_end(_REFUSED) == module.IDLE_SECONDS


def test_refusals_keep_the_connection() -> None:
    async def scenario(world: World) -> None:
        for _ in range(2):
            world.send("GET http://bad.test/ HTTP/1.1\nHost: bad.test\n\n")
            assert (await world.head()).startswith("HTTP/1.1 403 Forbidden")
            await world.client.reader.readuntil(b"}")
        world.send("CONNECT bad.test:443 HTTP/1.1\nHost: bad.test:443\n\n")
        assert (await world.head()).startswith("HTTP/1.1 403 Forbidden")
        await world.client.reader.readuntil(b"policy.")
        world.send("CONNECT gone.test:443 HTTP/1.1\nHost: gone.test:443\n\n")
        assert (await world.head()).startswith("HTTP/1.1 502 Bad Gateway")
        assert [report.reason for report in world.reports] == ["denied"] * 3 + ["allow"]

    _run(scenario)


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        ("nonsense\n\n", "HTTP/1.1 400 Bad Request"),
        ("GET / HTTP/1.1\nHost: a\nX: " + "x" * 70_000, "HTTP/1.1 431 Request Header"),
        ("GET http://a.test/ HTTP/1.1\nHost: b.test\n\n", "HTTP/1.1 400 Bad Request"),
        ("GET http://gone.test/ HTTP/1.1\nHost: gone.test\n\n", "HTTP/1.1 502 Bad Gateway"),
        ("GET http://a.test/ HTTP/1.1\nHost: a.test\nX-Unix-Socket: /x\n\n", "HTTP/1.1 501 Not"),
        ("POST http://bad.test/ HTTP/1.1\nHost: bad.test\nContent-Length: 9\n\n", "HTTP/1.1 403"),
    ],
)
def test_last_answers(sent: str, answer: str) -> None:
    async def scenario(world: World) -> None:
        world.send(sent)
        head = await world.head()
        assert head.startswith(answer)
        assert "connection: close" in head.lower()

    _run_until_end(scenario)


def test_bodies_pass_while_they_arrive() -> None:
    async def scenario(world: World) -> None:
        world.send("POST http://a.test/p HTTP/1.1\nHost: a.test\nTransfer-Encoding: chunked\n\n")
        origin = await world.origins.get()
        assert (await world.head(origin)).startswith("POST /p HTTP/1.1\r\nHost: a.test\r\n")
        assert world.routes == [Route(("8.8.8.8",), 80)]
        world.send("3\nabc\n")
        assert await origin.reader.readuntil(b"abc\r\n") == b"3\r\nabc\r\n"
        origin.writer.write(b"HTTP/1.1 103 Hints\r\n\r\nHTTP/1.1 200 Fine\r\n\r\nfirst")
        assert (await world.head()).startswith("HTTP/1.1 200 Fine\r\n")
        assert await world.client.reader.readuntil(b"first\r\n") == b"5\r\nfirst\r\n"
        world.send("0\n\n")
        assert await origin.reader.readuntil(b"0\r\n\r\n") == b"0\r\n\r\n"
        origin.writer.close()
        assert await world.client.reader.readuntil(b"0\r\n\r\n") == b"0\r\n\r\n"

    _run(scenario)


def test_answers_to_head_have_no_body() -> None:
    async def scenario(world: World) -> None:
        for method in ("HEAD", "GET"):
            world.send(f"{method} http://bad.test/ HTTP/1.1\nHost: bad.test\n\n")
            assert "content-length: 1" in await world.head()
        await world.client.reader.readuntil(b"}")
        world.send("HEAD http://a.test/ HTTP/1.1\nHost: a.test\n\n")
        origin = await world.origins.get()
        await world.head(origin)
        origin.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nunwanted!")
        assert "Content-Length: 9\r\n" in await world.head()
        world.send("GET http://bad.test/ HTTP/1.1\nHost: bad.test\n\n")
        assert (await world.head()).startswith("HTTP/1.1 403 ")

    _run(scenario)


def test_bodies_of_known_length_pass_with_nothing_after_them() -> None:
    async def scenario(world: World) -> None:
        head = "POST http://a.test/ HTTP/1.1\nHost: a.test\nContent-Length: 6\n"
        world.send(f"{head}Expect: 100-continue\n\n")
        origin = await world.origins.get()
        assert "Content-Length: 6\r\n" in await world.head(origin)
        assert await world.head() == "HTTP/1.1 100 Continue\r\n\r\n"
        world.send("abc")
        assert await origin.reader.readexactly(3) == b"abc"
        world.send("def")
        assert await origin.reader.readexactly(3) == b"def"
        origin.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n123")
        await world.head()
        assert await world.client.reader.readexactly(3) == b"123"
        origin.writer.write(b"456HTTP/1.1 200 OK\r\n\r\nanother answer")
        assert await world.client.reader.readexactly(3) == b"456"
        world.send("GET http://bad.test/ HTTP/1.1\nHost: bad.test\n\n")
        assert (await world.head()).startswith("HTTP/1.1 403 ")

    _run(scenario)


def test_old_clients_get_a_body_until_the_end() -> None:
    async def scenario(world: World) -> None:
        world.send("GET http://a.test/ HTTP/1.0\n\n")
        origin = await world.origins.get()
        await world.head(origin)
        origin.writer.write(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
        )
        head = await world.head()
        assert "connection: close\r\n" in head
        assert "chunked" not in head
        assert await world.client.reader.readexactly(3) == b"abc"

    _run_until_end(scenario)


def test_a_short_body_resets_the_connection() -> None:
    async def scenario(world: World) -> None:
        world.send("GET http://a.test/ HTTP/1.1\nHost: a.test\n\n")
        origin = await world.origins.get()
        await world.head(origin)
        origin.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\npart")
        origin.writer.close()
        await world.head()
        assert await world.client.reader.read() == b"part"

    _run_until_end(scenario)


def _turns(work: Awaitable[None]) -> int:
    """How often other tasks get their turn during this work."""

    async def run() -> int:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            counting = tasks.create_task(count())
            await work
            counting.cancel()
        return turns

    return asyncio.run(run())


def test_many_small_parts_let_other_connections_run() -> None:
    async def requests() -> None:
        world = World()
        world.send(_REFUSED * 200)
        world.client.writer.write_eof()
        await world.proxy.serve()
        assert (await world.client.reader.read(1 << 20)).count(b"HTTP/1.1 403") == 200
        world.close()

    async def interim_responses_and_chunks() -> None:
        world = World()
        world.send("GET http://a.test/ HTTP/1.1\nHost: a.test\nConnection: close\n\n")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(world.proxy.serve())
            origin = await world.origins.get()
            await world.head(origin)
            origin.writer.write(
                b"HTTP/1.1 103 x\r\n\r\n" * 1000
                + b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
                + b"1\r\nx\r\n" * 1000
                + b"0\r\n\r\n"
            )
            await world.head()
            # The chunks that arrive together are sent as one.
            assert (await world.client.reader.readuntil(b"0\r\n\r\n")).count(b"\r\n") < 20
        world.close()

    assert _turns(requests()) >= 199
    assert _turns(interim_responses_and_chunks()) >= 2000 // module.EVENTS_AT_ONCE


def test_an_early_answer_ends_the_connection_after_it() -> None:
    async def scenario(world: World) -> None:
        world.send("POST http://a.test/ HTTP/1.1\nHost: a.test\nContent-Length: 99\n\nsome")
        origin = await world.origins.get()
        await world.head(origin)
        origin.writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        assert (await world.head()).startswith("HTTP/1.1 413 Too Large\r\n")

    _run_until_end(scenario)


def test_a_request_without_its_end_ends_the_exchange() -> None:
    async def scenario(world: World) -> None:
        world.send("POST http://a.test/ HTTP/1.1\nHost: a.test\nContent-Length: 99\n\nsome")
        origin = await world.origins.get()
        await world.head(origin)
        world.client.writer.write_eof()
        assert await origin.reader.read() == b"some"
        origin.writer.close()

    _run_until_end(scenario)


def test_a_broken_answer_is_not_completed() -> None:
    async def scenario(world: World) -> None:
        world.send("GET http://a.test/ HTTP/1.1\nHost: a.test\n\n")
        origin = await world.origins.get()
        await world.head(origin)
        origin.writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nab")
        origin.writer.close()
        await world.head()
        assert b"0\r\n\r\n" not in await world.client.reader.read()

    _run_until_end(scenario)


def test_tunnel() -> None:
    async def scenario(world: World) -> None:
        world.send("CONNECT a.test:443 HTTP/1.1\nHost: a.test:443\n\nearly")
        origin = await world.origins.get()
        assert (await world.head()).startswith("HTTP/1.1 200 OK\r\n")
        assert await origin.reader.readexactly(5) == b"early"
        origin.writer.write(b"answer")
        assert await world.client.reader.readexactly(6) == b"answer"
        origin.writer.close()
        assert await world.client.reader.read() == b""

    _run(scenario)
