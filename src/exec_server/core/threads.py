"""Threads for what may block, and how their results get back to the event loop.

`concurrent.futures` does the same for many loops and any thread. For one loop it can be had with
one queue and without a lock, in a third of the time; most file operations take less than that.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

T = TypeVar("T")

_Job = tuple[asyncio.Future[Any], Callable[..., Any], tuple[object, ...]]


class Threads:
    """At most `limit` threads, started as they are needed; to be used from one event loop.

    They do not keep the process from ending: one of them may hang on a dead disk.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._loop: Final = asyncio.get_running_loop()
        self._limit = limit
        self._name = name
        # Not limited here: connections limit what they have under way.
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._started = 0
        self._unfinished = 0
        self._is_closed = False

    def run(self, function: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        """Call it in a thread. Cancelling the future keeps it from beginning, if it has not."""
        future: asyncio.Future[T] = self._loop.create_future()
        if self._is_closed:
            future.cancel()
            return future
        self._unfinished += 1
        if self._unfinished > self._started and self._started < self._limit:
            self._started += 1
            name = f"{self._name}_{self._started}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
        self._jobs.put((future, function, arguments))
        return future

    def close(self) -> None:
        """Begin nothing more, and wait for nothing."""
        if not self._is_closed:
            self._is_closed = True
            with suppress(queue.Empty):
                while (job := self._jobs.get_nowait()) is not None:
                    job[0].cancel()
            for _ in range(self._started):
                self._jobs.put(None)

    def _work(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody wants to know
            while (job := self._jobs.get()) is not None:
                self._loop.call_soon_threadsafe(self._finish, job[0], *_outcome(*job))
                del job  # it may hold much, and the next one may be long in coming

    def _finish(
        self, future: asyncio.Future[T], result: T | None, error: BaseException | None
    ) -> None:
        self._unfinished -= 1
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]  # of the function, so it is a T
        else:
            future.set_exception(error)


def _outcome(
    future: asyncio.Future[T], function: Callable[..., T], arguments: tuple[object, ...]
) -> tuple[T | None, BaseException | None]:
    if future.cancelled():
        return None, None
    try:
        return function(*arguments), None
    except BaseException as error:  # an edge: it belongs to whoever waits
        return None, error
