"""A thread with an event loop, and what makes methods of the async client wait for it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent import futures
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar, cast

import uvloop

from exec_server.client.parties import be_one_party
from exec_server.errors import SessionLost

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")

# How long a call that was interrupted may take to clean up, which mostly is to kill a process.
CANCEL_SECONDS: Final = 10.0


# Those of environments that nobody has closed; a program that just ends would leave what it has
# started to run until the server gives up its session.
_OPEN: set[LoopThread[Any]] = set()


@atexit.register
def _close_open() -> None:
    for thread in list(_OPEN):
        thread.close()


class LoopThread(Generic[T]):
    """A thread whose event loop keeps an `async with` open and works for other threads."""

    value: T

    def __init__(
        self, make: Callable[[], AbstractAsyncContextManager[T]], *, has_children: bool = False
    ) -> None:
        """Begins at once; raises what entering the context raises.

        A context that starts programs must say so: uvloop cannot, in a thread, be closed safely
        after that.
        """
        self._make = make
        self._loop = asyncio.new_event_loop() if has_children else uvloop.new_event_loop()
        self._stop = asyncio.Event()
        self._opening: asyncio.Task[None] | None = None
        self._calls: asyncio.TaskGroup | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._opened: futures.Future[None] = futures.Future()
        self._thread = threading.Thread(target=self._run, name="exec-server", daemon=True)
        self._thread.start()
        _OPEN.add(self)
        try:
            self._opened.result()
        except BaseException:
            self.close()
            raise

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._live())
            except BaseException as error:  # an edge: it belongs to whoever opens this
                if not self._opened.done():
                    self._opened.set_exception(error)

    async def _live(self) -> None:
        self._opening = asyncio.current_task()
        async with self._make() as self.value, asyncio.TaskGroup() as calls:
            self._calls = calls
            self._opened.set_result(None)
            await self._stop.wait()
            self._calls = None
            for task in self._running:
                task.cancel()

    def call(
        self, work: Callable[P, Coroutine[Any, Any, A]], *args: P.args, **kwargs: P.kwargs
    ) -> A:
        """Have the loop do this, and wait for it.

        Raises SessionLost when the context has been left. An exception that comes while this
        waits cancels the work, and is raised when that has cleaned up.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("a callback of the client must not wait for the client")
        outcome: futures.Future[A] = futures.Future()
        begun: list[asyncio.Task[None]] = []

        def begin() -> None:
            if self._calls is None:
                outcome.set_exception(_closed())
                return
            task = self._calls.create_task(_settle(work(*args, **kwargs), outcome))
            begun.append(task)
            self._running.add(task)
            task.add_done_callback(self._running.discard)

        be_one_party()
        self._soon(begin)
        try:
            return outcome.result()
        except BaseException:
            if not outcome.done():
                self._soon(lambda: [task.cancel() for task in begun])
                futures.wait([outcome], CANCEL_SECONDS)
            raise

    def close(self) -> None:
        """Leave the context, ending calls under way, and end the thread."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("a callback of the client must not close the client")
        with contextlib.suppress(SessionLost):  # it is closed
            self._soon(self._end)
        self._thread.join()
        _OPEN.discard(self)

    def _end(self) -> None:
        self._stop.set()
        if not self._opened.done() and self._opening is not None:
            self._opening.cancel()

    def _soon(self, what: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError:  # the loop is closed
            raise _closed() from None


async def _settle(work: Awaitable[A], outcome: futures.Future[A]) -> None:
    try:
        result = await work
    except asyncio.CancelledError:
        outcome.set_exception(_closed())
        raise
    except BaseException as error:  # an edge: it belongs to whoever waits
        outcome.set_exception(error)
    else:
        outcome.set_result(result)


def _closed() -> SessionLost:
    return SessionLost("the environment was closed")


class Blocking(Generic[A]):
    """Something of the async client, used from outside of its loop."""

    def __init__(self, thread: LoopThread[Any], inner: A) -> None:
        self._thread = thread
        self._inner = inner


C = TypeVar("C", bound=AbstractAsyncContextManager[Any])


class BlockingContext(Blocking[C]):
    """The same for what is used with `async with` there, and with `with` here."""

    def __enter__(self) -> Self:
        self._thread.call(self._inner.__aenter__)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._thread.call(self._inner.__aexit__, kind, error, traceback)


def blocking(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """The same method, which waits."""

    @functools.wraps(method)
    def wait(self: Blocking[A], *args: P.args, **kwargs: P.kwargs) -> T:
        return self._thread.call(method, self._inner, *args, **kwargs)

    return cast(Callable[Concatenate[Any, P], T], wait)


def wrapped(
    method: Callable[Concatenate[A, P], T], kind: Callable[[LoopThread[Any], T], B]
) -> Callable[Concatenate[Any, P], B]:
    """The same method, whose result is used without `async` too."""

    @functools.wraps(method)
    def wrap(self: Blocking[A], *args: P.args, **kwargs: P.kwargs) -> B:
        return kind(self._thread, method(self._inner, *args, **kwargs))

    return cast(Callable[Concatenate[Any, P], B], wrap)


def iterate(thread: LoopThread[Any], inner: AsyncIterator[T], at_once: int = 1) -> Iterator[T]:
    """What an async iterator gives, several at a time so that the threads take fewer turns."""
    while batch := thread.call(_take, inner, at_once):
        yield from batch


async def _take(entries: AsyncIterator[T], count: int) -> list[T]:
    """The next few; none at the end."""
    batch: list[T] = []
    async for entry in entries:
        batch.append(entry)
        if len(batch) == count:
            break
    return batch
