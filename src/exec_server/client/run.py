"""CommandRun: one command from its start to its exit, with its output in a Result."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from exec_server.client.engine.input import ProcessInput
from exec_server.client.engine.recovery import KILL_SECONDS, RemoteProcess
from exec_server.client.exceptions import Timeout
from exec_server.client.process import Process
from exec_server.client.results import Result
from exec_server.errors import InvalidParams, StdinClosed
from exec_server.protocol.process import OutputParams

# Output that is kept by default: more than a caller can use, less than would exhaust the memory of
# this machine. The rest is counted in `lost_bytes`.
OUTPUT_BYTES: Final = 256 * 1_048_576
# Servers count queued input in pieces, and some stop answering if there are too many. So at most
# INPUT_PIECES pieces are sent, each but the last of at least INPUT_PIECE_BYTES.
INPUT_PIECES: Final = 64
INPUT_PIECE_BYTES: Final = 262_144

# After the exit, children of the command may keep its output open for as long as they like. The
# rest of the command's own output arrives within milliseconds; on a slow network it keeps arriving.
# So a run returns when no output was received for the first time, at the latest after the second.
QUIET_SECONDS: Final = 0.2
REST_SECONDS: Final = 1.0

# The exit code of a killed command whose exit event was not received.
_KILLED: Final = 128 + 9


class CommandRun(Process):
    """A command whose output is collected instead of queued; for one `to_exit`."""

    _collected: CollectedOutput

    async def to_exit(
        self, data: bytes | None, *, seconds: float | None, output_limit: int, leave_running: bool
    ) -> Result:
        """Start the command, send `data` to it, and wait for its exit; raises Timeout.

        Children that go on are killed unless `leave_running`. Whatever is raised, the command is
        killed with all its descendants.
        """
        if output_limit < 0:
            raise InvalidParams(f"output_limit must not be negative: {output_limit}")
        began = asyncio.get_running_loop().time()
        self._collected = CollectedOutput(output_limit)
        remote = self._register()
        scope = asyncio.timeout(seconds)
        try:
            async with scope:
                await self._exit(remote, data)
            await self._wait_for_rest(remote)
            if not leave_running:
                await self._kill_rest(remote)
        except BaseException as error:
            await self._kill_rest(remote)
            if isinstance(error, TimeoutError) and scope.expired():
                assert seconds is not None
                raise Timeout(seconds, self._result(began)) from None
            raise
        finally:
            self._leave(remote)
        return self._result(began)

    async def _exit(self, remote: RemoteProcess, data: bytes | None) -> None:
        """Start the command and wait for its exit."""
        await self._processes.start(remote, self._params, self._name)
        writing: asyncio.Future[None] | None = None
        if data is not None:
            writing = self._session.spawn(self._write_input(data))
            writing.add_done_callback(self._input_written)
        try:
            await self._wait_for_exit()
        finally:
            if writing is not None:
                writing.cancel()

    async def _write_input(self, data: bytes) -> None:
        stdin = ProcessInput(self._session, self.id, is_terminal=self._params.tty)
        piece_bytes = max(INPUT_PIECE_BYTES, -(-len(data) // INPUT_PIECES))
        try:
            await stdin.write(data, piece_bytes)
            if stdin.can_close:
                await stdin.close()
        except StdinClosed:
            pass  # a command need not read all of its input

    def _input_written(self, writing: asyncio.Future[None]) -> None:
        """Fail if the input was not written: the command could wait for it forever."""
        if not writing.cancelled() and (error := writing.exception()) is not None:
            self._failure = self._failure or error
            self._changed.set()

    async def _wait_for_rest(self, remote: RemoteProcess) -> None:
        """Wait for the end of the output, or until nothing more is to be expected."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + REST_SECONDS
        while not self.is_over:
            received = self._collected.received
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(QUIET_SECONDS):
                    await self._wait_until_over()
            if self._is_catching_up(remote):
                continue  # the server has output that could not be received
            if self._collected.received == received or loop.time() >= deadline:
                break
        if self._failure is not None:
            raise self._failure

    def _is_catching_up(self, remote: RemoteProcess) -> bool:
        is_recovering = remote.recovery is not None and not remote.recovery.done()
        return is_recovering or not self._session.is_connected

    async def _wait_until_over(self) -> None:
        consumers = self._session.flow_control.begin_wait()
        try:
            while not self.is_over:
                await self._wait_for_change()
        finally:
            self._session.flow_control.end_wait(consumers)

    async def _kill_rest(self, remote: RemoteProcess) -> None:
        """Kill what may run, and wait for the rest of its output."""
        if self._is_closed or not remote.may_run:
            return
        await asyncio.wait([self._processes.kill(remote)], timeout=KILL_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_SECONDS):
                await self._wait_until_over()

    def _leave(self, remote: RemoteProcess) -> None:
        """Discard further output; what is left running is killed with the environment."""
        if self.is_over or not remote.may_run:
            self._processes.forget(remote)
        else:
            self._processes.discard(remote)

    def _result(self, began: float) -> Result:
        output = self._collected
        return Result(
            argv=self.argv,
            stdout=bytes(output.stdout),
            stderr=bytes(output.stderr),
            exit_code=_KILLED if self.exit_code is None else self.exit_code,
            duration=asyncio.get_running_loop().time() - began,
            sandbox_denied=self.sandbox_denied,
            sandbox_denial=self.sandbox_denial,
            lost_bytes=self.lost_bytes + output.lost_bytes,
        )

    def on_output(self, event: OutputParams) -> None:
        self._collected.add(event)


class CollectedOutput:
    """The output of a command up to a limit; the rest is counted."""

    def __init__(self, limit: int) -> None:
        self._remaining = limit
        # Not lists of chunks: chunks of one byte would take fifty times their size.
        self.stdout = bytearray()
        self.stderr = bytearray()
        self.received = 0
        self.lost_bytes = 0

    def add(self, event: OutputParams) -> None:
        self.received += len(event.chunk)
        data = event.chunk[: self._remaining]
        self._remaining -= len(data)
        self.lost_bytes += len(event.chunk) - len(data)
        output = self.stderr if event.stream == "stderr" else self.stdout
        output += data
