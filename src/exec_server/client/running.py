"""Run: a command from its start to its end, with all of its output in memory."""

from __future__ import annotations

import asyncio
from typing import Final

from exec_server.client.failures import CommandDenied, CommandFailed, Timeout
from exec_server.client.input import ProcessInput
from exec_server.client.processes import KILL_SECONDS, Feed, Processes
from exec_server.client.results import Result
from exec_server.client.traffic import Traffic
from exec_server.errors import (
    InvalidParams,
    StdinClosed,
)
from exec_server.protocol.process import ExitedParams, OutputParams, StartParams
from exec_server.protocol.sandbox import Denial

# What is kept of a command's output unless the caller says: more than anybody looks at, and less
# than would hurt this machine. What is beyond is counted in `lost_bytes`.
OUTPUT_BYTES: Final = 256 * 1_048_576
# Servers count what is queued of a process's input in pieces, and some stop answering when it is
# too many: so it is never more than this.
INPUT_PIECES: Final = 64
INPUT_PIECE_BYTES: Final = 262_144

# Of a command whose end could not be seen any more, after it was killed.
_KILLED: Final = 128 + 9


class Run:
    """One command; a Sink."""

    def __init__(
        self,
        traffic: Traffic,
        processes: Processes,
        params: StartParams,
        *,
        argv: tuple[str, ...],
        name: str,
        output_limit: int = OUTPUT_BYTES,
    ) -> None:
        """`name` is what it is called if it cannot be started."""
        if output_limit < 0:
            raise InvalidParams(f"output_limit must not be negative, as {output_limit} is")
        self._traffic = traffic
        self._processes = processes
        self._params = params
        self._argv = argv
        self._name = name
        self._room = output_limit
        self._stdout: list[bytes] = []
        self._stderr: list[bytes] = []
        self._lost = 0
        self._exit_code: int | None = None
        self._denied = False
        self._denial: Denial | None = None
        loop = asyncio.get_running_loop()
        self._began = loop.time()
        self._over: asyncio.Future[None] = loop.create_future()

    async def result(
        self, *, data: bytes | None, can_close: bool, seconds: float | None, check: bool
    ) -> Result:
        """Start it, give it `data`, and wait until it has ended and its output with it.

        Raises Timeout, and CommandFailed if its exit code is to be checked. Whatever is raised,
        the command is killed.
        """
        feed = self._processes.open(self)
        writing: asyncio.Future[None] | None = None
        scope = asyncio.timeout(seconds)
        try:
            async with scope:
                await self._processes.start(feed, self._params, self._name)
                if data is not None:
                    writing = self._traffic.spawn(self._write(feed, data, can_close=can_close))
                    writing.add_done_callback(self._written)
                await self._wait()
        except BaseException as error:
            await self._kill(feed)
            if isinstance(error, TimeoutError) and scope.expired():
                assert seconds is not None
                raise Timeout(seconds, self._result()) from None
            raise
        finally:
            if writing is not None:
                writing.cancel()
            self._processes.forget(feed)
        result = self._result()
        if check and result.exit_code:
            if result.sandbox_denied:
                raise CommandDenied(result)
            raise CommandFailed(result)
        return result

    async def _wait(self) -> None:
        parties = self._traffic.wait_begins()
        try:
            # What waits here is cancelled with its caller, and the future must not be.
            await asyncio.shield(self._over)
        finally:
            self._traffic.wait_ends(parties)

    async def _write(self, feed: Feed, data: bytes, *, can_close: bool) -> None:
        stdin = ProcessInput(self._traffic, feed.id, is_terminal=self._params.tty)
        size = max(INPUT_PIECE_BYTES, -(-len(data) // INPUT_PIECES))
        try:
            await stdin.write(data, size)
            if can_close:
                await stdin.close(is_offered=True)
        except StdinClosed:
            pass  # a command need not read all of its input

    def _written(self, writing: asyncio.Future[None]) -> None:
        """A command that waits for input that cannot come must not wait for ever."""
        if not writing.cancelled() and (error := writing.exception()) is not None:
            self.on_failed(error)

    async def _kill(self, feed: Feed) -> None:
        """Kill what was started, and wait for the rest of its output."""
        has_ended = self._over.done() and self._over.exception() is None
        if has_ended or not feed.may_run:
            return
        killing = self._processes.kill(feed)
        await asyncio.wait([killing], timeout=KILL_SECONDS)
        await asyncio.wait([self._over], timeout=KILL_SECONDS)

    def _result(self) -> Result:
        loop = asyncio.get_running_loop()
        return Result(
            argv=self._argv,
            stdout=b"".join(self._stdout),
            stderr=b"".join(self._stderr),
            exit_code=_KILLED if self._exit_code is None else self._exit_code,
            duration=loop.time() - self._began,
            sandbox_denied=self._denied,
            sandbox_denial=self._denial,
            lost_bytes=self._lost,
        )

    # ---- what its feed tells ----------------------------------------------------------

    def on_output(self, event: OutputParams) -> None:
        data = event.chunk[: self._room]
        self._room -= len(data)
        self._lost += len(event.chunk) - len(data)
        (self._stderr if event.stream == "stderr" else self._stdout).append(data)

    def on_gap(self, size: int) -> None:
        self._lost += size

    def on_exited(self, event: ExitedParams) -> None:
        self._exit_code = event.exit_code
        self._denied = event.sandbox_denied
        self._denial = event.sandbox_denial

    def on_closed(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def on_failed(self, error: BaseException) -> None:
        if not self._over.done():
            self._over.set_exception(error)
            self._over.exception()  # perhaps nobody waits any more
