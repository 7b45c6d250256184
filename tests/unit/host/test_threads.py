"""ThreadPool: results, failures, limits, and its closing."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from tests.support.forked import in_own_process

from exec_server.errors import StartupError
from exec_server.host.threads import ThreadPool, start_lookup_threads


def _run(body: Callable[[ThreadPool], Coroutine[Any, Any, None]], limit: int = 2) -> None:
    async def main() -> None:
        threads = ThreadPool(limit, "test")
        try:
            await asyncio.wait_for(body(threads), 30)
        finally:
            threads.close()
            await _ended()

    asyncio.run(main())


def _alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("test_")]


async def _ended() -> None:
    async with asyncio.timeout(10):
        while _alive():
            await asyncio.sleep(0.01)


def test_result_and_failure_come_back() -> None:
    async def body(threads: ThreadPool) -> None:
        assert await threads.run(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await threads.run(divmod, 1, 0)
        with pytest.raises(SystemExit):
            await threads.run(_leave)
        assert await threads.run(threading.get_ident) != threading.get_ident()

    _run(body)


def _leave() -> None:
    raise SystemExit(3)


def test_one_after_the_other_needs_one_thread() -> None:
    async def body(threads: ThreadPool) -> None:
        assert _alive() == []
        for _ in range(20):
            await threads.run(int)
        assert _alive() == ["test_1"]

    _run(body, limit=8)


# ---- at the process limit -------------------------------------------------------------


@pytest.fixture
def process_limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to reach the limit: no thread starts any more."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    return lambda: monkeypatch.setattr(threading.Thread, "start", start)


def test_threads_can_be_started_before_they_are_needed() -> None:
    async def main() -> None:
        threads = ThreadPool(3, "test", started=2)
        assert _alive() == ["test_1", "test_2"]
        futures = [threads.run(int, "7") for _ in range(5)]
        assert [await future for future in futures] == [7] * 5
        threads.close()
        await _ended()

    asyncio.run(main())


def test_started_threads_do_all_the_work_at_the_process_limit(
    process_limit: Callable[[], None],
) -> None:
    async def main() -> None:
        threads = ThreadPool(3, "test", started=1)
        process_limit()
        futures = [threads.run(int, "7") for _ in range(5)]
        assert [await future for future in futures] == [7] * 5
        assert _alive() == ["test_1"]
        threads.close()
        await _ended()

    asyncio.run(main())


def test_without_any_thread_the_process_limit_is_an_error_until_it_is_lifted(
    process_limit: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(threads: ThreadPool) -> None:
        process_limit()
        with pytest.raises(OSError, match="Resource temporarily unavailable") as caught:
            await threads.run(int)
        assert caught.value.errno == errno.EAGAIN
        monkeypatch.undo()
        assert await threads.run(int, "7") == 7

    _run(body)


def test_pool_that_cannot_start_its_threads_is_a_startup_error(
    process_limit: Callable[[], None],
) -> None:
    async def main() -> None:
        process_limit()
        with pytest.raises(StartupError, match="process limit"):
            ThreadPool(1, "test", started=1)

    asyncio.run(main())


@in_own_process
def test_lookup_threads_are_few_and_started_at_once() -> None:
    async def main() -> None:
        before = len(os.listdir("/proc/self/task"))
        await start_lookup_threads()
        assert len(os.listdir("/proc/self/task")) == before + 2

    uvloop.run(main())
    assert "UV_THREADPOOL_SIZE" not in os.environ


# ---- limits and cancellation ----------------------------------------------------------


def test_not_more_than_the_limit_at_a_time() -> None:
    running = 0
    most = 0
    lock = threading.Lock()
    full = threading.Event()

    def job() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if running == 3:
                full.set()
        assert full.wait(10)
        with lock:
            running -= 1

    async def body(threads: ThreadPool) -> None:
        for future in [threads.run(job) for _ in range(20)]:
            await future
        assert most == 3

    _run(body, limit=3)


def test_what_was_cancelled_before_it_began_is_not_done() -> None:
    done: list[int] = []
    go_on = threading.Event()

    async def body(threads: ThreadPool) -> None:
        first = threads.run(go_on.wait, 10)
        second = threads.run(done.append, 2)
        third = threads.run(done.append, 3)
        second.cancel()
        go_on.set()
        await first
        await third
        assert done == [3]

    _run(body, limit=1)


def test_cancelling_what_runs_leaves_it_alone() -> None:
    begun = threading.Event()
    go_on = threading.Event()
    done = threading.Event()

    def job() -> None:
        begun.set()
        assert go_on.wait(10)
        done.set()

    async def body(threads: ThreadPool) -> None:
        running = threads.run(job)
        assert await threads.run(begun.wait, 10)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        go_on.set()
        assert await threads.run(done.wait, 10)

    _run(body, limit=2)


def test_nothing_is_kept_of_what_is_done() -> None:
    class Large:
        pass

    async def body(threads: ThreadPool) -> None:
        large = Large()
        gone = weakref.ref(large)
        assert await threads.run(type, large) is Large
        del large
        for _ in range(100):
            gc.collect()
            if gone() is None:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("a thread holds what it has done")

    _run(body)


def test_close_begins_nothing_more_and_ends_the_threads() -> None:
    begun = threading.Event()
    go_on = threading.Event()
    done: list[int] = []

    def job() -> bool:
        begun.set()
        return go_on.wait(10)

    async def body(threads: ThreadPool) -> None:
        first = threads.run(job)
        second = threads.run(done.append, 2)
        assert begun.wait(10)
        threads.close()
        threads.close()
        assert second.cancelled()
        assert threads.run(done.append, 3).cancelled()
        go_on.set()
        assert await first
        await _ended()
        assert done == []

    _run(body, limit=1)


def test_loop_may_be_gone_before_a_job_is_done() -> None:
    begun = threading.Event()
    go_on = threading.Event()
    left: list[threading.Thread] = []

    def job() -> None:
        begun.set()
        go_on.wait(10)

    async def main() -> None:
        threads = ThreadPool(1, "test")
        threads.run(job)
        assert begun.wait(10)
        left.extend(thread for thread in threading.enumerate() if thread.name == "test_1")
        threads.close()

    failures: list[object] = []
    before, threading.excepthook = threading.excepthook, failures.append
    try:
        asyncio.run(main())
        go_on.set()
        left[0].join(10)
    finally:
        threading.excepthook = before
    assert not left[0].is_alive()
    assert failures == []
