"""Detached processes of the client, with a server that is the test."""

from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import Any, cast

import msgspec
import pytest
from tests.support.memory_session import OURS, Message, Scene, in_environment, turns

from exec_server.client.engine import flow_control
from exec_server.client.process import DetachedProcess, read_retained
from exec_server.client.results import Chunk
from exec_server.errors import InvalidParams, InvalidRequest, ProcessLost, StdinClosed, Unsupported

# A server with detached processes.
DETACHING = msgspec.json.decode(msgspec.json.encode(OURS))
DETACHING["environmentInfo"]["capabilities"]["processDetach"] = True
detaching = partial(in_environment, greeting=DETACHING)


async def _attached(scene: Scene, after: int = 0, **answer: Any) -> DetachedProcess:
    """An attachment that the server has accepted."""
    process = scene.env.attach("web", after=after)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(process.__aenter__())
        request = await scene.stream.next("process/attach")
        _accept(scene, request, **answer)
    return process


def _accept(scene: Scene, request: Message, **answer: Any) -> None:
    params = request["params"]
    scene.process_id = params["processId"]
    members = {
        "processId": params["processId"],
        "afterSeq": params["afterSeq"],
        "argv": ["node", "app.js"],
        "tty": False,
        "pipeStdin": False,
        "pid": 7,
    }
    scene.stream.answer(request, members | answer)


async def _left(scene: Scene, process: DetachedProcess) -> None:
    """Close a handle, and answer the request for that."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(process.aclose())
        request = await scene.stream.next("process/detach")
        assert request["params"] == {"processId": scene.process_id}
        scene.stream.answer(request, {})


@in_environment
async def test_other_servers_have_none(scene: Scene) -> None:
    with pytest.raises(Unsupported, match="processDetach"):
        scene.env.attach("web")
    with pytest.raises(Unsupported, match="processDetach"):
        scene.env.start(["x"], detach=True)
    with pytest.raises(Unsupported, match="processDetach"):
        await scene.env.detached_processes()


@detaching
async def test_a_start_with_a_name_and_limits(scene: Scene) -> None:
    process = await scene.started(detach=True, name="web", max_lifetime=1.5, idle_timeout=0.0001)
    assert process.name == "web"
    assert repr(process) == "<DetachedProcess 'web' ['p'], running>"
    scene.output(1)
    assert await anext(process) == Chunk("stdout", b"x")
    assert isinstance(process, DetachedProcess)
    await _left(scene, process)


@detaching
async def test_the_request_of_a_start(scene: Scene) -> None:
    process = scene.env.start(
        ["/opt/my server"], detach=True, max_lifetime=2, idle_timeout=math.inf
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(process.__aenter__())
        request = await scene.stream.next("process/start")
        scene.process_id = request["params"]["processId"]
        scene.accept(request)
    detach = request["params"]["detach"]
    assert detach == {"name": process.name, "maxLifetimeMs": 2000, "idleTimeoutMs": None}
    assert detach["name"].startswith("my-server-")
    assert isinstance(process, DetachedProcess)
    await _left(scene, process)


@detaching
async def test_limits_and_positions_are_checked(scene: Scene) -> None:
    with pytest.raises(InvalidParams, match="idle_timeout must be a positive number"):
        scene.env.start(["x"], detach=True, idle_timeout=0)
    with pytest.raises(TypeError, match="idle_timeout must be a number of seconds, not str"):
        scene.env.start(["x"], detach=True, idle_timeout=cast(Any, "5"))
    with pytest.raises(TypeError, match="need detach=True"):
        scene.env.start(["x"], name="web")
    with pytest.raises(InvalidParams, match="after must not be negative: -1"):
        scene.env.attach("web", after=-1)


@detaching
async def test_an_attachment_reads_to_the_end_and_leaves(scene: Scene) -> None:
    process = await _attached(scene, pipeStdin=True)
    assert (process.name, process.argv, process.pid) == ("web", ("node", "app.js"), 7)
    scene.output(1, b"one")
    scene.exited(2, 3)
    scene.say("closed", 3)
    assert [chunk.data async for chunk in process] == [b"one"]
    assert await process.wait() == 3
    with pytest.raises(StdinClosed):
        await process.write(b"late")
    await _left(scene, process)


@detaching
async def test_output_that_the_server_has_discarded_is_declared(scene: Scene) -> None:
    process = await _attached(scene)
    scene.output(5, b"five")
    params = await scene.answer_read((4, b"four"), (5, b"five"), firstSeq=4, lostBytes=30)
    assert params["afterSeq"] == 0
    await scene.answer_read(nextSeq=6)
    chunks = await process.read_some()
    assert chunks == [Chunk("stdout", b"four", 30), Chunk("stdout", b"five")]
    assert process.lost_bytes == 30
    await _left(scene, process)


@detaching
async def test_a_position_beyond_the_end_is_the_end(scene: Scene) -> None:
    process = await _attached(scene, after=100, afterSeq=7)
    await scene.answer_read((8, b"eight"))
    await scene.answer_read(nextSeq=9)
    assert await process.read_some() == [Chunk("stdout", b"eight")]
    await _left(scene, process)


@detaching
async def test_an_attachment_survives_a_lost_connection(scene: Scene) -> None:
    process = await _attached(scene)
    scene.output(1, b"one")
    await scene.reconnected()
    await scene.answer_read((2, b"two"))
    await scene.answer_read(nextSeq=3)
    assert b"".join(chunk.data for chunk in await process.read_some()) == b"onetwo"
    await _left(scene, process)


@detaching
async def test_a_repeated_request_is_the_same_attachment(scene: Scene) -> None:
    process = scene.env.attach("web")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(process.__aenter__())
        lost = await scene.stream.next("process/attach")
        await scene.reconnected()
        again = await scene.stream.next("process/attach")
        assert again["params"] == lost["params"]
        _accept(scene, again)
    await _left(scene, process)


@detaching
async def test_an_unknown_name(scene: Scene) -> None:
    process = scene.env.attach("web")
    async with asyncio.TaskGroup() as tasks:
        opening = tasks.create_task(_failure(process))
        request = await scene.stream.next("process/attach")
        scene.stream.refuse(request, -32600, "unknown detached process web")
    assert isinstance(opening.result(), InvalidRequest)


async def _failure(process: DetachedProcess) -> BaseException | None:
    try:
        await process
    except InvalidRequest as error:
        return error
    return None


@detaching
async def test_a_full_queue_stops_the_recovery(scene: Scene) -> None:
    """A process that prints faster than it is read would otherwise fill the memory."""
    process = await _attached(scene)
    scene.output(2)
    block = bytes(flow_control.OVERFLOW_BYTES)
    await scene.answer_read((1, block), nextSeq=2)
    await turns()
    assert scene.stream.is_quiet  # nothing more is read before there is space
    assert [len(chunk.data) for chunk in await process.read_some()] == [len(block), 1]
    assert (await scene.answer_read((3, b"xyz"), nextSeq=4))["afterSeq"] == 2
    await scene.answer_read(nextSeq=4)
    assert (await anext(process)).data == b"xyz"
    await _left(scene, process)


@detaching
async def test_closing_the_environment_leaves_it_running(scene: Scene) -> None:
    process = await _attached(scene)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(scene.env.aclose())
        request = await scene.stream.next("process/detach")
        scene.stream.answer(request, {})
    assert process.is_over


@detaching
async def test_a_forgotten_process_is_lost(scene: Scene) -> None:
    process = await _attached(scene)
    scene.say("closed", 9)
    request = await scene.stream.next("process/read")
    scene.stream.refuse(request, -32600, "unknown process id p")
    with pytest.raises(ProcessLost, match="output cannot be recovered"):
        await anext(process)
    await _left(scene, process)


@detaching
async def test_the_list(scene: Scene) -> None:
    listed = {
        "name": "web",
        "argv": ["node"],
        "tty": False,
        "running": True,
        "exitCode": None,
        "closed": False,
        "nextSeq": 4,
        "pid": 7,
        "startedAtMs": 1000,
        "attached": 2,
        "maxLifetimeMs": None,
        "idleTimeoutMs": 5,
        "endedBy": None,
    }
    async with asyncio.TaskGroup() as tasks:
        listing = tasks.create_task(scene.env.detached_processes())
        request = await scene.stream.next("process/listDetached")
        scene.stream.answer(request, {"processes": [listed]})
    [found] = listing.result()
    assert (found.name, found.attached, found.idle_timeout_ms) == ("web", 2, 5)


@detaching
async def test_the_retained_output_is_read_up_to_an_event(scene: Scene) -> None:
    process = await _attached(scene, after=9)
    answers: list[dict[str, Any]] = [
        {"chunks": [{"seq": 2, "stream": "stdout", "chunk": "YQ=="}], "lostBytes": 3},
        {"chunks": [{"seq": 4, "stream": "stderr", "chunk": "Yg=="}]},
        {"chunks": []},
    ]
    common = {"nextSeq": 6, "exited": False, "exitCode": None, "closed": False, "failure": None}
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(read_retained(scene.env.session, process, 5))
        for answer, after in zip(answers, (0, 2, 4), strict=True):
            request = await scene.stream.next("process/read")
            assert request["params"]["afterSeq"] == after
            scene.stream.answer(request, common | answer)
    assert reading.result() == ([Chunk("stdout", b"a"), Chunk("stderr", b"b")], 3, 4)
    await _left(scene, process)
