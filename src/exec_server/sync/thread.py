"""LoopThread, a thread with an event loop, and decorators that make async methods blocking."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent import futures
from contextlib import AbstractAsyncContextManager
from typing import (
    Any,
    Concatenate,
    Final,
    Generic,
    ParamSpec,
    Self,
    TypeVar,
    cast,
    get_args,
    overload,
)

from exec_server.client.engine.flow_control import share_consumer
from exec_server.client.handle import Handle
from exec_server.errors import Cancelled, ExecServerError, SessionLost
from exec_server.host import event_loop
from exec_server.host.event_loop import ForkGuard

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")

# How long an interrupted call waits for its clean-up, which usually is to kill a process and takes
# milliseconds. The clean-up of an unreachable server goes on in the background.
CANCEL_SECONDS: Final = 1.0
# Python misses a signal that arrives just before the main thread blocks; it raises
# KeyboardInterrupt when the thread runs again.
WAKE_UP_SECONDS: Final = 0.5

_CLOSED: Final = "the environment was closed"


# The threads of open environments. A program that exits without closing them would leave its
# processes running until the server gives up the session.
_OPEN: set[LoopThread[Any]] = set()


@atexit.register
def _close_open() -> None:
    for thread in list(_OPEN):
        thread.close(is_interrupted=thread.is_interrupted)


class _Call(Generic[A]):
    """A coroutine that a loop runs for another thread, and the future which that waits for."""

    def __init__(self, coroutine: Coroutine[Any, Any, A]) -> None:
        self.coroutine = coroutine
        self.outcome: futures.Future[A] = futures.Future()
        self.task: asyncio.Task[None] | None = None
        self.is_closing = False  # it is not cancelled by other threads
        self._reason: ExecServerError | None = None  # for which it was cancelled

    async def run(self) -> None:
        try:
            result = await self.coroutine
        except asyncio.CancelledError:
            self.fail(self._reason or SessionLost(_CLOSED))
            raise
        except BaseException as error:  # an edge: the calling thread raises it
            self.fail(error)
        else:
            if not self.outcome.done():
                self.outcome.set_result(result)

    def fail(self, error: BaseException) -> None:
        _set_exception(self.outcome, error)

    def cancel(self, reason: ExecServerError | None = None) -> None:
        if self.task is not None:
            self._reason = reason
            self.task.cancel()

    def end(self, error: SessionLost) -> None:
        """The task has ended, perhaps without having run."""
        self.coroutine.close()
        self.fail(self._reason or error)


def _set_exception(outcome: futures.Future[Any], error: BaseException) -> None:
    if not outcome.done():
        outcome.set_exception(error)


def _wait(outcome: futures.Future[A]) -> A:
    while True:
        try:
            return outcome.result(WAKE_UP_SECONDS)
        except TimeoutError:
            if outcome.done():
                return outcome.result()  # raises the exception of the call, if that is its own


class LoopThread(Generic[T]):
    """A thread whose event loop keeps an `async with` open and works for other threads."""

    value: T

    def __init__(
        self, make: Callable[[], AbstractAsyncContextManager[T]], *, has_children: bool = False
    ) -> None:
        """Start the thread and enter the context; raises the exception of entering it.

        `has_children` must be set for a context that starts programs: a uvloop that did so
        outside of the main thread cannot be closed safely.
        """
        self._fork = ForkGuard()
        self._make = make
        new_loop = asyncio.new_event_loop if has_children else event_loop.new_event_loop_for_forks
        self._loop = new_loop()
        self._stop = asyncio.Event()
        self._opening: asyncio.Task[None] | None = None
        self._calls: asyncio.TaskGroup | None = None
        self._running: set[_Call[Any]] = set()
        # The outcomes that other threads wait for. None when the loop has ended.
        self._waiting: set[futures.Future[Any]] | None = set()
        self._lock = threading.Lock()  # guards `_waiting`
        self._failure: BaseException | None = None
        self.is_interrupted = False  # it was closed because of Ctrl-C
        self._opened: futures.Future[None] = futures.Future()
        self._thread = threading.Thread(target=self._run, name="exec-server", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # there are too many threads
            self._loop.close()
            raise
        _OPEN.add(self)
        try:
            _wait(self._opened)
        except BaseException:
            self.close()
            raise

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                try:
                    runner.run(self._main())
                except BaseException as error:  # an edge: the waiting threads raise it
                    self._fail_waiting(error)
        except BaseException as error:  # an edge: the clean-up has failed
            self._fail_waiting(error)
        finally:
            with self._lock:
                left, self._waiting = self._waiting or set(), None
            for outcome in left:  # their calls came too late for the loop
                _set_exception(outcome, self._closed())

    def _fail_waiting(self, error: BaseException) -> None:
        """Let every waiting thread raise an exception that has stopped the loop."""
        self._calls = None
        self._failure = self._failure or error
        _set_exception(self._opened, error)
        with self._lock:
            waiting = tuple(self._waiting or ())
        for outcome in waiting:
            _set_exception(outcome, error)

    async def _main(self) -> None:
        self._opening = asyncio.current_task()
        async with self._make() as self.value, asyncio.TaskGroup() as calls:
            self._calls = calls
            self._opened.set_result(None)
            await self._stop.wait()
            self._calls = None
            for call in self._running:
                call.cancel()

    def call(
        self, work: Callable[P, Coroutine[Any, Any, A]], *args: P.args, **kwargs: P.kwargs
    ) -> A:
        """Run a coroutine on the loop and wait; wrong arguments raise TypeError here.

        Raises SessionLost if the context was left, RuntimeError in the child of a fork. An
        exception here, such as KeyboardInterrupt, cancels the coroutine and is raised after its
        clean-up, or after CANCEL_SECONDS.
        """
        self._fork.check()
        if threading.current_thread() is self._thread:
            raise RuntimeError("a callback of the client must not call the client")
        # The coroutine is made in this thread: so Python checks the arguments before anything
        # else, and the exception has the caller's traceback.
        return self._finish(_Call(work(*args, **kwargs)))

    def call_closing(self, work: Callable[[], Coroutine[Any, Any, A]]) -> A:
        """The same for a coroutine that closes something: `cancel_calls` leaves it alone."""
        self._fork.check()
        if threading.current_thread() is self._thread:
            raise RuntimeError("a callback of the client must not call the client")
        call = _Call(work())
        call.is_closing = True
        return self._finish(call)

    def _finish(self, call: _Call[A]) -> A:
        share_consumer()
        try:
            self._register(call)
            self._start_soon(call)
            return _wait(call.outcome)
        except BaseException:
            if not call.outcome.done():
                with contextlib.suppress(SessionLost):  # the loop has ended
                    self._call_soon(call.cancel)
                    futures.wait([call.outcome], CANCEL_SECONDS)
            if call.task is None and call.outcome.done():
                call.coroutine.close()  # it was never started
            raise
        finally:
            with self._lock:
                if self._waiting is not None:
                    self._waiting.discard(call.outcome)

    async def call_from_loop(
        self, work: Callable[P, Coroutine[Any, Any, A]], *args: P.args, **kwargs: P.kwargs
    ) -> A:
        """The same for a coroutine of another loop, which does not block; cancelling cancels."""
        self._fork.check()
        call = _Call(work(*args, **kwargs))
        try:
            self._register(call)
            self._call_soon(lambda: self._start(call))
            return await asyncio.wrap_future(call.outcome)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                with contextlib.suppress(SessionLost):  # the loop has ended
                    self._call_soon(call.cancel)
            elif call.task is None:
                call.coroutine.close()  # it was never started
            raise
        finally:
            with self._lock:
                if self._waiting is not None:
                    self._waiting.discard(call.outcome)

    def _register(self, call: _Call[Any]) -> None:
        """Make sure that the call gets an exception if the loop ends; raises SessionLost."""
        with self._lock:
            if self._waiting is not None:
                self._waiting.add(call.outcome)
                return
        error = self._closed()
        call.fail(error)
        raise error

    def _start_soon(self, call: _Call[Any]) -> None:
        try:
            self._call_soon(lambda: self._start(call))
        except SessionLost as error:
            call.fail(error)  # it will never start
            raise

    def _start(self, call: _Call[Any]) -> None:
        """Start a call, in the thread of the loop."""
        try:
            if self._calls is None:
                raise self._closed()
            call.task = self._calls.create_task(call.run())
        except BaseException as error:  # an edge: the calling thread raises it
            call.coroutine.close()
            call.fail(error)
            return
        self._running.add(call)
        call.task.add_done_callback(lambda _: self._running.discard(call))
        # A task that is cancelled before its first step does not run at all.
        call.task.add_done_callback(lambda _: call.end(self._closed()))

    def cancel_calls(self) -> None:
        """Cancel the running calls of all threads, which raise Cancelled after their clean-up."""
        self._fork.check()
        self._call_soon(self._cancel_running)

    def _cancel_running(self) -> None:
        for call in self._running:
            if not call.is_closing:
                call.cancel(Cancelled("the call was cancelled by cancel_calls()"))

    def close(self, *, is_interrupted: bool = False) -> None:
        """Leave the context, cancelling running calls, and end the thread.

        After Ctrl-C (`is_interrupted`) it takes CANCEL_SECONDS at most. A fork's child leaves all
        this to its parent.
        """
        if self._fork.is_forked:
            _OPEN.discard(self)
            return
        if threading.current_thread() is self._thread:
            raise RuntimeError("a callback of the client must not close the client")
        self.is_interrupted = self.is_interrupted or is_interrupted
        with contextlib.suppress(SessionLost):  # closed before
            self._call_soon(self._request_stop)
        self._thread.join(CANCEL_SECONDS if is_interrupted else None)
        if not self._thread.is_alive():
            _OPEN.discard(self)

    @property
    def is_forked(self) -> bool:
        """Whether this is the child of a fork, which has no such thread."""
        return self._fork.is_forked

    def _request_stop(self) -> None:
        self._stop.set()
        if not self._opened.done() and self._opening is not None:
            self._opening.cancel()

    def _call_soon(self, callback: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop is closed
            raise self._closed() from None

    def _closed(self) -> SessionLost:
        if self._failure is None or isinstance(self._failure, asyncio.CancelledError):
            return SessionLost(_CLOSED)
        return SessionLost(f"the thread of the environment has failed: {self._failure!r}")


class Blocking(Generic[A]):
    """An object of the async client, used by other threads than that of its loop."""

    def __init__(self, thread: LoopThread[Any], inner: A) -> None:
        self._thread = thread
        self._inner = inner

    def __repr__(self) -> str:
        return repr(self._inner).replace("<", "<sync.", 1)


class Attribute(Generic[T]):
    """An attribute of the async object with the same name, which any thread may read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        for base in getattr(owner, "__orig_bases__", ()):
            for original in get_args(base):
                self.__doc__ = inspect.getdoc(getattr(original, name, None))

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: Blocking[Any], owner: type) -> T: ...

    def __get__(self, instance: Blocking[Any] | None, owner: type) -> Self | T:
        if instance is None:
            return self
        value: T = getattr(instance._inner, self._name)
        return value

    def __set__(self, instance: Blocking[Any], value: object) -> None:
        raise AttributeError(f"{self._name} cannot be set")


H = TypeVar("H", bound=Handle)


class BlockingHandle(Blocking[H]):
    """A wrapper for an open handle, for `with` or `close`."""

    def __init__(self, thread: LoopThread[Any], inner: H) -> None:
        """Open the handle now."""
        super().__init__(thread, inner)
        try:
            thread.call(inner.__aenter__)
        except BaseException:
            if inner.is_open:  # interrupted in the moment after that
                self._abandon()
            raise

    def _abandon(self) -> None:
        """Close a handle that the caller does not get."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not KeyboardInterrupt or self._thread.is_forked:
            self.close()
            return
        with contextlib.suppress(SessionLost):  # the environment was closed
            self._thread.call_closing(self._close_soon)

    async def _close_soon(self) -> None:
        """Close within CANCEL_SECONDS, or leave that to the background."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_SECONDS):
                await self._inner.aclose()

    def close(self) -> None:
        """Close, as leaving the block does; closing the environment does it, too.

        The child of a fork leaves that to its parent.
        """
        if self._thread.is_forked:
            return
        with contextlib.suppress(SessionLost):  # the environment was closed
            self._thread.call_closing(self._inner.aclose)

    is_open = Attribute[bool]()


def blocking(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """The method as a blocking one."""

    @functools.wraps(method)
    def call(self: Blocking[A], *args: P.args, **kwargs: P.kwargs) -> T:
        return self._thread.call(method, self._inner, *args, **kwargs)

    return cast(Callable[Concatenate[Any, P], T], call)


def wrapped(
    method: Callable[Concatenate[A, P], T], kind: Callable[[LoopThread[Any], T], B]
) -> Callable[Concatenate[Any, P], B]:
    """The method with its result wrapped for use without `async`."""

    @functools.wraps(method)
    def wrap(self: Blocking[A], *args: P.args, **kwargs: P.kwargs) -> B:
        return kind(self._thread, method(self._inner, *args, **kwargs))

    return cast(Callable[Concatenate[Any, P], B], wrap)


def iterate(thread: LoopThread[Any], inner: AsyncIterator[T], batch_size: int = 1) -> Iterator[T]:
    """Iterate over an async iterator; a larger batch needs fewer thread switches."""
    while batch := thread.call(_take, inner, batch_size):
        yield from batch


async def _take(entries: AsyncIterator[T], count: int) -> list[T]:
    batch: list[T] = []
    async for entry in entries:
        batch.append(entry)
        if len(batch) == count:
            break
    return batch
