"""A process of the client, with a server that is the test: its queue and its end."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from tests.support.memory_session import Scene, in_environment, outcome, turns

from exec_server.client import process as process_module
from exec_server.client.engine import flow_control as flow_module
from exec_server.client.process import Process
from exec_server.errors import ProcessLost, Unsupported

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
        "detach": None,
        "reportPid": False,
        "mergeStderr": False,
        "user": None,
    }


# ---- the queue ------------------------------------------------------------------------


def fill(scene: Scene, first: int, weight: int) -> int:
    """Send output of this weight in chunks of 8192 bytes; returns the next number."""
    seq = first
    for _ in range(-(-weight // (8192 + flow_module.CHUNK_COST))):
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
    fill(scene, 2, flow_module.FULL_BYTES)
    assert not scene.stream.receiving
    while process._output.weight >= flow_module.DRAINED_BYTES:
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
        fill(scene, 2, flow_module.FULL_BYTES)
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
        fill(scene, 2, flow_module.FULL_BYTES)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flow_module, "STALL_SECONDS", 0.01)
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
        seq = fill(scene, 1, flow_module.OVERFLOW_BYTES)
        assert scene.stream.receiving
        assert process._remote is not None
        assert process._remote.is_skipping
        scene.output(seq, b"ignored")
        scene.exited(seq + 1, 5)
        assert await waiting == 5
        assert process._output.weight < flow_module.OVERFLOW_BYTES + 2 * 8192
    got = [await anext(process) for _ in range(seq - 1)]
    last = seq + 9
    assert (await scene.answer_read((last, b"kept"), firstSeq=last, lostBytes=77))[
        "afterSeq"
    ] == seq - 1
    await scene.answer_read(nextSeq=last + 2, exited=True, exitCode=5, closed=True)
    got += [chunk async for chunk in process]
    assert [chunk.lost_before for chunk in got] == [0] * (seq - 1) + [77]
    assert (got[-1].data, process.lost_bytes, process.exit_code) == (b"kept", 77, 5)


# ---- the end --------------------------------------------------------------------------


@in_environment
async def test_a_process_is_not_used_in_another_event_loop(scene: Scene) -> None:
    process = await scene.started()
    for use in (process.wait, process.read_some, process.kill):
        with pytest.raises(RuntimeError, match="belongs to another event loop"):
            await asyncio.to_thread(asyncio.run, use())


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
            with pytest.raises(ProcessLost, match="abandoned before its exit"):
                await use()

    test()


def test_a_kill_that_a_server_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "KILL_SECONDS", 0.01)
    text = "^p may still run: the server has not reported its exit within 0.01 s after the kill$"

    @in_environment
    async def test(scene: Scene) -> None:
        _set_signals(scene, has_signals=True)
        process = await scene.started()
        with pytest.raises(TimeoutError, match=text):
            await process.terminate(grace=0.01)
        with pytest.raises(TimeoutError, match=text):
            await process.kill(wait=True)
        assert (await scene.stream.next("process/signal"))["params"]["signal"] == "SIGTERM"
        scene.exited(1)
        await process.kill(wait=True)
        assert process.exit_code == 0

    test()


@in_environment
async def test_a_server_without_signals_cannot_interrupt_pipes(scene: Scene) -> None:
    session = scene.env.session
    session.features = msgspec.structs.replace(session.features, has_interrupt=False)
    process = await scene.started()
    with pytest.raises(Unsupported, match="process/signal: kill the process, or start it in a"):
        await process.interrupt()


def _set_signals(scene: Scene, *, has_signals: bool) -> None:
    features = scene.env.session.features
    capabilities = msgspec.structs.replace(features.capabilities, process_signals=has_signals)
    scene.env.session.features = msgspec.structs.replace(features, capabilities=capabilities)


# Capabilities, full input, and what is sent to a terminal.
INTERRUPTS = [
    (True, False, ("process/write", "Aw==")),
    (False, False, ("process/write", "Aw==")),
    (True, True, ("process/signal", "SIGINT")),
    (False, True, ("process/signal", "interrupt")),
]


@pytest.mark.parametrize(("has_signals", "is_full", "sent"), INTERRUPTS)
def test_a_terminal_is_interrupted_by_its_key_unless_its_input_is_stuck(
    has_signals: bool, is_full: bool, sent: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @in_environment
    async def test(scene: Scene) -> None:
        _set_signals(scene, has_signals=has_signals)
        process = await scene.started(tty=True)
        if is_full:
            monkeypatch.setattr(process_module, "UNACKNOWLEDGED_PIECES", 0)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(process.interrupt())
            method, argument = sent
            request = await scene.stream.next(method)
            if method == "process/signal":
                scene.stream.answer(request, {})
        assert argument in request["params"].values()

    test()
