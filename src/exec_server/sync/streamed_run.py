"""run_streamed: a command whose output the calling thread receives while it waits.

`run(on_output=…)` calls back in the thread of the event loop. Notebooks assign output to a cell by
the thread that prints it, and a KeyboardInterrupt is raised in the main thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Final, Unpack

from exec_server.client import environment
from exec_server.client.paths import AnyPath
from exec_server.client.results import Chunk, Result
from exec_server.client.run_many import RunOptions
from exec_server.errors import SessionLost
from exec_server.sync.environment import Environment
from exec_server.sync.thread import CANCEL_SECONDS

# Output that waits for the calling thread; more would only make it later. The command waits then.
QUEUED_BYTES: Final = 1_048_576


def run_streamed(
    on: Environment,
    argv: Iterable[AnyPath],
    receive: Callable[[list[Chunk]], None],
    **options: Unpack[RunOptions],
) -> Result:
    """Run a command as `on.run` does; `receive` gets its output in this thread.

    An exception in this thread, of `receive` or a KeyboardInterrupt, kills the command.
    """
    thread, inner = on._thread, on._inner
    run = _StreamedRun(inner, list(argv), options)
    try:
        thread.call(run.start)
        while chunks := thread.call(run.take):
            receive(chunks)
        return thread.call(run.result)
    except BaseException:
        with contextlib.suppress(SessionLost):  # and the command with it
            thread.call(run.cancel)
        raise


class _StreamedRun:
    """A run on the event loop, and the output that was not taken yet."""

    def __init__(
        self, env: environment.Environment, argv: list[AnyPath], options: RunOptions
    ) -> None:
        self._env = env
        self._argv = argv
        self._options = options
        self._future: asyncio.Future[Result] | None = None
        self._chunks: list[Chunk] = []
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()

    async def start(self) -> None:
        self._future = self._env.session.spawn(self._run())
        self._future.add_done_callback(lambda _: self._changed.set())

    async def _run(self) -> Result:
        options: RunOptions = {**self._options, "on_output": self._queue}
        try:
            return await self._env.run(self._argv, **options)
        finally:
            self._ended.set()

    async def _queue(self, chunk: Chunk) -> None:
        while sum(len(each.data) for each in self._chunks) >= QUEUED_BYTES:
            self._changed.clear()
            await self._changed.wait()
        self._chunks.append(chunk)
        self._changed.set()

    async def take(self) -> list[Chunk]:
        """The next output; empty if the command has ended."""
        assert self._future is not None
        while not self._chunks and not self._future.done():
            self._changed.clear()
            await self._changed.wait()
        taken, self._chunks = self._chunks, []
        self._changed.set()
        return taken

    async def result(self) -> Result:
        assert self._future is not None
        return await self._future

    async def cancel(self) -> None:
        """Kill the command if it runs; an unreachable server cannot be told so."""
        if self._future is None or self._future.done():
            return
        self._future.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_SECONDS):
                await self._ended.wait()
