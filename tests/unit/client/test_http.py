"""Bodies that come piece by piece, with a server that is the test."""

from __future__ import annotations

import asyncio
import base64
import math
from typing import Any

import pytest
from tests.support.memory_session import Scene, in_environment, turns

from exec_server.client import http as module
from exec_server.client.http import HttpStream
from exec_server.errors import ConnectionLost, InternalError, Unsupported


async def opened(scene: Scene, timeout: float | None = None) -> HttpStream:
    """A request whose answer has come, and whose body has not."""
    stream = scene.env.http_stream("GET", "http://a/", timeout=timeout)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stream.__aenter__())
        request = await scene.stream.next("http/request")
        assert request["params"]["timeoutMs"] is None
        scene.process_id = request["params"]["requestId"]
        headers = [{"name": "a", "value": "1"}]
        scene.stream.answer(request, {"status": 200, "headers": headers, "bodyBase64": ""})
    return stream


def delta(scene: Scene, seq: int, data: bytes = b"", **others: Any) -> None:
    params = {
        "requestId": scene.process_id,
        "seq": seq,
        "deltaBase64": base64.b64encode(data).decode(),
        "done": False,
        "error": None,
    }
    scene.stream.say({"method": "http/request/bodyDelta", "params": params | others})


@in_environment
async def test_pieces_come_in_order(scene: Scene) -> None:
    stream = await opened(scene, timeout=math.inf)
    delta(scene, 1, b"one")
    delta(scene, 1, b"not mine", requestId="another")
    assert await anext(stream) == b"one"
    delta(scene, 2, b"two")
    delta(scene, 3, done=True)
    assert [piece async for piece in stream] == [b"two"]
    assert (stream.status, stream.header("A"), stream.header("b")) == (200, "1", None)
    await stream.__aexit__(None, None, None)


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("broken", InternalError, "the body broke"),
        ("gap", InternalError, "a part of the body is missing"),
        ("lost", ConnectionLost, "while a body was received"),
    ],
)
def test_bodies_that_end_badly(how: str, error: type[Exception], text: str) -> None:
    async def ends(scene: Scene) -> None:
        stream = await opened(scene)
        delta(scene, 1, b"one")
        if how == "broken":
            delta(scene, 2, done=True, error="the body broke")
        elif how == "gap":
            delta(scene, 3, b"three")
        else:
            await scene.reconnected()
        assert await anext(stream) == b"one"
        with pytest.raises(error, match=text):
            [piece async for piece in stream]
        await stream.__aexit__(None, None, None)

    in_environment(ends)()


@in_environment
async def test_a_body_that_nobody_reads_holds_the_reading(scene: Scene) -> None:
    stream = await opened(scene)
    delta(scene, 1, b"x")
    await anext(stream)
    delta(scene, 2, bytes(module.FULL_BYTES))
    assert not scene.stream.receiving
    await anext(stream)
    assert scene.stream.receiving


@in_environment
async def test_a_body_that_comes_too_fast_is_given_up(scene: Scene) -> None:
    """Somebody waits, so reading goes on, and nobody takes the body."""
    stream = await opened(scene)
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(scene.env.files.exists("/"))
        request = await scene.stream.next("fs/getMetadata")
        piece = bytes(1_048_576)
        count = module.OVERFLOW_BYTES // len(piece)
        for seq in range(1, count + 10):
            assert scene.stream.receiving
            delta(scene, seq, piece)
        scene.stream.refuse(request, -32004, "none")
        assert not await call
    with pytest.raises(InternalError, match="read too slowly"):
        [piece async for piece in stream]
    await stream.__aexit__(None, None, None)


@in_environment
async def test_a_server_that_makes_no_requests(scene: Scene) -> None:
    async def ask() -> None:
        with pytest.raises(Unsupported, match="http/request: run a program"):
            await scene.env.http("GET", "http://a/")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ask())
        request = await scene.stream.next("http/request")
        scene.stream.refuse(request, -32601, "no such method")
        await turns()
    assert len(scene.env.session._subscribers) == 1


@in_environment
async def test_a_request_is_made_once(scene: Scene) -> None:
    stream = await opened(scene)
    with pytest.raises(RuntimeError, match="opened only once"):
        await stream.__aenter__()
    await stream.__aexit__(None, None, None)
