"""One connection and its request, on a transport in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.support.memory_transport import MemoryTransport

from exec_server.hosting import http_connection as front_module
from exec_server.hosting.http_connection import (
    BODY_CHUNKS,
    HEAD_LINES,
    LINGER_BYTES,
    HttpConnection,
    SocketAdmission,
    TakeOver,
)
from exec_server.hosting.http_messages import (
    Networks,
    ServiceAnswer,
    ServiceRequest,
    refusal_answer,
)
from exec_server.hosting.rules import Refusal

CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


class Upgrade:
    """An upgrade that notes its use."""

    def __init__(self) -> None:
        self.opened: list[bytes] = []
        self.cancelled = False

    def open(self, transport: asyncio.Transport, request: ServiceRequest, first: bytes) -> None:
        self.opened.append(first)

    def cancel(self) -> None:
        self.cancelled = True


class Handler:
    """Answers every request alike."""

    def __init__(self) -> None:
        self.trusted: Networks = ()
        self.has_room = SocketAdmission.ACCEPT
        self.requests: list[ServiceRequest] = []
        self.outcome: ServiceAnswer | TakeOver = ServiceAnswer(200, b"yes", "text/plain")

    def admission(self) -> SocketAdmission:
        return self.has_room

    def overloaded(self, path: str) -> ServiceAnswer:
        return ServiceAnswer(502 if path == "/register" else 503, b"crowded")

    async def answer(self, request: ServiceRequest) -> ServiceAnswer | TakeOver:
        self.requests.append(request)
        return self.outcome

    def refuse(self, refusal: Refusal, peer: str) -> ServiceAnswer:
        return refusal_answer(refusal)


class Scene:
    """A front with its transport; requests are answered when `run` is awaited."""

    def __init__(
        self, *, is_tls: bool = False, room: SocketAdmission = SocketAdmission.ACCEPT
    ) -> None:
        self.handler = Handler()
        self.handler.has_room = room
        self.tasks: list[Coroutine[Any, Any, None]] = []
        self.connections: set[HttpConnection] = set()
        front = HttpConnection(self.handler, self.tasks.append, self.connections)
        self.transport = MemoryTransport(front, peer=("1.2.3.4", 5), is_tls=is_tls)

    async def run(self) -> bytes:
        while self.tasks:
            await self.tasks.pop()
        return self.transport.take_written()


def on_loop(scene: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(scene())

    run.__name__ = scene.__name__
    return run


@on_loop
async def test_a_request_in_pieces_is_answered_and_the_connection_ends() -> None:
    scene = Scene()
    text = b"POST /p?q=1 HTTP/1.1\r\nHost: x\r\nA: 1\r\nA: 2\r\nContent-Length: 4\r\n\r\nbody"
    for byte in text:
        scene.transport.receive(bytes([byte]))
    assert (await scene.run()).endswith(b"connection: close\r\n\r\nyes")
    [request] = scene.handler.requests
    assert (request.method, request.path, request.query) == ("POST", "/p", "q=1")
    assert (request.headers["a"], request.body, request.peer) == ("1", b"body", "1.2.3.4")
    assert request.head == text[:-4]
    assert scene.transport.has_written_eof
    scene.transport.receive(b"x" * LINGER_BYTES)
    assert not scene.transport.is_aborted
    scene.transport.receive(b"x")
    assert scene.transport.is_aborted
    scene.transport.lose()
    assert scene.connections == set()


@on_loop
async def test_of_two_authorizations_none_counts() -> None:
    """A proxy in front may have checked the other one."""
    for count, kept in ((1, "Bearer 0"), (2, ""), (3, "")):
        scene = Scene()
        lines = "".join(f"Authorization: Bearer {number}\r\n" for number in range(count))
        scene.transport.receive(f"GET / HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode())
        await scene.run()
        [request] = scene.handler.requests
        assert request.headers["authorization"] == kept
        scene.transport.lose()


@on_loop
async def test_head_requests_get_no_body_and_tls_ends_by_itself() -> None:
    scene = Scene(is_tls=True)
    scene.transport.receive(b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await scene.run()).endswith(b"content-length: 3\r\nconnection: close\r\n\r\n")
    assert scene.transport.is_closing()
    scene.transport.lose()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"garbage\r\n\r\n", 400),
        (b"\x16\x03\x01", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\nl: " + b"x" * 70_000, 431),
        (b"GET / HTTP/1.1\r\nhost: x\r\nl: " + b"x" * 70_000 + b"\r\n\r\n", 431),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 65537\r\n\r\n" + b"x" * 65_537, 413),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: x\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a:\r\n" * HEAD_LINES, 431),
        (b"GET / HTTP/1.1\nhost: x\n" + b"a:\n" * HEAD_LINES + b"\n", 431),
        (CHUNKED + b"1\r\nx\r\n" * (BODY_CHUNKS + 1), 413),
    ],
)
def test_unreadable_requests_are_refused(request_bytes: bytes, status: int) -> None:
    async def run() -> None:
        scene = Scene()
        scene.transport.receive(request_bytes)
        assert scene.transport.written.startswith(f"HTTP/1.1 {status} ".encode())
        assert scene.handler.requests == []
        scene.transport.receive(b"more")
        scene.transport.lose()

    asyncio.run(run())


@on_loop
async def test_as_many_lines_and_chunks_as_allowed_are_read() -> None:
    scene = Scene()
    scene.transport.receive(CHUNKED + b"2\r\n\n\n\r\n" * BODY_CHUNKS + b"0\r\n\r\n")
    await scene.run()
    other = Scene()
    lines = b"a:\r\n" * (HEAD_LINES - 4)
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 600\r\n" + lines + b"\r\n"
    other.transport.receive(head + b"\n" * 600)
    await other.run()
    bodies = [len(each.handler.requests[0].body) for each in (scene, other)]
    assert bodies == [2 * BODY_CHUNKS, 600]
    for each in (scene, other):
        each.transport.lose()


@pytest.mark.parametrize(
    "sent", [b"G", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nab"]
)
def test_a_request_that_takes_too_long_is_answered(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        scene, silent = Scene(), Scene()
        scene.transport.receive(sent)
        while not (scene.transport.written and silent.transport.is_aborted):
            await asyncio.sleep(0)
        assert scene.transport.written.startswith(b"HTTP/1.1 408 ")
        assert silent.transport.written == b""
        for each in (scene, silent):
            each.transport.lose()

    monkeypatch.setattr(front_module, "REQUEST_SECONDS", 0.0)
    asyncio.run(run())


@on_loop
async def test_without_room_the_path_decides_about_the_answer() -> None:
    for path, status in ((b"/register", b"502"), (b"/other?x", b"503")):
        scene = Scene(room=SocketAdmission.REJECT)
        assert scene.transport.written == b""
        scene.transport.receive(b"POST " + path + b" HTTP/1.1\r\nhost: x\r\n")
        assert scene.transport.written == b""
        scene.transport.receive(b"content-length: 3\r\n\r\nbo")
        assert scene.transport.written.startswith(b"HTTP/1.1 " + status)
        assert scene.transport.has_written_eof
        scene.transport.receive(b"d")
        assert (scene.handler.requests, scene.tasks) == ([], [])
        scene.transport.lose()


def test_without_room_a_silent_peer_is_answered_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        scene = Scene(room=SocketAdmission.REJECT)
        while not scene.transport.written:
            await asyncio.sleep(0)
        assert scene.transport.written.startswith(b"HTTP/1.1 503 ")
        scene.transport.lose()

    monkeypatch.setattr(front_module, "REFUSED_SECONDS", 0.0)
    asyncio.run(run())


@on_loop
async def test_beyond_that_a_connection_is_answered_and_closed_at_once() -> None:
    scene = Scene(room=SocketAdmission.REJECT_AT_ONCE)
    assert scene.transport.written.startswith(b"HTTP/1.1 503 ")
    assert scene.transport.is_closing()
    scene.transport.lose()
    assert scene.connections == set()


@on_loop
async def test_an_upgrade_takes_the_transport_over() -> None:
    scene = Scene()
    scene.handler.outcome = upgrade = Upgrade()
    head = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    scene.transport.receive(head + b"first")
    assert scene.transport.is_reading_paused
    await scene.run()
    assert upgrade.opened == [b"first"]
    assert scene.handler.requests[0].head == head
    assert scene.connections == set()


@on_loop
async def test_an_upgrade_of_a_peer_that_has_left_is_cancelled() -> None:
    scene = Scene()
    scene.handler.outcome = upgrade = Upgrade()
    scene.transport.receive(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    scene.transport.lose()
    await scene.run()
    assert (upgrade.opened, upgrade.cancelled) == ([], True)


@on_loop
async def test_an_answer_for_a_peer_that_has_left_is_dropped() -> None:
    scene = Scene()
    scene.transport.receive(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    scene.transport.lose()
    assert await scene.run() == b""


@on_loop
async def test_a_peer_that_ends_before_its_request_is_complete_gets_nothing() -> None:
    scene = Scene()
    scene.transport.receive(b"GET / HTTP/1.1\r\n")
    scene.transport.eof()
    assert scene.transport.is_closing()
    assert scene.transport.written == b""
    scene.transport.lose()
