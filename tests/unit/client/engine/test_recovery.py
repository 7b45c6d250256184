"""Processes of a client whose connections are lost: starts, reads and ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.support.memory_session import (
    GREETING,
    MemoryDialer,
    MemoryStream,
    Scene,
    in_environment,
    outcome,
    play,
)

from exec_server.client.engine import recovery as module
from exec_server.client.environment import Environment
from exec_server.errors import ConnectionLost, MalformedAnswer, ProcessLost, SessionLost
from exec_server.net.stream import ReceiverFactory
from exec_server.protocol.process import ProcessId


@in_environment
async def test_what_was_missed_is_read(scene: Scene) -> None:
    process = await scene.started()
    scene.output(1, b"a")
    await scene.reconnected()
    scene.output(4, b"d")  # comes before the answer
    params = await scene.answer_read((2, b"b"), (3, b"c"))
    assert params == {
        "processId": scene.process_id,
        "afterSeq": 1,
        "maxBytes": module.READ_BYTES,
        "waitMs": 0,
    }
    await scene.answer_read(nextSeq=7, exited=True, exitCode=2, closed=True)
    assert b"".join([chunk.data async for chunk in process]) == b"abcd"
    assert await process.wait() == 2
    assert process.lost_bytes == 0


@in_environment
async def test_pages_become_smaller_until_they_come(scene: Scene) -> None:
    process = await scene.started()
    sizes = []
    await scene.reconnected()
    for _ in range(8):
        sizes.append((await scene.stream.next("process/read"))["params"]["maxBytes"])
        await scene.reconnected()
    await scene.answer_read((1, b"x"))
    await scene.answer_read(nextSeq=2)
    assert await anext(process)
    assert sizes[:3] == [262_144, 131_072, 65_536]
    assert sizes[-1] == module.MIN_READ_BYTES


@in_environment
async def test_a_connection_that_bears_nothing(scene: Scene) -> None:
    process = await scene.started()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_LOSSES", 3)
        for _ in range(4):
            await scene.reconnected()
            await scene.stream.next("process/read")
        await scene.reconnected()
    with pytest.raises(ConnectionLost):
        await anext(process)


@in_environment
async def test_a_process_that_the_server_has_forgotten(scene: Scene) -> None:
    process = await scene.started(stdin=True)
    await scene.reconnected()
    request = await scene.stream.next("process/read")
    scene.stream.refuse(request, -32600, "unknown process id p")
    with pytest.raises(ProcessLost, match="unknown process id p"):
        await anext(process)
    with pytest.raises(ProcessLost):
        await process.wait()
    with pytest.raises(ProcessLost):
        await process.write(b"x")


@in_environment
async def test_a_session_that_is_lost_right_after_the_answer_to_a_start(scene: Scene) -> None:
    process = scene.env.start(["p"])
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(process.__aenter__())
        # Both are received before the task of the start runs.
        scene.accept(await scene.stream.next("process/start"))
        scene.stream.say({"method": "process/output", "params": {"seq": "one"}})
    with pytest.raises(SessionLost, match="malformed message"):
        await anext(process)


@in_environment
async def test_a_start_whose_answer_was_lost_is_sent_again(scene: Scene) -> None:
    process = scene.env.start(["p"])
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(process.__aenter__())
        first = await scene.stream.next("process/start")
        scene.process_id = first["params"]["processId"]
        await scene.reconnected()
        again = await scene.stream.next("process/start")
        assert again["params"] == first["params"]
        scene.stream.refuse(again, -32600, f"process {scene.process_id} already exists")
        starting = await scene.stream.next("process/read")
        text = f"process id {scene.process_id} is starting"
        scene.stream.refuse(starting, -32600, text)
        await scene.answer_read((1, b"early"))
        await scene.answer_read(nextSeq=2)
    assert (await anext(process)).data == b"early"


def test_a_start_is_not_repeated_once_the_server_may_have_forgotten_it() -> None:
    async def forgotten(scene: Scene) -> None:
        process = scene.env.start(["p"])
        back = asyncio.Event()
        opened = scene.dialer.open

        async def open_later(make_receiver: ReceiverFactory) -> MemoryStream:
            await back.wait()
            return await opened(make_receiver)

        scene.dialer.open = open_later  # type: ignore[method-assign]
        async with asyncio.TaskGroup() as tasks:
            starting = tasks.create_task(outcome(process.__aenter__()))
            await scene.stream.next("process/start")
            scene.stream.lose()
        error = starting.result()
        assert (type(error), str(error)) == (ConnectionLost, "no answer to the start of p")
        back.set()
        scene.stream = await scene.dialer.stream()
        await scene.stream.past_handshake()
        await scene.stream.next("process/terminate")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "OLDER_RESEND_SECONDS", 0.01)
        in_environment(forgotten)()


@pytest.mark.parametrize(
    ("version", "is_long"),
    [
        ("0.169.0", True),
        ("0.169.0+exec-server.0.3.0", True),
        ("0.200.0-alpha.1", True),
        ("1.0.0", True),
        ("0.166.0+exec-server.0.2.0", False),
        ("", False),
        ("newest", False),
    ],
)
def test_the_version_tells_how_long_a_process_is_remembered(version: str, is_long: bool) -> None:
    assert module._remembers_long(version) == is_long


@in_environment
async def test_a_start_that_failed_without_a_word(scene: Scene) -> None:
    process = scene.env.start(["p"])

    async def start() -> None:
        with pytest.raises(Exception, match="cannot start p: No such file"):
            await process.__aenter__()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(start())
        await scene.stream.next("process/start")
        await scene.reconnected()
        again = await scene.stream.next("process/start")
        scene.stream.refuse(again, -32600, "process x already exists")
        read = await scene.stream.next("process/read")
        scene.stream.refuse(read, -32600, "unknown process id x")
        once_more = await scene.stream.next("process/start")
        scene.stream.refuse(once_more, -32603, "No such file or directory (os error 2)")
        look = await scene.stream.next("fs/getMetadata")
        scene.stream.refuse(look, -32004, "No such file or directory (os error 2)")


def test_a_start_that_the_server_has_dropped() -> None:
    """The reference says for ever that it is starting; killing it makes the id free."""

    async def dropped(scene: Scene) -> None:
        process = scene.env.start(["p"])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(process.__aenter__())
            await scene.stream.next("process/start")
            await scene.reconnected()
            again = await scene.stream.next("process/start")
            scene.stream.refuse(again, -32600, "process x already exists")
            read = await scene.stream.next("process/read")
            scene.stream.refuse(read, -32600, "process id x is starting")
            kill = await scene.stream.next("process/terminate")
            scene.stream.answer(kill, {"running": True})
            scene.accept(await scene.stream.next("process/start"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "DROPPED_SECONDS", 0.0)
        in_environment(dropped, GREETING)()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"chunks": [0]}, "returned event 0 after event 0"),
        ({"chunks": [2, 2]}, "returned event 2 after event 2"),
        ({"chunks": [3, 1]}, "returned event 1 after event 3"),
        ({"chunks": [-5]}, "returned event -5 after event 0"),
        ({"nextSeq": -1}, "negative number"),
        ({"lostBytes": -1}, "negative number"),
        ({"nextSeq": 2**64}, "a number above"),
    ],
)
def test_numbers_that_cannot_be_right_end_a_process(wrong: dict[str, Any], text: str) -> None:
    """Reading on would never come to an end."""

    @in_environment
    async def scene(scene: Scene) -> None:
        process = await scene.started()
        await scene.reconnected()
        members = dict(wrong)
        chunks = [(seq, b"x") for seq in members.pop("chunks", [])]
        await scene.answer_read(*chunks, **members)
        with pytest.raises(MalformedAnswer, match=text):
            await process.wait()

    scene()


@in_environment
async def test_an_announced_event_that_cannot_be_read_ends_a_process(scene: Scene) -> None:
    process = await scene.started()
    for seq in range(2, 400):
        scene.output(seq)  # the first one is missing, and later ones are dropped
    for _ in range(module.MAX_EMPTY_READS + 1):
        await scene.answer_read()
    with pytest.raises(MalformedAnswer, match="does not return an event that was announced"):
        await process.wait()


# ---- sessions that are lost -----------------------------------------------------------


def restart(scene: Scene) -> None:
    """From now on the server knows no session of old; a new one is on another machine."""
    other = {"cwd": "file:///other", "shell": {"name": "sh", "path": "/bin/sh"}}
    greeting = GREETING | {"sessionId": "other", "environmentInfo": other}

    def greet(stream: MemoryStream, request: Any) -> None:
        if request["params"]["resumeSessionId"] is not None:
            stream.refuse(request, -32600, "unknown session id")
        else:
            stream.answer(request, greeting)

    scene.dialer.greet = greet


@in_environment
async def test_a_lost_process_stays_lost_and_the_next_one_starts(scene: Scene) -> None:
    process = await scene.started()
    scene.output(1)
    restart(scene)
    scene.stream.lose()
    await (await scene.dialer.stream()).next("initialize")
    assert (await anext(process)).data == b"x"
    for use in (process.wait, process.read_some):
        with pytest.raises(SessionLost, match="unknown session id"):
            await use()
    await process.aclose()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(scene.env.reconnect())
        scene.stream = await scene.dialer.stream()
        await scene.stream.past_handshake()
    await scene.started(cwd="sub")
    assert scene.env.info.cwd == "file:///other"
    assert scene.env._processes._processes[ProcessId(scene.process_id)].is_started


def test_a_start_that_may_have_been_made_is_not_repeated_in_a_new_session() -> None:
    async def run() -> None:
        dialer = MemoryDialer()
        async with Environment(dialer, reconnect=True) as env:
            stream = await dialer.stream()
            await stream.past_handshake()
            scene = Scene(env, dialer, stream)
            async with asyncio.TaskGroup() as tasks:
                sent = tasks.create_task(outcome(env.run(["sent"])))
                await stream.next("process/start")
                restart(scene)
                stream.lose()
                unsent = tasks.create_task(env.start(["unsent"]).__aenter__())
                await (await dialer.stream()).next("initialize")
                new = await dialer.stream()
                await new.past_handshake()
                request = await new.next("process/start")
                assert request["params"]["argv"] == ["unsent"]
                assert request["params"]["cwd"] == "file:///"
                scene.stream = new
                scene.accept(request)
                await unsent
            assert isinstance(sent.result(), SessionLost)
            env._processes._processes.clear()

    play(run())


def test_a_command_that_ended_with_its_session_is_not_killed_in_a_new_one() -> None:
    async def run() -> None:
        dialer = MemoryDialer()
        async with Environment(dialer, reconnect=True) as env:
            stream = await dialer.stream()
            await stream.past_handshake()
            scene = Scene(env, dialer, stream)
            running = asyncio.get_running_loop().create_task(outcome(env.run(["a"])))
            scene.accept(await stream.next("process/start"))
            restart(scene)
            stream.lose()
            await (await dialer.stream()).next("initialize")
            assert isinstance(await running, SessionLost)
            assert env.session._recovery is None or env.session._recovery.done()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await dialer.stream()

    play(run())
