"""A process of the client, with a server that is the test: queues, waits, writes, recovery."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from exec_server.client import input as input_module
from exec_server.client import process as process_module
from exec_server.client import processes as processes_module
from exec_server.client import traffic as traffic_module
from exec_server.client.environment import Environment
from exec_server.client.process import Process
from exec_server.errors import ConnectionLost, ProcessLost, StdinClosed
from unit.client.memory import (
    GREETING,
    SESSION,
    MemoryDialer,
    MemoryStream,
    Message,
    outcome,
    play,
)

OURS = {
    "sessionId": SESSION,
    "environmentInfo": {
        "shell": {"name": "sh", "path": "/bin/sh"},
        "cwd": "file:///home",
        "capabilities": {
            "processCloseStdin": True,
            "processReadLoss": True,
            "processSignals": True,
        },
    },
}


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
    """A test that begins with an environment; what runs at its end is killed with it."""

    def test() -> None:
        async def run() -> None:
            dialer = MemoryDialer()
            dialer.greet = lambda stream, request: stream.answer(request, greeting)
            async with Environment(dialer) as env:
                stream = await dialer.stream()
                await stream.past_handshake()
                played = Scene(env, dialer, stream)
                await scene(played)
                # The end, which nobody answers.
                env._processes._feeds.clear()
            assert dialer.closed

        play(run())

    test.__doc__ = scene.__doc__
    return test


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# ---- what is on the wire --------------------------------------------------------------


@in_environment
async def test_the_request(scene: Scene) -> None:
    process = scene.env.start(["a", "b"], cwd="sub", env={"C": "d"}, tty=True, size=(3, 4))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(process.__aenter__())
        request = await scene.stream.next("process/start")
        scene.accept(request)
    assert request["params"] == {
        "processId": process.id,
        "metadata": None,
        # This server cannot set a size.
        "argv": ["/bin/sh", "-c", request["params"]["argv"][2], "sh", "3", "4", "a", "b"],
        "cwd": "file:///home/sub",
        "envPolicy": {
            "inherit": "all",
            "ignoreDefaultExcludes": True,
            "exclude": [],
            "set": {},
            "includeOnly": [],
        },
        "shellSnapshot": None,
        "env": {"TERM": "xterm-256color", "C": "d"},
        "tty": True,
        "pipeStdin": False,
        "arg0": None,
        "sandbox": None,
        "enforceManagedNetwork": False,
        "managedNetwork": None,
        "networkProxy": None,
        "ttySize": None,
    }


# ---- the queue ------------------------------------------------------------------------


def fill(scene: Scene, first: int, weight: int) -> int:
    """Send output of this weight in chunks of 8192 bytes; returns the next number."""
    seq = first
    for _ in range(-(-weight // (8192 + process_module.CHUNK_COST))):
        scene.output(seq, bytes(8192))
        seq += 1
    return seq


async def _take(process: Process) -> None:
    await anext(process)


@in_environment
async def test_a_full_queue_holds_the_reading(scene: Scene) -> None:
    process = await scene.started()
    scene.output(1)
    await anext(process)
    fill(scene, 2, process_module.FULL_BYTES)
    assert not scene.stream.receiving
    while process._weight >= process_module.FREE_BYTES:
        assert not scene.stream.receiving
        await anext(process)
    assert scene.stream.receiving


@in_environment
async def test_a_reader_that_waits_is_not_held_up(scene: Scene) -> None:
    """Its own call, and those of tasks that it begins; not those of others."""
    process = await scene.started()
    go = asyncio.Event()

    async def somebody_else() -> bool:
        await go.wait()
        return await scene.env.files.exists("/")

    async with asyncio.TaskGroup() as tasks:
        other = tasks.create_task(somebody_else())
        await turns()
        scene.output(1)
        await anext(process)
        fill(scene, 2, process_module.FULL_BYTES)
        assert not scene.stream.receiving
        go.set()
        request = await scene.stream.next("fs/getMetadata")
        assert not scene.stream.receiving
        own = tasks.create_task(scene.env.files.exists("/"))
        own_request = await scene.stream.next("fs/getMetadata")
        assert scene.stream.receiving
        for each in (request, own_request):
            scene.stream.refuse(each, -32004, "none")
    assert (other.result(), own.result()) == (False, False)
    assert not scene.stream.receiving


@in_environment
async def test_a_reader_that_stands_still_holds_up_others_for_a_while(scene: Scene) -> None:
    process = await scene.started()
    async with asyncio.TaskGroup() as tasks:
        scene.output(1)
        # A task of its own takes the output, and no more.
        await tasks.create_task(_take(process))
        fill(scene, 2, process_module.FULL_BYTES)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(traffic_module, "STILL_SECONDS", 0.01)
            call = tasks.create_task(scene.env.files.exists("/"))
            request = await scene.stream.next("fs/getMetadata")
            assert not scene.stream.receiving
            while not scene.stream.receiving:
                await asyncio.sleep(0.001)
        scene.stream.refuse(request, -32004, "none")
        assert not await call


@in_environment
async def test_nobody_reads_and_nobody_is_held_up(scene: Scene) -> None:
    """Up to a limit; then it is asked for later what is still there, and the rest is lost."""
    process = await scene.started()
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(process.wait())
        await turns()
        seq = fill(scene, 1, process_module.BURSTING_BYTES)
        assert scene.stream.receiving
        assert process._feed is not None
        assert process._feed.is_skipping
        scene.output(seq, b"ignored")
        scene.exited(seq + 1, 5)
        assert await waiting == 5
        assert process._weight < process_module.BURSTING_BYTES + 2 * 8192
    got = [await anext(process) for _ in range(seq - 1)]
    last = seq + 9
    assert (await scene.answer_read((last, b"kept"), firstSeq=last, lostBytes=77))[
        "afterSeq"
    ] == seq - 1
    await scene.answer_read(nextSeq=last + 2, exited=True, exitCode=5, closed=True)
    got += [chunk async for chunk in process]
    assert [chunk.lost_before for chunk in got] == [0] * (seq - 1) + [77]
    assert (got[-1].data, process.lost_bytes, process.exit_code) == (b"kept", 77, 5)


# ---- connections that are lost --------------------------------------------------------


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
        "maxBytes": processes_module.PAGE_BYTES,
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
    assert sizes[-1] == processes_module.SMALL_PAGE_BYTES


@in_environment
async def test_a_connection_that_bears_nothing(scene: Scene) -> None:
    process = await scene.started()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes_module, "MAX_LOSSES", 3)
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
        patch.setattr(processes_module, "DROPPED_SECONDS", 0.0)
        in_environment(dropped, GREETING)()


# ---- writing --------------------------------------------------------------------------


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
async def test_a_writer_waits_for_a_process_that_does_not_read(scene: Scene) -> None:
    process = await scene.started(stdin=True)
    async with asyncio.TaskGroup() as tasks:
        writing = tasks.create_task(process.write(bytes(2 * input_module.AHEAD_BYTES)))
        pieces = input_module.AHEAD_BYTES // input_module.PIECE_BYTES
        scene.dialer.calls_in_flight = 10**6
        requests = [await scene.stream.next("process/write") for _ in range(3)]
        await turns()
        assert not writing.done()
        # Three calls are under way, and the others wait for their turn.
        assert process._input is not None
        assert process._input._ahead == pieces * input_module.PIECE_BYTES
        while not writing.done():
            scene.stream.answer(requests.pop(0), {"status": "accepted"})
            await turns()
            while not scene.stream.is_quiet:
                requests.append(await scene.stream.next("process/write"))


@in_environment
async def test_small_writes_have_a_limit_too(scene: Scene) -> None:
    process = await scene.started(stdin=True)
    for _ in range(input_module.AHEAD_PIECES):
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
    [("unknownProcess", "it has ended"), ("stdinClosed", "without, or its input was closed")],
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


# ---- the end --------------------------------------------------------------------------


@in_environment
async def test_leaving_kills_whoever_is_cancelled(scene: Scene) -> None:
    """Also when the one that leaves is cancelled while it waits for that."""

    async def live() -> None:
        async with scene.env.start(["p"]):
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as tasks:
        living = tasks.create_task(live())
        scene.accept(await scene.stream.next("process/start"))
        await turns()
        for _ in range(2):
            living.cancel()
            await turns()
        assert living.cancelled()
    kill = await scene.stream.next("process/terminate")
    scene.stream.answer(kill, {"running": True})


@in_environment
async def test_a_cancelled_start_is_killed(scene: Scene) -> None:
    async with asyncio.TaskGroup() as tasks:
        starting = tasks.create_task(scene.env.start(["p"]).__aenter__())
        request = await scene.stream.next("process/start")
        starting.cancel()
        kill = await scene.stream.next("process/terminate")
        assert kill["params"]["processId"] == request["params"]["processId"]
        scene.stream.answer(kill, {"running": True})


def test_an_end_that_was_not_seen_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server does not say whether it was killed: who waits must not do so for ever."""
    monkeypatch.setattr(process_module, "KILL_SECONDS", 0.01)

    @in_environment
    async def test(scene: Scene) -> None:
        process = await scene.started(stdin=True)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(outcome(process.wait()))
            await turns()
            await process.__aexit__(None, None, None)
        scene.stream.answer(await scene.stream.next("process/terminate"), {"running": True})
        assert isinstance(await waiting, ProcessLost)
        for use in (process.wait, process.read_some, lambda: process.write(b"x")):
            with pytest.raises(ProcessLost, match="given up"):
                await use()

    test()
