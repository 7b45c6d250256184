"""The event loop of this platform: uvloop where it is installed, else that of asyncio.

pyproject.toml installs uvloop on Linux. It is imported on first use.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Coroutine
from typing import Any, TypeVar

from exec_server.host.threads import ThreadPool

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
            thread = ThreadPool(1, "lookup")
            try:
                return await thread.run(socket.getaddrinfo, host, port, family, type, proto, flags)
            finally:
                thread.close()

    return Loop


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a new event loop and return its result, as asyncio.run does."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)
