"""ThreadPool: runs blocking functions in threads and returns their results to the event loop.

Hand-written because `concurrent.futures` takes several locks per job, to serve any thread and
several loops: it is 2.5 times slower in sequence, 6 times pipelined (`python -m
bench.alternatives`), and many jobs here are as short as that.
"""

from __future__ import annotations

import asyncio
import errno
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

from exec_server.errors import StartupError

T = TypeVar("T")

# Threads that libuv starts for lookups of host names; its own default is 4.
_LOOKUP_THREADS = 2

_Job = tuple[asyncio.Future[Any], Callable[..., Any], tuple[object, ...]]

# Descriptors that wait to be closed; further ones are closed by the caller, which is then as fast
# as the disk. A sixteenth of the descriptors that an ordinary process may have.
MAX_UNCLOSED: Final = 64


class ThreadPool:
    """At most `limit` daemon threads for one event loop: `started` ones at once, others on demand.

    At the process limit of the user or cgroup, the pool works with the threads it has. One that
    hangs on a dead disk does not keep the process from exiting.
    """

    def __init__(self, limit: int, name: str, *, started: int = 0) -> None:
        self._loop: Final = asyncio.get_running_loop()
        self._limit = limit
        self._name = name
        # Unbounded here: connections limit their requests under way.
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._started = 0
        self._unfinished = 0
        self._closed = False
        for _ in range(started):
            if not self._start_thread():
                self.close()
                raise StartupError("cannot start a thread: the process limit is reached")

    def run(self, function: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        """Call a function in a thread. Cancelling the future skips the call if it has not begun."""
        future: asyncio.Future[T] = self._loop.create_future()
        if self._closed:
            future.cancel()
            return future
        if self._unfinished >= self._started and self._started < self._limit:
            self._start_thread()
        if not self._started:
            future.set_exception(OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)))
            return future
        self._unfinished += 1
        self._jobs.put((future, function, arguments))
        return future

    def _start_thread(self) -> bool:
        name = f"{self._name}_{self._started + 1}"
        try:
            threading.Thread(target=self._work, name=name, daemon=True).start()
        except RuntimeError:  # the process limit is reached
            return False
        self._started += 1
        return True

    def close(self) -> None:
        """Stop accepting jobs and cancel queued ones; do not join the threads."""
        if not self._closed:
            self._closed = True
            with suppress(queue.Empty):
                while (job := self._jobs.get_nowait()) is not None:
                    job[0].cancel()
            for _ in range(self._started):
                self._jobs.put(None)

    def _work(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            while (job := self._jobs.get()) is not None:
                self._loop.call_soon_threadsafe(self._finish, job[0], *_outcome(*job))
                del job  # frees its arguments before the wait for the next job

    def _finish(
        self, future: asyncio.Future[T], result: T | None, error: BaseException | None
    ) -> None:
        self._unfinished -= 1
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]  # without an error it is a T
        else:
            future.set_exception(error)


def _outcome(
    future: asyncio.Future[T], function: Callable[..., T], arguments: tuple[object, ...]
) -> tuple[T | None, BaseException | None]:
    if future.cancelled():
        return None, None
    try:
        return function(*arguments), None
    except BaseException as error:  # re-raised by the future
        return None, error


async def start_lookup_threads() -> None:
    """Start uvloop's lookup threads: at the process limit libuv would abort at the first lookup."""
    name = "UV_THREADPOOL_SIZE"
    is_configured = name in os.environ
    if not is_configured:
        os.putenv(name, str(_LOOKUP_THREADS))  # not os.environ, which children may inherit
    try:
        # Bytes, because the codec for text takes a megabyte.
        await asyncio.get_running_loop().getaddrinfo(b"127.0.0.1", 0)
    finally:
        if not is_configured:
            os.unsetenv(name)


class BackgroundCloser:
    """Closes descriptors of removed files in a thread, started by the first one. Thread-safe.

    The last close deletes the file; on ext4 that waits for the disk.
    """

    def __init__(self) -> None:
        self._unclosed: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards _is_started
        self._is_started = False

    def close(self, descriptor: int) -> None:
        """Close a descriptor soon: at once if there is no thread, or too much for it to do."""
        if self._unclosed.qsize() < MAX_UNCLOSED and self._start():
            self._unclosed.put(descriptor)
        else:
            os.close(descriptor)

    def _start(self) -> bool:
        with self._lock:
            if not self._is_started:
                thread = threading.Thread(target=self._run, name="closer", daemon=True)
                with suppress(RuntimeError):  # no thread can be started now
                    thread.start()
                    self._is_started = True
            return self._is_started

    def _run(self) -> None:
        while True:
            with suppress(OSError):  # an error of the disk; the descriptor is closed
                os.close(self._unclosed.get())
