"""GuardedTasks: tasks of one TaskGroup that cannot end each other.

A TaskGroup cancels all its tasks when an exception leaves one of them. The tasks of a server belong
to different clients, so each of them runs behind a guard: an exception that leaves it is logged
with its traceback, and the owner of the task is told.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)

# These pass a guard: the first is the normal end of a task that is not wanted any more, the others
# end the program or the coroutine. All other exceptions are caught, because a panic of a library
# that is written in Rust (cryptography) is a BaseException too.
_PASSED = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)


class GuardedTasks:
    """Creates tasks on a group, which its creator has entered and which nothing else uses."""

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
    """Call a function on behalf of one client among several; False if it raised, which is logged.

    For loops over clients and for steps of a clean-up: those that follow are reached in any case.
    """
    try:
        function(*arguments)
    except _PASSED:
        raise
    except BaseException:
        log.exception("a callback failed unexpectedly")
        return False
    return True
