"""Consumers, and when full queues stop the reading."""

from __future__ import annotations

import asyncio
import contextvars

import pytest

from exec_server.client.engine import flow_control as module
from exec_server.client.engine.flow_control import (
    MAX_DEPTH,
    Consumer,
    FlowControl,
    current_consumer,
    is_consumer,
    separate_consumer,
    share_consumer,
    waiting_consumers,
)


def test_tasks_that_a_reader_starts_belong_to_its_consumer() -> None:
    async def begun() -> tuple[Consumer, ...]:
        return waiting_consumers()

    async def reader() -> None:
        before = asyncio.get_running_loop().create_task(begun())
        consumer = current_consumer()
        assert current_consumer() is consumer
        assert consumer in waiting_consumers()
        assert consumer in await asyncio.get_running_loop().create_task(begun())
        assert consumer not in await before

    async def scene() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(reader())
            tasks.create_task(reader())
        assert waiting_consumers() == ()

    asyncio.run(scene())


def test_a_reader_within_a_reader_is_a_consumer_of_its_own() -> None:
    async def nest(depth: int, outer: Consumer | None) -> int:
        consumer = current_consumer()
        assert consumer is not outer
        assert outer is None or outer in waiting_consumers()
        if depth:
            return await asyncio.get_running_loop().create_task(nest(depth - 1, consumer))
        return len(waiting_consumers())

    assert asyncio.run(nest(3, None)) == 4
    assert asyncio.run(nest(3 * MAX_DEPTH, None)) == MAX_DEPTH


def test_a_thread_is_one_consumer_whatever_its_tasks() -> None:
    async def read() -> Consumer:
        return current_consumer()

    def thread() -> None:
        share_consumer()
        share_consumer()
        assert asyncio.run(read()) is asyncio.run(read()) is waiting_consumers()[0]

    contextvars.Context().run(thread)


def test_a_task_of_the_client_is_a_consumer_of_its_own() -> None:
    async def deliver(outer: Consumer) -> Consumer:
        separate_consumer()
        assert waiting_consumers() == (outer, current_consumer())
        return current_consumer()

    async def read() -> None:
        outer = current_consumer()
        delivering = asyncio.get_running_loop().create_task(deliver(outer))
        assert await delivering not in waiting_consumers()

    def thread() -> None:
        share_consumer()
        asyncio.run(read())

    contextvars.Context().run(thread)


# ---- full queues ----------------------------------------------------------------------


class Reader:
    """Counts pauses of the reading."""

    def __init__(self) -> None:
        self.is_reading = True
        self.flow = FlowControl(self)

    def pause_reading(self) -> None:
        assert self.is_reading
        self.is_reading = False

    def resume_reading(self) -> None:
        assert not self.is_reading
        self.is_reading = True


def test_reading_stops_while_a_queue_is_full() -> None:
    reader = Reader()
    consumer = Consumer(None)
    reader.flow.queue_full("a", consumer)
    reader.flow.queue_full("b", None)
    reader.flow.queue_full("a", consumer)
    reader.flow.queue_drained("a")
    assert not reader.is_reading
    reader.flow.queue_read("b", consumer)
    assert not reader.is_reading
    reader.flow.queue_drained("b")
    assert reader.is_reading
    reader.flow.queue_drained("b")
    reader.flow.queue_read("b", consumer)
    assert reader.is_reading


def test_a_queue_is_exempt_while_its_consumer_waits() -> None:
    async def scene() -> None:
        reader = Reader()
        flow = reader.flow
        others = flow.begin_wait()  # before this task is a consumer
        flow.queue_full("a", current_consumer())
        assert not reader.is_reading
        own = flow.begin_wait(), flow.begin_wait()
        assert reader.is_reading
        assert flow.is_exempt("a")
        for consumers in own:
            assert reader.is_reading
            flow.end_wait(consumers)
        assert not reader.is_reading
        flow.end_wait(others)
        flow.close()

    asyncio.run(scene())


def test_a_queue_without_a_consumer_is_exempt_while_any_task_waits() -> None:
    async def scene() -> None:
        reader = Reader()
        reader.flow.queue_full("a", None)
        assert not reader.is_reading
        consumers = reader.flow.begin_wait()
        assert reader.is_reading
        reader.flow.queue_full("a", Consumer(None))
        assert not reader.is_reading
        reader.flow.end_wait(consumers)
        reader.flow.close()

    asyncio.run(scene())


def test_a_stalled_queue_is_exempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALL_SECONDS", 0.0)

    async def timer() -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    async def scene() -> None:
        reader = Reader()
        consumer = Consumer(None)
        reader.flow.queue_full("a", consumer)
        await timer()
        assert not reader.is_reading  # no task waits
        consumers = reader.flow.begin_wait()
        reader.flow.queue_read("a", consumer)
        assert not reader.is_reading
        while not reader.is_reading:
            await asyncio.sleep(0)
        reader.flow.queue_read("a", consumer)
        assert not reader.is_reading
        reader.flow.end_wait(consumers)
        reader.flow.close()

    asyncio.run(scene())


def test_a_wait_for_the_sender_of_a_queue_does_not_make_it_stalled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "STALL_SECONDS", 0.0)

    async def scene() -> None:
        reader, own = Reader(), Reader()
        flow = reader.flow
        flow.queue_full("a", Consumer(None))
        flow.queue_full("b", Consumer(None), own)
        consumers = flow.begin_wait("a")
        while not own.is_reading:
            await asyncio.sleep(0)
        assert not reader.is_reading
        assert not flow.is_exempt("a")
        others = flow.begin_wait()
        while not reader.is_reading:
            await asyncio.sleep(0)
        flow.end_wait(others)
        flow.end_wait(consumers, "a")
        flow.close()

    asyncio.run(scene())


def test_a_queue_with_a_valve_of_its_own_stops_no_other() -> None:
    async def scene() -> None:
        reader, own = Reader(), Reader()
        flow = reader.flow
        flow.queue_full("a", current_consumer(), own)
        assert (reader.is_reading, own.is_reading) == (True, False)
        flow.queue_full("b", None)
        assert (reader.is_reading, own.is_reading) == (False, False)
        consumers = flow.begin_wait()
        assert (reader.is_reading, own.is_reading) == (True, True)
        flow.queue_drained("a")
        flow.end_wait(consumers)
        assert (reader.is_reading, own.is_reading) == (False, True)
        flow.queue_drained("b")
        assert (reader.is_reading, own.is_reading) == (True, True)
        flow.close()

    asyncio.run(scene())


def test_a_task_that_a_consumer_starts_is_not_that_consumer() -> None:
    async def scene() -> None:
        assert not is_consumer(None)
        consumer = current_consumer()
        assert is_consumer(consumer)
        assert not is_consumer(Consumer(None))

        async def started() -> bool:
            return is_consumer(consumer)

        assert not await asyncio.get_running_loop().create_task(started())

    asyncio.run(scene())
