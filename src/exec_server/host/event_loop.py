"""The event loop (uvloop where installed), tasks that cannot end each other, and fork checks."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent import futures
from typing import Any, Final, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)

# These pass a guard: the first is the normal end of a task that is not wanted any more, the others
# end the program or the coroutine. All other exceptions are caught, because a panic of a library
# that is written in Rust (cryptography) is a BaseException too.
_PASSED = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)

_forks: Final = [0]  # how often the process was forked, counted in the child


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A new event loop, for asyncio.Runner."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def new_event_loop_for_forks() -> asyncio.AbstractEventLoop:
    """A new event loop for a program that may fork.

    uvloop looks up names in threads of libuv. A forked child has none, and joining them at its exit
    is a segmentation fault.
    """
    try:
        return _loop_for_forks()()
    except ImportError:
        return asyncio.new_event_loop()


@functools.cache
def _loop_for_forks() -> type[asyncio.AbstractEventLoop]:
    import uvloop

    class Loop(uvloop.Loop):
        async def getaddrinfo(
            self,
            host: Any,
            port: Any,
            *,
            family: int = 0,
            type: int = 0,  # noqa: A002 - the name in asyncio
            proto: int = 0,
            flags: int = 0,
        ) -> Any:
            return await asyncio.wrap_future(_look_up(host, port, family, type, proto, flags))

    return Loop


def _look_up(*arguments: Any) -> futures.Future[Any]:
    """Call socket.getaddrinfo in a thread, which does not delay the exit of the program."""
    answer: futures.Future[Any] = futures.Future()
    answer.set_running_or_notify_cancel()

    def work() -> None:
        try:
            answer.set_result(socket.getaddrinfo(*arguments))
        except BaseException as error:  # an edge: the waiting task raises it
            answer.set_exception(error)

    threading.Thread(target=work, name="lookup", daemon=True).start()
    return answer


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a new event loop and return its result, as asyncio.run does."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


class GuardedTasks:
    """Creates tasks on a group, which its creator has entered and which nothing else uses.

    A server's tasks belong to different clients, so an exception that leaves one is logged, and the
    owner of the task told, instead of cancelling all.
    """

    __slots__ = ("_group", "_tasks")

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._tasks: set[asyncio.Task[None]] = set()

    def create_task(
        self, coroutine: Coroutine[Any, Any, None], on_failure: Callable[[], None] | None = None
    ) -> asyncio.Task[None]:
        """Run a coroutine; `on_failure` is called after an exception has left it."""
        task = self._group.create_task(_guarded(coroutine, on_failure))
        self._tasks.add(task)

        def on_done(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            coroutine.close()  # a task that is cancelled before its first step never awaits it

        task.add_done_callback(on_done)
        return task

    async def finish(self, seconds: float) -> None:
        """Wait for all tasks, and cancel those that take longer: their owners have failed."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        for task in tuple(self._tasks):
            log.error("%r did not end by itself", task.get_coro())
            task.cancel()


async def _guarded(
    coroutine: Coroutine[Any, Any, None], on_failure: Callable[[], None] | None
) -> None:
    try:
        await coroutine
    except _PASSED:
        raise
    except BaseException:
        log.exception("a task failed unexpectedly")
        if on_failure is not None:
            guarded_call(on_failure)


def guarded_call(function: Callable[..., object], *arguments: object) -> bool:
    """Call a function for one client among several; False if it raised, which is logged."""
    try:
        function(*arguments)
    except _PASSED:
        raise
    except BaseException:
        log.exception("a callback failed unexpectedly")
        return False
    return True


def _count() -> None:
    _forks[0] += 1


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_count)


class ForkGuard:
    """Remembers its process: a forked child must not use its parent's connections and threads."""

    def __init__(self) -> None:
        self._forks = _forks[0]

    @property
    def is_forked(self) -> bool:
        """Whether this is the child of a fork since then."""
        return self._forks != _forks[0]

    def check(self) -> None:
        """Raise RuntimeError in the child of a fork."""
        if self.is_forked:
            raise RuntimeError(
                "this connection belongs to the parent of this process: connect again after a fork"
            )
