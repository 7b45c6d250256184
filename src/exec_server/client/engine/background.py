"""Work that outlives the caller's cancellation: a task, and a future for its result."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def start(tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    """Start a task; cancelling the future ends it.

    The future has the result, which need not be retrieved.
    """
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    task = tasks.create_task(_settle(work, future))
    future.add_done_callback(lambda _: task.cancel())
    task.add_done_callback(lambda _: work.close())  # the task may end before it has run
    return future


def refuse(work: Coroutine[Any, Any, T], error: Exception) -> asyncio.Future[T]:
    """A future that has failed, for work that is not begun."""
    work.close()
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    future.exception()  # mark it as retrieved
    return future


def other_loop_error(noun: str) -> RuntimeError:
    """The error of a use in another event loop, where the caller would wait for ever."""
    return RuntimeError(
        f"this {noun} belongs to another event loop: connect in each loop, or use "
        "exec_server.sync, which works in all threads"
    )


async def _settle(work: Coroutine[Any, Any, T], future: asyncio.Future[T]) -> None:
    try:
        result = await work
    except asyncio.CancelledError:
        future.cancel()
        raise
    except Exception as error:  # an edge: the holder of the future gets it
        if not future.done():
            future.set_exception(error)
            future.exception()  # mark it as retrieved
    else:
        if not future.done():
            future.set_result(result)
