"""LoopThread: calls from other threads into an event loop, without a connection."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import signal
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from tests.support.client import DEFAULT_TIMEOUT, scaled

from exec_server import sync
from exec_server.client.handle import Handle
from exec_server.errors import Cancelled, SessionLost
from exec_server.host import event_loop
from exec_server.sync import thread as thread_module
from exec_server.sync.thread import Blocking, BlockingHandle, LoopThread, blocking, iterate


class Counter:
    """An async object with its own context."""

    def __init__(self) -> None:
        self.value = 0
        self.entered = threading.Event()
        self.left = threading.Event()

    async def __aenter__(self) -> Counter:
        self.entered.set()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.left.set()

    async def add(self, number: int = 1) -> int:
        await asyncio.sleep(0)
        self.value += number
        return self.value

    async def fail(self) -> None:
        raise KeyError("mine")

    async def wait_forever(self) -> None:
        self.entered.set()
        await asyncio.Event().wait()

    async def numbers(self, count: int) -> AsyncIterator[int]:
        for number in range(count):
            yield number


class BlockingCounter(Blocking[Counter]):
    add = blocking(Counter.add)
    fail = blocking(Counter.fail)
    wait_forever = blocking(Counter.wait_forever)


def test_calls_of_several_threads_are_performed() -> None:
    thread = LoopThread(Counter)
    counter = BlockingCounter(thread, thread.value)
    callers = [threading.Thread(target=counter.add) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert counter.add(number=6) == 10
    assert repr(counter) == repr(thread.value).replace("<", "<sync.", 1)
    with pytest.raises(KeyError, match="mine"):
        counter.fail()
    thread.close()
    assert thread.value.left.is_set()


def test_an_error_of_entering_is_raised() -> None:
    @asynccontextmanager
    async def broken() -> AsyncIterator[None]:
        raise KeyError("mine")
        yield

    before = threading.active_count()
    with pytest.raises(KeyError, match="mine"):
        LoopThread(broken)
    assert threading.active_count() == before


def test_closing_ends_calls() -> None:
    thread = LoopThread(Counter)
    counter = BlockingCounter(thread, thread.value)
    thread.value.entered.clear()
    errors: list[Exception] = []

    def wait() -> None:
        try:
            counter.wait_forever()
        except SessionLost as error:
            errors.append(error)

    caller = threading.Thread(target=wait)
    caller.start()
    assert thread.value.entered.wait(scaled(DEFAULT_TIMEOUT))
    thread.close()
    caller.join()
    assert [str(error) for error in errors] == ["the environment was closed"]
    with pytest.raises(SessionLost):
        counter.add()
    thread.close()


def test_a_call_between_the_ends_of_loop_and_thread_leaves_no_coroutine() -> None:
    thread = LoopThread(Counter)
    counter = BlockingCounter(thread, thread.value)
    thread.close()
    thread._waiting = set()  # as long as the thread has not ended
    with pytest.raises(SessionLost):
        counter.add()
    gc.collect()  # Python warns of a coroutine that was never awaited


def test_a_coroutine_of_another_loop_calls() -> None:
    thread = LoopThread(Counter)
    ended = threading.Event()

    async def wait() -> None:
        try:
            await thread.value.wait_forever()
        finally:
            ended.set()

    async def scene() -> None:
        assert await thread.call_from_loop(thread.value.add, 2) == 2
        with pytest.raises(KeyError, match="mine"):
            await thread.call_from_loop(thread.value.fail)
        thread.value.entered.clear()
        waiting = asyncio.get_running_loop().create_task(thread.call_from_loop(wait))
        await asyncio.to_thread(thread.value.entered.wait, scaled(DEFAULT_TIMEOUT))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert ended.wait(scaled(DEFAULT_TIMEOUT))
        thread.close()
        with pytest.raises(SessionLost):
            await thread.call_from_loop(thread.value.add)
        gc.collect()  # Python warns of a coroutine that was never awaited

    asyncio.run(scene())


def test_the_child_of_a_fork_calls_and_closes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "_forks", [0])
    thread = LoopThread(Counter)
    counter = BlockingCounter(thread, thread.value)
    handle = BlockingHandle(thread, Door())
    with monkeypatch.context() as child:
        child.setattr(event_loop, "_forks", [1])
        with pytest.raises(RuntimeError, match="connect again after a fork"):
            counter.add()
        with pytest.raises(RuntimeError, match="connect again after a fork"):
            asyncio.run(thread.call_from_loop(Counter.add, thread.value))
        for kind in (None, KeyboardInterrupt):
            handle.__exit__(kind, None, None)
        thread.close()
        assert thread not in thread_module._OPEN
        assert not thread.value.left.is_set()
    assert handle.is_open
    assert counter.add() == 1
    thread.close()
    assert thread.value.left.is_set()


def test_a_callback_cannot_call_the_client() -> None:
    thread = LoopThread(Counter)
    counter = BlockingCounter(thread, thread.value)

    async def callback() -> list[str]:
        texts = []
        for use in (counter.add, thread.close):
            with pytest.raises(RuntimeError) as refused:
                use()
            texts.append(str(refused.value))
        return texts

    assert thread.call(callback) == [
        "a callback of the client must not call the client",
        "a callback of the client must not close the client",
    ]
    thread.close()


@pytest.mark.parametrize("batch_size", [1, 3, 10])
def test_an_async_iterator_is_iterated_in_batches(batch_size: int) -> None:
    thread = LoopThread(Counter)
    assert list(iterate(thread, thread.value.numbers(7), batch_size)) == list(range(7))
    assert list(iterate(thread, thread.value.numbers(0), batch_size)) == []
    thread.close()


class Door(Handle):
    """A handle that counts."""

    opened = closed = 0

    async def _open(self) -> None:
        self.opened += 1

    async def _close(self) -> None:
        self.closed += 1


def test_a_handle_is_open_at_once() -> None:
    thread = LoopThread(Counter)
    inner = Door()
    door = BlockingHandle(thread, inner)
    assert (inner.opened, door.is_open) == (1, True)
    with door as same:
        assert same is door
    assert (inner.closed, door.is_open) == (1, False)
    door.close()
    assert inner.closed == 1
    left = BlockingHandle(thread, Door())
    thread.close()
    left.close()  # it was closed with the thread


def test_a_handle_that_was_opened_is_closed_after_an_interrupt() -> None:
    """The interrupt arrives when the handle was opened, and before the caller knows it."""
    main = threading.get_ident()

    class Interrupting(Door):
        async def _open(self) -> None:
            signal.pthread_kill(main, signal.SIGINT)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            await super()._open()

    class Broken(Door):
        async def _open(self) -> None:
            raise KeyError("mine")

    thread = LoopThread(Counter)
    inner = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        BlockingHandle(thread, inner)
    assert (inner.opened, inner.closed) == (1, 1)
    with pytest.raises(KeyError, match="mine"):
        BlockingHandle(thread, Broken())
    thread.close()


def test_wrong_arguments_are_refused_before_the_call() -> None:
    """Also for a function that fails before it returns a coroutine."""
    thread = LoopThread(Counter)
    counter = BlockingCounter(thread, thread.value)
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such'"):
        counter.add(no_such=True)  # type: ignore[call-arg]

    def broken() -> Coroutine[Any, Any, None]:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        thread.call(broken)
    assert counter.add() == 1
    thread.close()


def _methods() -> Iterator[tuple[type, str]]:
    for name in sync.__all__:
        kind = getattr(sync, name)
        if isinstance(kind, type):
            yield from (
                (kind, method)
                for method, value in inspect.getmembers(kind)
                if not method.startswith("_") and callable(value)
            )


@pytest.mark.parametrize(("kind", "method"), list(_methods()))
def test_wrong_arguments_to_any_method_raise_type_error(kind: Any, method: str) -> None:
    thread = LoopThread(Counter)
    wrapper = kind.__new__(kind)
    wrapper._thread, wrapper._inner = thread, None
    call = getattr(wrapper, method)
    parameters = inspect.signature(call).parameters.values()
    named = [
        each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    # Options that are passed on are checked by the method that they are for.
    passes_on = any(each.kind is each.VAR_KEYWORD for each in parameters)
    try:
        with pytest.raises(TypeError, match="missing" if passes_on else "'no_such'"):
            call(no_such=True)
        if any(each.default is each.empty for each in named):
            with pytest.raises(TypeError, match="missing"):
                call()
    finally:
        thread.close()


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_an_exception_that_stops_the_loop_is_raised(kind: type[BaseException]) -> None:
    """A callback of the caller may raise one in a task of the client."""

    async def stop() -> None:
        async def raise_it() -> None:
            raise kind("mine")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(raise_it())
            await asyncio.Event().wait()

    thread = LoopThread(Counter)
    counter = BlockingCounter(thread, thread.value)
    with pytest.raises(kind, match="mine"):
        thread.call(stop)
    assert thread.value.left.wait(scaled(DEFAULT_TIMEOUT))
    with pytest.raises(SessionLost, match=f"has failed: {kind.__name__}"):
        counter.add()
    thread.close()


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_an_exception_of_any_kind_is_raised(kind: type[BaseException]) -> None:
    async def fail() -> None:
        raise kind("mine")

    thread = LoopThread(Counter)
    with pytest.raises(kind, match="mine"):
        thread.call(fail)
    assert thread.call(thread.value.add) == 1
    thread.close()


def test_a_call_that_comes_too_late_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop has accepted the call, and ends before it performs it."""
    thread = LoopThread(Counter)
    monkeypatch.setattr(thread, "_start", lambda call: None)
    errors: list[Exception] = []

    def add() -> None:
        try:
            thread.call(thread.value.add)
        except SessionLost as error:
            errors.append(error)

    caller = threading.Thread(target=add)
    caller.start()
    while not thread._waiting:
        time.sleep(0)
    thread.close()
    caller.join()
    assert [str(error) for error in errors] == ["the environment was closed"]


def test_an_interrupt_does_not_wait_for_a_slow_clean_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_module, "CANCEL_SECONDS", 0.0)
    thread = LoopThread(Counter)
    reached, is_cleaned_up = asyncio.Event(), threading.Event()
    main = threading.get_ident()

    async def wait() -> None:
        try:
            signal.pthread_kill(main, signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            await reached.wait()
            is_cleaned_up.set()

    async def go_on() -> None:
        reached.set()

    with pytest.raises(KeyboardInterrupt):
        thread.call(wait)
    assert not is_cleaned_up.is_set()
    thread.call(go_on)
    assert is_cleaned_up.wait(scaled(DEFAULT_TIMEOUT))
    thread.close()


def test_a_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    loop = uvloop.new_event_loop()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(event_loop, "new_event_loop_for_forks", lambda: loop)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        LoopThread(Counter)
    assert loop.is_closed()


class SlowDoor(Handle):
    """A handle whose closing takes long."""

    async def _open(self) -> None:
        self.is_closing = threading.Event()

    async def _close(self) -> None:
        self.is_closing.set()
        await asyncio.Event().wait()


def test_after_an_interrupt_handles_are_closed_in_the_background(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thread_module, "CANCEL_SECONDS", 0.01)
    with contextlib.closing(LoopThread(Counter)) as thread:
        door = SlowDoor()
        with pytest.raises(KeyboardInterrupt), BlockingHandle(thread, door):
            raise KeyboardInterrupt
        assert door.is_closing.is_set()
        late = BlockingHandle(thread, SlowDoor())
    late.__exit__(KeyboardInterrupt, None, None)


def test_after_an_interrupt_a_thread_ends_in_the_background(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thread_module, "CANCEL_SECONDS", 0.01)
    may_leave = threading.Event()

    class Slow(Counter):
        async def __aexit__(self, *_: object) -> None:
            await asyncio.to_thread(may_leave.wait)

    thread = LoopThread(Slow)
    thread.close(is_interrupted=True)
    assert thread in thread_module._OPEN
    thread_module._close_open()  # as at the end of the program
    assert thread in thread_module._OPEN
    may_leave.set()
    thread.close()
    assert thread not in thread_module._OPEN


# ---- cancelling calls from another thread ---------------------------------------------


def test_running_calls_are_cancelled_and_those_that_close_are_not() -> None:
    begun, may_end = threading.Event(), threading.Event()

    async def close_slowly() -> str:
        begun.set()
        while not may_end.is_set():
            await asyncio.sleep(0.001)
        return "closed"

    thread = LoopThread(Counter)
    try:
        with ThreadPoolExecutor(2) as threads:
            closing = threads.submit(thread.call_closing, close_slowly)
            waiting = threads.submit(thread.call, thread.value.wait_forever)
            assert begun.wait(scaled(DEFAULT_TIMEOUT))
            thread.value.entered.clear()
            while not waiting.done():
                thread.cancel_calls()
            with pytest.raises(Cancelled, match="cancelled by cancel_calls"):
                waiting.result()
            may_end.set()
            assert closing.result() == "closed"
        assert thread.call(thread.value.add) == 1
    finally:
        thread.close()


def test_a_callback_in_the_thread_may_cancel_calls_but_not_close() -> None:
    thread = LoopThread(Counter)

    async def cancel_self() -> None:
        thread.cancel_calls()
        await asyncio.Event().wait()

    async def close() -> None:
        thread.call_closing(thread.value.fail)

    try:
        with pytest.raises(Cancelled):
            thread.call(cancel_self)
        with pytest.raises(RuntimeError, match="a callback of the client must not call"):
            thread.call(close)
    finally:
        thread.close()
