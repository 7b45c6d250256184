"""The life of handles: opened by `await` or a block, closed in any task, and never twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.support.memory_session import outcome, play

from exec_server.client import handle as handle_module
from exec_server.client.handle import ContextTask, Handle
from exec_server.host import event_loop


class Door(Handle):
    """Counts, and waits for permission if it has locks."""

    def __init__(self, *, failure: Exception | None = None) -> None:
        super().__init__()
        self.opened = self.closed = 0
        self.failure = failure
        self.may_open = asyncio.Event()
        self.may_close = asyncio.Event()
        self.may_open.set()
        self.may_close.set()

    async def _open(self) -> None:
        await self.may_open.wait()
        if self.failure is not None:
            raise self.failure
        self.opened += 1

    async def _close(self) -> None:
        await self.may_close.wait()
        self.closed += 1


def test_it_is_awaited_or_entered() -> None:
    async def run() -> None:
        awaited = await Door()
        assert (awaited.opened, awaited.closed, awaited.is_open) == (1, 0, True)
        async with awaited as same:
            assert same is awaited
        assert (awaited.opened, awaited.closed, awaited.is_open) == (1, 1, False)
        async with Door() as entered:
            assert entered.is_open
        assert (entered.opened, entered.closed) == (1, 1)

    play(run())


def test_it_is_opened_once() -> None:
    async def run() -> None:
        async with await Door() as door:
            for again in (door.__aenter__, lambda: _awaited(door)):
                with pytest.raises(RuntimeError, match="this Door can be opened only once"):
                    await again()
        with pytest.raises(RuntimeError, match="opened only once"):
            await door
        unopened = Door()
        await unopened.aclose()
        with pytest.raises(RuntimeError, match="opened only once"):
            await unopened
        assert (unopened.opened, unopened.closed) == (0, 0)

    play(run())


async def _awaited(door: Door) -> Door:
    return await door


def test_it_is_closed_once_and_each_caller_waits_for_that() -> None:
    async def run() -> None:
        door = await Door()
        door.may_close.clear()
        async with asyncio.TaskGroup() as tasks:
            closing = [tasks.create_task(door.aclose()) for _ in range(3)]
            await asyncio.sleep(0)
            assert not any(task.done() for task in closing)
            assert not door.is_open
            door.may_close.set()
        await door.aclose()
        assert door.closed == 1

    play(run())


def test_it_is_closed_in_its_own_event_loop() -> None:
    loop = asyncio.new_event_loop()
    try:
        door = loop.run_until_complete(_awaited(Door()))
        with pytest.raises(RuntimeError, match="this Door belongs to another event loop"):
            asyncio.run(door.aclose())
        assert door.is_open
    finally:
        loop.close()  # which closes the handle
    assert (door.is_open, repr(door)) == (False, "<Door, closed>")
    asyncio.run(door.aclose())
    assert (door.is_open, door.closed) == (False, 0)


def test_the_child_of_a_fork_does_not_close_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        door = await Door()
        with monkeypatch.context() as child:
            child.setattr(event_loop, "_forks", [event_loop._forks[0] + 1])
            await door.aclose()
        assert door.is_open
        await door.aclose()

    asyncio.run(run())


def test_closing_waits_for_an_opening() -> None:
    async def run() -> None:
        for failure in (None, ValueError("no")):
            door = Door(failure=failure)
            door.may_open.clear()
            async with asyncio.TaskGroup() as tasks:
                opening = tasks.create_task(outcome(door))
                await asyncio.sleep(0)
                closing = tasks.create_task(door.aclose())
                await asyncio.sleep(0)
                assert not closing.done()
                door.may_open.set()
            assert opening.result() is (failure or door)
            assert (door.opened, door.closed) == ((0, 0) if failure else (1, 1))

    play(run())


class Room:
    """A context that records which task enters and leaves it."""

    def __init__(
        self, *, entering: Exception | None = None, leaving: Exception | None = None
    ) -> None:
        self.entering = entering
        self.leaving = leaving
        self.tasks: list[object] = []
        self.can_enter = asyncio.Event()
        self.can_enter.set()

    @asynccontextmanager
    async def context(self) -> AsyncIterator[str]:
        async with asyncio.TaskGroup():
            await self.can_enter.wait()
            if self.entering is not None:
                raise self.entering
            self.tasks.append(asyncio.current_task())
            try:
                yield "value"
            finally:
                self.tasks.append(asyncio.current_task())
                if self.leaving is not None:
                    raise self.leaving


def test_a_context_is_entered_and_left_by_one_task() -> None:
    async def run() -> None:
        room = Room()
        context = ContextTask(room.context())
        async with asyncio.TaskGroup() as tasks:
            assert await tasks.create_task(context.open()) == "value"
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(context.close())
            tasks.create_task(context.close())
        assert len(room.tasks) == 2
        assert len(set(room.tasks)) == 1
        await ContextTask(room.context()).close()  # it was never opened

    play(run())


def test_errors_reach_the_callers() -> None:
    async def run() -> None:
        with pytest.raises(ExceptionGroup):
            await ContextTask(Room(entering=KeyError("in")).context()).open()
        context = ContextTask(Room(leaving=KeyError("out")).context())
        await context.open()
        with pytest.raises(ExceptionGroup):
            await context.close()

    play(run())


@pytest.mark.parametrize("error", [None, KeyError("out")])
def test_a_cancelled_opening_leaves_the_context(error: Exception | None) -> None:
    async def run() -> None:
        room = Room(leaving=error)
        context = ContextTask(room.context())
        opening = asyncio.get_running_loop().create_task(context.open())
        while not room.tasks:
            await asyncio.sleep(0)
        opening.cancel()  # in the moment after it was entered
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert len(room.tasks) == 2
        room.can_enter.clear()
        opening = asyncio.get_running_loop().create_task(ContextTask(room.context()).open())
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert len(room.tasks) == 2

    play(run())


def test_the_end_of_the_loop_leaves_the_context() -> None:
    rooms = []

    async def run() -> None:
        rooms.append(Room())
        await ContextTask(rooms[0].context()).open()

    asyncio.run(run())
    assert len(rooms[0].tasks) == 2
    assert not handle_module._OPEN


def test_the_end_of_the_program_leaves_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """For loops that were not run by `asyncio.run`; not for those of other threads."""
    loop = asyncio.new_event_loop()
    try:
        room = Room()

        async def run() -> None:
            await ContextTask(room.context()).open()
            handle_module._close_open()
            assert len(room.tasks) == 1  # the loop is running

        loop.run_until_complete(run())
        assert len(room.tasks) == 1
        with monkeypatch.context() as child:  # of a fork: the context is that of its parent
            child.setattr(event_loop, "_forks", [event_loop._forks[0] + 1])
            handle_module._close_open()
            assert len(room.tasks) == 1
        handle_module._close_open()
        assert len(room.tasks) == 2
    finally:
        loop.close()


def test_a_handle_describes_its_state() -> None:
    async def scene() -> None:
        door = Door()
        door.may_open.clear()
        assert repr(door) == "<Door, not open>"
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(outcome(door))
            await asyncio.sleep(0)
            assert repr(door) == "<Door, opening>"
            door.may_open.set()
        assert repr(door) == "<Door, open>"
        door.may_close.clear()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(door.aclose())
            await asyncio.sleep(0)
            assert repr(door) == "<Door, closing>"
            door.may_close.set()
        assert repr(door) == "<Door, closed>"

    play(scene())
