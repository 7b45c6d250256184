"""Runs of commands that leave children in the background, with a server that is the test."""

from __future__ import annotations

import asyncio
import base64
import pickle
from typing import Any
from unittest import mock

import pytest
from tests.support.memory_session import Scene, in_environment, outcome, turns

from exec_server.client import commands as run_module
from exec_server.client.exceptions import Timeout
from exec_server.client.results import Chunk, Result
from exec_server.errors import ConnectFailed, InvalidRequest, ProcessLost


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "QUIET_SECONDS", 0.02)
    monkeypatch.setattr(run_module, "REST_SECONDS", 0.1)


async def begun(scene: Scene, tasks: asyncio.TaskGroup, **options: Any) -> asyncio.Task[Any]:
    """A run whose start the server has answered."""
    run = tasks.create_task(outcome(scene.env.run(["a"], **options)))
    request = await scene.stream.next("process/start")
    scene.process_id = request["params"]["processId"]
    scene.accept(request)
    return run


@in_environment
async def test_a_run_returns_when_the_command_has_exited(scene: Scene) -> None:
    """Its children keep the output open; their process is forgotten when they close it."""
    async with asyncio.TaskGroup() as tasks:
        run = await begun(scene, tasks, timeout=100)
        scene.output(1, b"own")
        scene.exited(2, 3)
    result = run.result()
    assert result == Result(("a",), b"own", b"", 3, result.duration)
    assert scene.stream.is_quiet
    assert len(scene.env._processes._processes) == 1
    scene.output(3, b"of a child")
    scene.say("closed", 4)
    assert not scene.env._processes._processes


@in_environment
async def test_a_terminal_without_input_gets_its_end(scene: Scene) -> None:
    for given in (None, b""):
        async with asyncio.TaskGroup() as tasks:
            run = await begun(scene, tasks, tty=True, input=given)
            request = await scene.stream.next("process/write")
            assert request["params"]["chunk"] == base64.b64encode(b"\x04").decode()
            scene.stream.answer(request, {"status": "accepted"})
            scene.exited(1)
            scene.say("closed", 2)
        assert run.result().exit_code == 0


@in_environment
async def test_output_that_keeps_arriving_is_the_commands_own(scene: Scene) -> None:
    """Up to a limit: it may be that of a child that prints for ever."""

    async def print_for_ever() -> None:
        seq = 2
        while True:
            scene.output(seq, b"x")
            seq += 1
            await asyncio.sleep(0.001)

    async with asyncio.TaskGroup() as tasks:
        run = await begun(scene, tasks)
        scene.exited(1)
        printing = tasks.create_task(print_for_ever())
        result = await run
        printing.cancel()
    assert result.duration >= 0.1
    assert len(result.stdout) > 2


@in_environment
async def test_what_goes_on_may_be_killed(scene: Scene) -> None:
    async with asyncio.TaskGroup() as tasks:
        run = await begun(scene, tasks, leave_running=False)
        scene.exited(1)
        request = await scene.stream.next("process/terminate")
        scene.stream.answer(request, {"running": False})
        await turns()
        assert not run.done()
        scene.say("closed", 2)
    assert run.result().exit_code == 0
    assert not scene.env._processes._processes


@in_environment
async def test_children_without_output_may_be_killed(scene: Scene) -> None:
    async with asyncio.TaskGroup() as tasks:
        run = await begun(scene, tasks, leave_running=False)
        scene.exited(1)
        scene.say("closed", 2)
        request = await scene.stream.next("process/terminate")
        assert not run.done()
        scene.stream.answer(request, {"running": False})
    assert run.result().exit_code == 0


@in_environment
async def test_a_lost_connection_does_not_cost_the_rest(scene: Scene) -> None:
    async with asyncio.TaskGroup() as tasks:
        run = await begun(scene, tasks)
        scene.exited(1)
        await scene.reconnected()
        await asyncio.sleep(0.05)  # longer than the quiet time
        assert not run.done()
        await scene.answer_read((2, b"rest"), exited=True, exitCode=0)
        await scene.answer_read(nextSeq=4, exited=True, exitCode=0, closed=True)
    assert run.result().stdout == b"rest"


@in_environment
async def test_a_rest_that_cannot_be_had_is_an_error(scene: Scene) -> None:
    async with asyncio.TaskGroup() as tasks:
        run = await begun(scene, tasks)
        scene.exited(1)
        await scene.reconnected()
        request = await scene.stream.next("process/read")
        scene.stream.refuse(request, InvalidRequest.code, "unknown process id")
        kill = await scene.stream.next("process/terminate")
        scene.stream.answer(kill, {"running": False})
    assert isinstance(run.result(), ProcessLost)


@in_environment
async def test_a_child_that_is_lost_is_forgotten(scene: Scene) -> None:
    async with asyncio.TaskGroup() as tasks:
        run = await begun(scene, tasks)
        scene.exited(1)
        assert await run
    await scene.reconnected()
    request = await scene.stream.next("process/read")
    scene.stream.refuse(request, InvalidRequest.code, "unknown process id")
    await turns()
    assert not scene.env._processes._processes


# ---- output that is also delivered ----------------------------------------------------


@in_environment
async def test_output_is_delivered_and_collected(scene: Scene) -> None:
    seen: list[Chunk] = []
    async with asyncio.TaskGroup() as tasks:
        run = await begun(scene, tasks, on_output=seen.append)
        scene.output(1, b"one")
        await turns()
        assert seen == [Chunk("stdout", b"one")]
        scene.output(2, b"two")
        scene.exited(3)
        scene.say("closed", 4)
    assert seen == [Chunk("stdout", b"one"), Chunk("stdout", b"two")]
    assert run.result().stdout == b"onetwo"


@in_environment
async def test_a_slow_receiver_gets_everything(scene: Scene) -> None:
    """Also what it has not taken when the command has exited; not what children print later."""
    seen: list[bytes] = []
    go = asyncio.Event()

    async def take(chunk: Chunk) -> None:
        await go.wait()
        seen.append(chunk.data)

    async with asyncio.TaskGroup() as tasks:
        run = await begun(scene, tasks, on_output=take)
        scene.output(1, b"one")
        await turns()
        scene.output(2, b"two")
        scene.exited(3)
        await asyncio.sleep(0.15)  # longer than the time for the rest
        assert not run.done()
        go.set()
    assert seen == [b"one", b"two"]
    assert run.result().stdout == b"onetwo"
    scene.output(4, b"late")
    scene.say("closed", 5)


@in_environment
async def test_a_receiver_that_fails_ends_the_command(scene: Scene) -> None:
    def fail(chunk: Chunk) -> None:
        raise KeyError("mine")

    async with asyncio.TaskGroup() as tasks:
        run = await begun(scene, tasks, on_output=fail)
        scene.output(1, b"one")
        request = await scene.stream.next("process/terminate")
        scene.stream.answer(request, {"running": True})
    assert isinstance(run.result(), KeyError)


@in_environment
async def test_a_timeout_has_what_was_delivered(scene: Scene) -> None:
    seen: list[Chunk] = []
    async with asyncio.TaskGroup() as tasks:
        run = await begun(scene, tasks, on_output=seen.append, timeout=0.01)
        scene.output(1, b"one")
        request = await scene.stream.next("process/terminate")
        scene.stream.answer(request, {"running": True})
        scene.exited(2, 137)
        scene.say("closed", 3)
    assert isinstance(run.result(), Timeout)
    assert run.result().is_killed
    assert (run.result().result.stdout, len(seen)) == (b"one", 1)


@pytest.mark.measured
@in_environment
async def test_a_server_that_does_not_answer_delays_a_timeout_once(scene: Scene) -> None:
    loop = asyncio.get_running_loop()
    with mock.patch.object(run_module, "KILL_SECONDS", 0.2):
        began = loop.time()
        async with asyncio.TaskGroup() as tasks:
            run = await begun(scene, tasks, timeout=0.01)
            request = await scene.stream.next("process/terminate")
        assert loop.time() - began < 0.4
    late = run.result()
    assert isinstance(late, Timeout)
    assert not late.is_killed
    assert str(late).endswith("it may still run, because the server did not report its end")
    assert str(pickle.loads(pickle.dumps(late))) == str(late)
    scene.stream.answer(request, {"running": True})  # or the end of the session waits for it


@in_environment
async def test_a_cancelled_run_stops_its_delivery(scene: Scene) -> None:
    async def wait(chunk: Chunk) -> None:
        await asyncio.Event().wait()

    async with asyncio.TaskGroup() as tasks:
        run = await begun(scene, tasks, on_output=wait)
        scene.output(1, b"one")
        await turns()
        run.cancel()
        request = await scene.stream.next("process/terminate")
        scene.stream.answer(request, {"running": True})
        scene.exited(2, 137)
        scene.say("closed", 3)
    assert run.cancelled()


@in_environment
async def test_a_command_that_was_never_sent_ends_with_its_timeout(scene: Scene) -> None:
    """Nothing runs, also when the connection is there again."""
    scene.dialer.failures = [ConnectFailed("refused") for _ in range(100_000)]
    scene.stream.lose()
    began = asyncio.get_running_loop().time()
    late = await outcome(scene.env.run(["make"], timeout=0.05))
    assert asyncio.get_running_loop().time() - began < 1
    assert isinstance(late, Timeout)
    assert (late.was_sent, late.is_killed) == (False, True)
    assert str(late) == (
        "make was not sent within 0.05 s, because there is no connection to the server; nothing "
        "runs"
    )
    scene.dialer.failures.clear()
    stream = await scene.dialer.stream()
    await stream.past_handshake()
    await turns()
    assert stream.is_quiet


@in_environment
async def test_the_kill_of_an_unanswered_start_is_waited_for_shortly(scene: Scene) -> None:
    with mock.patch.object(run_module, "UNANSWERED_KILL_SECONDS", 0.01):
        late = await outcome(scene.env.run(["make"], timeout=0.01))
    assert isinstance(late, Timeout)
    assert (late.was_sent, late.is_killed) == (True, False)
    assert "it may still run" in str(late)
    await scene.stream.next("process/start")
    await scene.stream.next("process/terminate")
