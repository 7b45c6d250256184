"""The queue of unread output: when a process is paused, and when its output is skipped."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from tests.support.memory_session import PAUSING, Scene, in_environment, turns

from exec_server.client.engine import flow_control as module
from exec_server.client.engine.flow_control import FlowControl, FlowRequests, OutputQueue, Reader
from exec_server.client.process import Process
from exec_server.client.results import Chunk
from exec_server.protocol.process import CHUNK_BYTES, Flow

SIZE = 1000


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk weighs SIZE; the queue is full at 10, overflows at 20, and ends at 40 chunks."""
    monkeypatch.setattr(module, "CHUNK_COST", 0)
    for name, chunks in (
        ("DRAINED_BYTES", 3),
        ("FULL_BYTES", 10),
        ("OVERFLOW_BYTES", 20),
        ("PAUSED_BYTES", 40),
        ("SESSION_BYTES", 40),
    ):
        monkeypatch.setattr(module, name, chunks * SIZE)


class Connection:
    is_reading = True

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True


class Source:
    def __init__(self) -> None:
        self.is_skipping = False
        self.is_ending = False
        self.recoveries: list[asyncio.Future[None]] = []

    def recover(self) -> asyncio.Future[None]:
        self.is_skipping = False
        self.recoveries.append(asyncio.get_running_loop().create_future())
        return self.recoveries[-1]


class Requests:
    """FlowRequests that are acknowledged at once."""

    def __init__(self, *, is_supported: bool) -> None:
        self.is_supported = is_supported
        self.flow: Flow = "send"

    def request(self, flow: Flow) -> None:
        self.flow = flow

    def when_settled(self, callback: Callable[[], None]) -> None:
        callback()


class Queue:
    """A queue with the objects around it."""

    def __init__(self, flow_control: FlowControl | None = None, *, pausing: bool = True) -> None:
        self.connection = Connection()
        self.flow_control = flow_control or FlowControl(self.connection)
        self.source = Source()
        self.requests = Requests(is_supported=pausing)
        self.queue = OutputQueue(self.flow_control, self.source, cast(FlowRequests, self.requests))

    def fill(self, chunks: int) -> None:
        for _ in range(chunks):
            self.queue.append(Chunk("stdout", bytes(SIZE)))

    def take(self, chunks: int) -> None:
        for _ in range(chunks):
            self.queue.begin_read(None)
            self.queue.pop()

    @property
    def state(self) -> tuple[bool, Flow, bool]:
        return self.connection.is_reading, self.requests.flow, self.source.is_skipping


def in_loop(scene: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def test() -> None:
        async def run() -> None:
            await scene()

        asyncio.run(run())

    test.__doc__ = scene.__doc__
    return test


SENT = (True, "send", False)


@in_loop
async def test_unwanted_output_is_queued_and_then_left_to_the_server() -> None:
    for pausing in (True, False):
        queue = Queue(pausing=pausing)
        queue.fill(19)
        assert queue.state == SENT
        queue.fill(1)
        assert queue.state == (True, "retain", True)


@in_loop
async def test_wanted_output_pauses_its_process_only() -> None:
    queue = Queue()
    queue.fill(1)
    queue.take(1)
    queue.fill(9)
    assert queue.state == SENT
    queue.fill(1)
    assert queue.state == (True, "pause", False)
    queue.fill(15)  # was under way
    queue.take(22)
    assert queue.state == (True, "pause", False)
    queue.take(1)
    assert queue.state == SENT
    assert queue.flow_control.queued_bytes == queue.queue.weight == 2 * SIZE


@in_loop
async def test_other_servers_are_not_read_instead() -> None:
    queue = Queue(pausing=False)
    queue.fill(1)
    queue.take(1)
    queue.fill(10)
    assert not queue.connection.is_reading
    queue.take(8)
    assert queue.state == SENT


@in_loop
async def test_a_reader_that_waits_for_an_answer_has_more_space() -> None:
    """Then the process is paused, or its output is left to a server that cannot do that."""
    for pausing, beyond in ((True, (True, "pause", False)), (False, (True, "pause", True))):
        queue = Queue(pausing=pausing)
        queue.fill(1)
        queue.take(1)
        consumers = queue.flow_control.begin_wait()
        queue.fill(19)
        assert queue.state == SENT
        queue.fill(1)
        assert queue.state == beyond
        queue.flow_control.end_wait(consumers)
        queue.flow_control.close()


@in_loop
async def test_a_server_that_ignores_the_pause_is_not_believed_forever() -> None:
    queue = Queue()
    queue.fill(1)
    queue.take(1)
    queue.fill(39)
    assert not queue.source.is_skipping
    queue.fill(1)
    assert queue.source.is_skipping


@in_loop
async def test_a_reader_that_comes_late_pauses_the_process_and_reads_the_rest() -> None:
    queue = Queue()
    queue.fill(20)
    assert queue.state == (True, "retain", True)
    queue.queue.begin_read(None)
    assert queue.state == (True, "pause", True)
    queue.take(17)
    assert not queue.source.recoveries
    queue.take(1)
    assert queue.state == (True, "pause", False)
    queue.queue.recover_skipped()  # it is under way
    [recovery] = queue.source.recoveries
    queue.fill(2)
    recovery.set_result(None)
    await turns()
    assert queue.state == SENT


@in_loop
async def test_the_rest_of_an_ended_process_is_not_left_to_the_server() -> None:
    queue = Queue()
    queue.source.is_ending = True
    queue.fill(30)
    assert not queue.source.is_skipping


@in_loop
async def test_output_is_wanted_until_the_last_iteration_ends() -> None:
    queue = Queue()
    readers = [Reader(), Reader()]
    queue.fill(10)
    for reader in (*readers, readers[0]):
        queue.queue.begin_read(reader)
    assert queue.state == (True, "pause", False)
    del reader
    for expected in ("pause", "send"):
        del readers[0]
        gc.collect()
        await turns()
        assert queue.state == (True, expected, False)


def test_an_iteration_may_end_after_its_loop() -> None:
    readers = [Reader()]

    async def scene() -> None:
        Queue().queue.begin_read(readers[0])

    asyncio.run(scene())
    readers.clear()
    gc.collect()  # pytest reports an error of the callback, which has no loop any more


@in_loop
async def test_output_is_not_wanted_while_its_reader_waits_for_the_exit() -> None:
    queue = Queue()
    queue.fill(1)
    queue.take(1)
    queue.fill(15)
    assert queue.state == (True, "pause", False)
    with queue.queue.waiting_for_exit():
        assert queue.state == SENT
        queue.fill(5)
        assert queue.state == (True, "retain", True)
    assert queue.state == (True, "pause", True)
    other = Queue()
    with other.queue.waiting_for_exit():
        other.fill(10)
    assert other.state == SENT


@in_loop
async def test_a_queue_without_further_output_pauses_nothing() -> None:
    for pausing in (True, False):
        queue = Queue(pausing=pausing)
        queue.fill(1)
        queue.take(1)
        queue.fill(15)
        queue.queue.end()
        assert queue.state == SENT
        queue.take(15)
        assert queue.state == SENT


@in_loop
async def test_discarded_output_takes_no_space() -> None:
    queue = Queue()
    queue.fill(25)
    queue.queue.discard()
    assert queue.state == SENT
    assert len(queue.source.recoveries) == 1
    queue.fill(25)
    assert (len(queue.queue), queue.flow_control.queued_bytes) == (0, 0)
    assert queue.state == SENT


@in_loop
async def test_many_forgotten_processes_share_a_limit() -> None:
    connection = Connection()
    flow_control = FlowControl(connection)
    queues = [Queue(flow_control) for _ in range(6)]
    for queue in queues:
        queue.fill(18)
    weights = [queue.queue.weight // SIZE for queue in queues]
    assert weights == [18] * 6  # the test does not heed that they skip
    assert [queue.source.is_skipping for queue in queues] == [False] * 2 + [True] * 4


# ---- requests -------------------------------------------------------------------------


def paused(scene: Callable[[Scene], Awaitable[None]]) -> Callable[[], None]:
    return in_environment(scene, PAUSING)


def fill(scene: Scene, first: int, chunks: int) -> int:
    for seq in range(first, first + chunks):
        scene.output(seq, bytes(SIZE))
    return first + chunks


async def set_flow(scene: Scene, flow: str) -> Any:
    request = await scene.stream.next("process/setFlow")
    assert request["params"] == {"processId": scene.process_id, "flow": flow}
    return request


async def read_one(process: Process) -> None:
    await anext(process)


@paused
async def test_only_the_last_wish_is_sent(scene: Scene) -> None:
    process = await scene.started()
    scene.output(1)
    await anext(process)
    seq = fill(scene, 2, 10)
    pause = await set_flow(scene, "pause")
    for _ in range(8):
        await anext(process)
    fill(scene, seq, 8)
    for _ in range(8):
        await anext(process)
    await turns()
    assert scene.stream.is_quiet
    scene.stream.answer(pause, {})
    scene.stream.answer(await set_flow(scene, "send"), {})
    await turns()
    assert scene.stream.is_quiet


@paused
async def test_requests_do_not_wait_for_other_answers(scene: Scene) -> None:
    """A write to a paused process is answered when that is continued."""
    process = await scene.started(stdin=True)
    scene.output(1)
    await anext(process)
    for _ in range(scene.dialer.calls_in_flight + 2):
        await process.write(b"x")
    for _ in range(scene.dialer.calls_in_flight):
        await scene.stream.next("process/write")
    fill(scene, 2, 10)
    # No write was answered: this would time out if the request waited for that.
    scene.stream.answer(await set_flow(scene, "pause"), {})


@paused
async def test_a_refused_request_is_not_repeated(scene: Scene) -> None:
    process = await scene.started()
    scene.output(1)
    await anext(process)
    fill(scene, 2, 10)
    scene.stream.refuse(await set_flow(scene, "pause"), -32600, "unknown process id")
    await turns()
    assert scene.stream.is_quiet


@paused
async def test_skipped_output_is_read_when_the_process_is_paused(scene: Scene) -> None:
    process = await scene.started()
    fill(scene, 1, 20)
    retain = await set_flow(scene, "retain")
    for _ in range(20):
        await anext(process)
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(read_one(process))
        await turns()
        assert scene.stream.is_quiet  # the server might still retain without a word
        scene.stream.answer(retain, {})
        scene.stream.answer(await set_flow(scene, "pause"), {})
        assert (await scene.answer_read((22, b"y"), firstSeq=22, lostBytes=5))["afterSeq"] == 20
        await reading
    await scene.answer_read(nextSeq=23)
    scene.stream.answer(await set_flow(scene, "send"), {})
    assert process.lost_bytes == 5


@paused
async def test_the_rest_of_a_skipped_process_is_read_at_its_end(scene: Scene) -> None:
    process = await scene.started()
    fill(scene, 1, 20)
    scene.stream.answer(await set_flow(scene, "retain"), {})
    scene.exited(41, 5)
    scene.say("closed", 42)
    assert process.exit_code == 5
    assert not process.is_over
    await scene.answer_read((40, b"end"), firstSeq=40, lostBytes=19)
    await scene.answer_read(nextSeq=43, exited=True, exitCode=5, closed=True)
    await turns()
    assert process.is_over
    chunks = [chunk async for chunk in process]
    assert (len(chunks), chunks[-1]) == (21, Chunk("stdout", b"end", 19))


@paused
async def test_a_skipped_process_stays_skipped_on_another_connection(scene: Scene) -> None:
    process = await scene.started()
    fill(scene, 1, 20)
    scene.stream.answer(await set_flow(scene, "retain"), {})
    await scene.reconnected()
    assert (await scene.answer_read((21, b"x")))["maxBytes"] == 1
    await turns()
    assert process._remote is not None
    assert process._remote.is_skipping
    await scene.reconnected()
    await scene.answer_read((21, b"x"), nextSeq=24, exited=True, exitCode=3, closed=True)
    await scene.answer_read((21, b"x"), exited=True, exitCode=3, closed=True)
    await scene.answer_read(nextSeq=24, exited=True, exitCode=3, closed=True)
    await turns()
    assert (process.exit_code, process.is_over) == (3, True)


# ---- output that is put back ----------------------------------------------------------


def test_output_that_was_taken_may_be_put_back() -> None:
    async def run() -> None:
        queue = Queue()
        for _ in range(3):
            queue.queue.append(Chunk("stdout", bytes(SIZE)))
        reader = Reader()
        queue.queue.begin_read(reader)
        taken = [queue.queue.pop() for _ in range(2)]
        assert queue.queue.weight == SIZE
        queue.queue.put_back(taken)
        assert (len(queue.queue), queue.queue.weight) == (3, 3 * SIZE)
        assert queue.queue.pop() is taken[0]
        queue.queue.discard()
        queue.queue.put_back(taken)
        assert (len(queue.queue), queue.queue.weight) == (0, 0)

    asyncio.run(run())


@in_loop
async def test_a_run_is_taken_whole_or_by_its_chunks() -> None:
    queue = Queue()
    data = bytes(range(256)) * (CHUNK_BYTES // 128) + b"end"
    for _ in range(2):
        queue.queue.append(Chunk("stdout", data, 5))
    queue.queue.begin_read(None)
    assert queue.queue.pop_whole() == Chunk("stdout", data, 5)
    taken = [queue.queue.pop(), queue.queue.pop()]
    assert [(len(chunk.data), chunk.lost_before) for chunk in taken] == [
        (CHUNK_BYTES, 5),
        (CHUNK_BYTES, 0),
    ]
    queue.queue.put_back(taken[1:])
    taken[1:] = [queue.queue.pop(), queue.queue.pop()]
    assert b"".join(chunk.data for chunk in taken) == data
    assert queue.queue.weight == queue.flow_control.queued_bytes == len(queue.queue) == 0
