"""The event loop of this platform: uvloop where it is installed, else that of asyncio.

pyproject.toml installs uvloop on Linux. It is imported on first use.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import threading
from collections.abc import Coroutine
from concurrent import futures
from typing import Any, TypeVar

T = TypeVar("T")


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A new event loop, for asyncio.Runner."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def new_event_loop_for_forks() -> asyncio.AbstractEventLoop:
    """A new event loop for a program that may fork.

    uvloop looks up names in threads of libuv, which the exit of a forked child would join. They are
    not in the child, and joining them is a segmentation fault.
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
    found: futures.Future[Any] = futures.Future()
    found.set_running_or_notify_cancel()

    def work() -> None:
        try:
            found.set_result(socket.getaddrinfo(*arguments))
        except BaseException as error:  # an edge: the waiting task raises it
            found.set_exception(error)

    threading.Thread(target=work, name="lookup", daemon=True).start()
    return found


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a new event loop and return its result, as asyncio.run does."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)
