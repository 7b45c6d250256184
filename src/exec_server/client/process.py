"""Process: one command on the server while it runs, with its output as it comes.

Output waits in a queue until somebody takes it. A queue that is full stops the reading from the
server, except while somebody waits for an answer (see `traffic`). What comes in that way may take
sixteen times the room; beyond that notifications are ignored, and when there is room again the
server is asked for what it still has. Only then can output be lost, and `lost_bytes` says so.
"""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from types import TracebackType
from typing import Final, Self

from exec_server.client.input import ProcessInput
from exec_server.client.parties import Party, reading_party
from exec_server.client.processes import KILL_SECONDS, Feed, Processes
from exec_server.client.results import Chunk
from exec_server.client.traffic import Traffic
from exec_server.errors import (
    ExecServerError,
    InvalidParams,
    ProcessLost,
    StdinClosed,
    Unsupported,
)
from exec_server.protocol.process import (
    RESIZE,
    SIGNAL,
    ExitedParams,
    OutputParams,
    ProcessId,
    ResizeParams,
    Signal,
    SignalParams,
    StartParams,
)
from exec_server.protocol.sandbox import Denial
from exec_server.protocol.session import Capabilities

# Weights of a queue, which are the bytes and what a chunk costs beside them: reading stops, goes
# on, and must not go on whoever waits.
FULL_BYTES: Final = 1_048_576
FREE_BYTES: Final = 262_144
BURSTING_BYTES: Final = 16 * 1_048_576
CHUNK_COST: Final = 256


class Process:
    """A command that runs, for `async with`; leaving that kills it with all its descendants.

    Iterating gives its output in order, and ends with it. Raises SessionLost or ProcessLost if
    it cannot be known how it goes on.
    """

    def __init__(
        self,
        traffic: Traffic,
        processes: Processes,
        capabilities: Capabilities,
        params: StartParams,
        *,
        argv: tuple[str, ...],
        name: str,
    ) -> None:
        """`params` are those of the start, except for the id.

        `name` is what it is called if it cannot be started.
        """
        self.argv = argv
        self._name = name
        self.exit_code: int | None = None
        self.sandbox_denied = False
        self.sandbox_denial: Denial | None = None
        self.lost_bytes = 0
        self._traffic = traffic
        self._processes = processes
        self._capabilities = capabilities
        self._params = params
        self._feed: Feed | None = None
        self._input: ProcessInput | None = None
        self._queue: deque[Chunk] = deque()
        self._weight = 0
        self._unread_gap = 0
        self._is_closed = False
        self._is_abandoned = False
        self._reader: Party | None = None
        self._failure: ExecServerError | None = None
        self._news = asyncio.Event()

    # ---- its life ---------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._feed is not None:
            raise RuntimeError("a process can be entered only once: start another instead")
        feed = self._feed = self._processes.open(self)
        is_terminal = self._params.tty
        if is_terminal or self._params.pipe_stdin:
            self._input = ProcessInput(self._traffic, feed.id, is_terminal=is_terminal)
        try:
            await self._processes.start(feed, self._params, self._name)
        except BaseException:
            if feed.may_run:
                self._processes.kill(feed)
            self._let_go(feed)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        feed = self._entered()
        self._abandon()
        try:
            if not self.is_over:
                async with asyncio.timeout(KILL_SECONDS):
                    await self.terminate()
                    while not self.is_over and self.exit_code is None:
                        await self._wait_for_news()
        except TimeoutError:
            pass  # it is out of our hands
        finally:
            self._let_go(feed)

    def _let_go(self, feed: Feed) -> None:
        """Nobody will hear more of it; who waits for its end is told so if that is unknown."""
        self._processes.forget(feed)
        if self.exit_code is None:
            self.on_failed(ProcessLost("the process was given up before it was seen to end"))

    def _entered(self) -> Feed:
        """Its feed, without which nothing can be done; raises RuntimeError if it has none yet."""
        if self._feed is None:
            raise RuntimeError("the process is not started: use it inside of its `async with`")
        return self._feed

    @property
    def id(self) -> ProcessId:
        """What it is called on the wire."""
        return self._entered().id

    @property
    def is_over(self) -> bool:
        """Whether it has ended and nothing more can come of it."""
        return self._is_closed or self._failure is not None

    # ---- output -----------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        self._entered()
        self._reader = reading_party()
        while not self._queue:
            self._refill()
            if self._failure is not None:
                raise self._failure
            if self._is_closed or self._is_abandoned:
                raise StopAsyncIteration
            await self._wait_for_news()
        return self._pop()

    async def read_some(self) -> list[Chunk]:
        """All output that is there, or else the next that comes; an empty list at the end."""
        try:
            chunks = [await anext(self)]
        except StopAsyncIteration:
            return []
        while self._queue:
            chunks.append(self._pop())
        return chunks

    async def wait(self) -> int:
        """Wait until it has exited, and return its exit code.

        Output can be taken before, after, or at the same time. If nobody takes any, as much as
        there is room for is kept.
        """
        self._entered()
        parties = self._traffic.wait_begins()
        try:
            while self.exit_code is None:
                if self._failure is not None:
                    raise self._failure
                await self._wait_for_news()
        finally:
            self._traffic.wait_ends(parties)
        return self.exit_code

    def _pop(self) -> Chunk:
        assert self._reader is not None
        chunk = self._queue.popleft()
        before = self._weight
        self._weight -= len(chunk.data) + CHUNK_COST
        if self._weight < FREE_BYTES <= before:
            self._traffic.queue_free(self)
            self._refill()
        else:
            self._traffic.queue_moves(self, self._reader)
        return chunk

    def _refill(self) -> None:
        """There is room again: ask for what was ignored, if that was so."""
        feed = self._entered()
        if feed.is_skipping:
            self._processes.recover(feed)

    def _abandon(self) -> None:
        """Nobody wants the output any more."""
        self._is_abandoned = True
        self._queue.clear()
        self._weight = 0
        self._traffic.queue_free(self)
        self._refill()
        self._news.set()

    async def _wait_for_news(self) -> None:
        self._news.clear()
        await self._news.wait()

    # ---- what is done to it -----------------------------------------------------------

    async def write(self, data: bytes) -> None:
        """Send this to its stdin or terminal, after all that was written before.

        Waits only while too much is under way. Raises StdinClosed, perhaps for an earlier write.
        """
        await self._stdin().write(data)

    async def close_stdin(self) -> None:
        """Let it read the end of its input; of a terminal that is Ctrl-D.

        Raises Unsupported if the server cannot do that to a pipe.
        """
        await self._stdin().close(is_offered=self._capabilities.process_close_stdin)

    def _stdin(self) -> ProcessInput:
        self._entered()
        if self._input is None:
            raise StdinClosed("the process was started without: use start(..., stdin=True)")
        return self._input

    async def resize(self, rows: int, columns: int) -> None:
        """Tell its terminal how large it is; raises Unsupported if the server cannot."""
        if not self._capabilities.process_resize:
            raise Unsupported("processResize", "the terminal keeps the size that it started with")
        await self._traffic.call(RESIZE, ResizeParams(self.id, rows, columns), is_retryable=True)

    async def interrupt(self) -> None:
        """Send SIGINT to its process group, as Ctrl-C does."""
        await self._traffic.call(SIGNAL, SignalParams(self.id, "interrupt"))

    async def signal(self, name: str | int) -> None:
        """Send a signal to its process group, by its name with or without `SIG`, or its number.

        A number is one of this machine. Raises Unsupported if the server knows only INT and KILL.
        """
        self._entered()
        full = _signal_name(name)
        if self._capabilities.process_signals:
            known: Signal = full  # type: ignore[assignment]  # the server says if there is none
            await self._traffic.call(SIGNAL, SignalParams(self.id, known))
        elif full == "SIGINT":
            await self.interrupt()
        elif full == "SIGKILL":
            await self.terminate()
        else:
            raise Unsupported("processSignals", f"{full} cannot be sent, only INT and KILL")

    async def terminate(self) -> None:
        """Kill it with all its descendants, at once; nothing to do if it is over."""
        feed = self._entered()
        if not self.is_over:
            await asyncio.wait([self._processes.kill(feed)])

    # ---- what its feed tells ----------------------------------------------------------

    def on_output(self, event: OutputParams) -> None:
        if self._is_abandoned:
            return
        self._queue.append(Chunk(event.stream, event.chunk, self._unread_gap))
        self._unread_gap = 0
        self._weight += len(event.chunk) + CHUNK_COST
        if self._weight >= FULL_BYTES:
            self._grow_full()
        self._news.set()

    def _grow_full(self) -> None:
        self._traffic.queue_full(self, self._reader)
        if self._weight >= BURSTING_BYTES:
            self._entered().is_skipping = True

    def on_gap(self, size: int) -> None:
        self.lost_bytes += size
        self._unread_gap += size

    def on_exited(self, event: ExitedParams) -> None:
        if self.exit_code is None:
            self.exit_code = event.exit_code
            self.sandbox_denied = event.sandbox_denied
            self.sandbox_denial = event.sandbox_denial
            if self._input is not None:
                self._input.fail(StdinClosed("the process has ended"))
        self._news.set()

    def on_closed(self) -> None:
        self._is_closed = True
        self._news.set()

    def on_failed(self, error: ExecServerError) -> None:
        if not self._is_closed:
            self._failure = self._failure or error
            if self._input is not None:
                self._input.fail(error)
        self._news.set()


def _signal_name(name: str | int) -> str:
    if isinstance(name, str):
        return f"SIG{name.upper().removeprefix('SIG')}"
    if not isinstance(name, int):
        raise TypeError(f"a signal is a name or a number, not {type(name).__name__}")
    try:
        return signal.Signals(name).name
    except ValueError:
        raise InvalidParams(f"there is no signal {name}") from None
