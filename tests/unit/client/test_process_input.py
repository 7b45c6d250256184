"""Writes to a process, with a server that is the test."""

from __future__ import annotations

import asyncio
import base64
import json

import msgspec
import pytest
from tests.support.memory_session import GREETING, Scene, in_environment, turns

from exec_server.client import process as input_module
from exec_server.errors import ConnectionLost, StdinClosed, Unsupported
from exec_server.protocol.jsonrpc import split


@in_environment
async def test_writes_are_numbered_and_repeated(scene: Scene) -> None:
    process = await scene.started(stdin=True)
    await process.write(b"one")
    await process.write(b"two")
    for _ in range(2):
        for number, word in ((1, b"one"), (2, b"two")):
            request = await scene.stream.next("process/write")
            assert request["params"] == {
                "processId": scene.process_id,
                "chunk": base64.b64encode(word).decode(),
                "writeId": str(number),
            }
        await scene.reconnected()
    assert (await scene.stream.next("process/write"))["params"]["writeId"] == "1"


@in_environment
async def test_writes_are_not_repeated_where_that_could_double_them(scene: Scene) -> None:
    session = scene.env.session
    session.features = msgspec.structs.replace(session.features, repeats_writes_safely=False)
    process = await scene.started(stdin=True)
    await process.write(b"one")
    await scene.stream.next("process/write")
    scene.stream.lose()
    await turns()
    with pytest.raises(ConnectionLost, match="no answer"):
        await process.write(b"two")


@in_environment
async def test_a_writer_waits_for_a_process_that_does_not_read(scene: Scene) -> None:
    process = await scene.started(stdin=True)
    async with asyncio.TaskGroup() as tasks:
        writing = tasks.create_task(process.write(bytes(2 * input_module.UNACKNOWLEDGED_BYTES)))
        pieces = input_module.UNACKNOWLEDGED_BYTES // input_module.PIECE_BYTES
        scene.dialer.calls_in_flight = 10**6
        requests = [await scene.stream.next("process/write") for _ in range(3)]
        await turns()
        assert not writing.done()
        # Three calls are under way, and the others wait for their turn.
        assert process._input is not None
        assert process._input._unacknowledged == pieces * input_module.PIECE_BYTES
        while not writing.done():
            scene.stream.answer(requests.pop(0), {"status": "accepted"})
            await turns()
            while not scene.stream.is_quiet:
                requests.append(await scene.stream.next("process/write"))


@in_environment
async def test_small_writes_have_a_limit_too(scene: Scene) -> None:
    process = await scene.started(stdin=True)
    for _ in range(input_module.UNACKNOWLEDGED_PIECES):
        await process.write(b"x")
    async with asyncio.TaskGroup() as tasks:
        writing = tasks.create_task(process.write(b"y"))
        await turns()
        assert not writing.done()
        request = await scene.stream.next("process/write")
        scene.stream.answer(request, {"status": "accepted"})
        await writing


@pytest.mark.parametrize(
    ("answer", "text"),
    [("unknownProcess", "it has ended"), ("stdinClosed", "without stdin, or its stdin was closed")],
)
def test_a_refused_write_is_told_to_the_next(answer: str, text: str) -> None:
    async def refused(scene: Scene) -> None:
        process = await scene.started(stdin=True)
        await process.write(b"x")
        scene.stream.answer(await scene.stream.next("process/write"), {"status": answer})
        await turns()
        with pytest.raises(StdinClosed, match=text):
            await process.write(b"y")

    in_environment(refused)()


@in_environment
async def test_the_end_of_input_follows_what_was_written(scene: Scene) -> None:
    process = await scene.started(stdin=True)
    await process.write(b"x")
    await process.close_stdin()
    request = await scene.stream.next("process/write")
    await turns()
    assert scene.stream.is_quiet
    scene.stream.answer(request, {"status": "accepted"})
    closing = await scene.stream.next("process/closeStdin")
    assert closing["params"] == {"processId": scene.process_id}
    scene.stream.answer(closing, {})
    with pytest.raises(StdinClosed):
        await process.write(b"y")


@in_environment
async def test_closing_a_terminal_sends_ctrl_d(scene: Scene) -> None:
    """Twice inside of a line: the first one only delivers the line."""
    process = await scene.started(tty=True)
    for data, end in ((b"line\n", b"\x04"), (b"part", b"\x04\x04"), (b"line\r", b"\x04")):
        await process.write(data)
        await process.close_stdin()
        for expected in (data, end):
            request = await scene.stream.next("process/write")
            assert base64.b64decode(request["params"]["chunk"]) == expected
            scene.stream.answer(request, {"status": "accepted"})


def test_a_pipe_is_closed_only_where_the_server_can() -> None:
    async def close(scene: Scene) -> None:
        process = await scene.started(stdin=True)
        with pytest.raises(Unsupported, match="processCloseStdin: stdin cannot be closed"):
            await process.close_stdin()
        await process.write(b"still open")

    in_environment(close, GREETING)()


def test_an_error_of_a_write_is_raised_by_the_next() -> None:
    @in_environment
    async def test(scene: Scene) -> None:
        process = await scene.started(stdin=True)
        await process.write(b"x")
        scene.stream.refuse(await scene.stream.next("process/write"), -32603, "broken pipe")
        await turns()
        with pytest.raises(StdinClosed, match="the process takes no input: broken pipe"):
            await process.write(b"y")
        with pytest.raises(StdinClosed):
            await process.close_stdin()

    test()


@in_environment
async def test_a_process_without_stdin_refuses_writes(scene: Scene) -> None:
    process = await scene.started()
    with pytest.raises(StdinClosed, match=r"use start\(..., stdin=True\)"):
        await process.write(b"x")


@in_environment
async def test_input_travels_as_bytes_where_the_server_takes_them(scene: Scene) -> None:
    session = scene.env.session
    capabilities = msgspec.structs.replace(session.features.capabilities, process_binary=True)
    session.features = msgspec.structs.replace(session.features, capabilities=capabilities)
    sent: list[tuple[bytes, bytes]] = []

    def send_binary(head: bytes, data: bytes) -> None:
        sent.append((head, data))

    scene.stream.send_binary = send_binary  # type: ignore[attr-defined]  # a BinaryStream now
    process = await scene.started(stdin=True)
    data = b"\x00\xff" * 3
    await process.write(data)
    await process.write(b"".join((b"a", b"b")))
    await process.write(b"")
    await turns()
    requests = [json.loads(split(head)[0]) for head, _ in sent]
    assert [request["params"] for request in requests] == [
        {"processId": scene.process_id, "writeId": number} for number in ("1", "2")
    ]
    assert [piece for _, piece in sent] == [data, b"ab"]
    assert sent[0][1] is data
    for request in requests:
        scene.stream.answer(request, {"status": "accepted"})
    await turns()
    assert process._input is not None
    assert process._input._unacknowledged == 0
