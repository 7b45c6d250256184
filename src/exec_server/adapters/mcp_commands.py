"""CommandSessions: the commands that a model has started; they end with it.

The output of each command is read all the time, so that one that is not looked at does not stop.
A command counts as running until its output has ended: children that it left behind hold it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final, Self

from exec_server.adapters.mcp_text import CommandOutput
from exec_server.client.arguments import AnySandbox
from exec_server.client.environment import Environment
from exec_server.client.process import Process
from exec_server.errors import ExecServerError, InvalidParams

# Commands that run at the same time: more than a model can follow. Further ones are refused.
MAX_RUNNING: Final = 32
# Ended commands whose output can still be read; the oldest is forgotten.
MAX_ENDED: Final = 16
# A call waits at most this long: clients give up after a minute or two.
MAX_WAIT_SECONDS: Final = 60.0
# For text that a command does not read: 1 MiB is queued for it before.
WRITE_SECONDS: Final = 10.0
# Output that follows the exit of a command, if children still hold its pipe.
QUIET_SECONDS: Final = 0.2
# Between two reports of a command that runs.
PROGRESS_SECONDS: Final = 1.0

Report = Callable[[float, int], Awaitable[None]]


class CommandSessions:
    """The commands of one model by number; an async context manager that ends them."""

    def __init__(self, environment: Environment, sandbox: AnySandbox | None = None) -> None:
        """`sandbox` is a whole object: the workspace of a name would be that of each command."""
        self._environment = environment
        self._sandbox = sandbox
        self._sessions: dict[int, _Session] = {}
        self._last_id = 0
        self._starting = 0
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for session in self._sessions.values():
            self._end(session)
        await self._tasks.__aexit__(None, None, None)

    async def run(
        self,
        argv: list[str],
        *,
        workdir: str,
        tty: bool,
        wait_ms: int,
        tokens: int,
        report: Report,
    ) -> str:
        """Start a command and wait for a while; if the call is cancelled, the command is killed."""
        session = await self._start(argv, workdir, tty=tty)
        try:
            await session.wait(wait_ms, report)
        except asyncio.CancelledError:
            self._sessions.pop(session.id, None)  # it may have ended and been forgotten
            self._end(session)
            raise
        self._forget_ended()
        return session.reply(tokens)

    async def _start(self, argv: list[str], workdir: str, *, tty: bool) -> _Session:
        running = sum(not each.is_over for each in self._sessions.values())
        if running + self._starting >= MAX_RUNNING:
            raise InvalidParams(
                f"{MAX_RUNNING} commands are running: end one of them with kill_process"
            )
        self._starting += 1
        try:
            process = await self._environment.start(
                argv,
                cwd=workdir,
                tty=tty,
                merge_stderr=not tty and self._environment.capabilities.process_merge_stderr,
                sandbox=self._sandbox,
            )
        finally:
            self._starting -= 1
        self._last_id += 1
        session = _Session(self._last_id, process, argv[-1], tty=tty)
        self._sessions[session.id] = session
        self._tasks.create_task(session.pump())
        return session

    async def write(
        self, session_id: int, text: str, *, wait_ms: int, tokens: int, report: Report
    ) -> str:
        """Type a text, and wait for a while; an empty one only waits."""
        session = self._get(session_id)
        if text:
            if not session.tty:
                raise InvalidParams(
                    "this command reads no input: start it with tty=true in order to write to it"
                )
            await session.write(text.encode())
        await session.wait(wait_ms, report)
        return session.reply(tokens)

    async def kill(self, session_id: int) -> str:
        session = self._get(session_id)
        await session.process.kill()
        await session.wait(0, None)
        return session.reply(1000)

    def read(self, session_id: int, offset: int, tokens: int) -> str:
        """Output of a command that was left out."""
        return self._get(session_id).output.read(offset, tokens)

    def list(self) -> str:
        """One line for each command."""
        lines = [session.line() for session in self._sessions.values()]
        return "\n".join(lines) or "no command was started"

    def _get(self, session_id: int) -> _Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise InvalidParams(f"there is no command with session_id={session_id}")
        return session

    def _forget_ended(self) -> None:
        ended = [each.id for each in self._sessions.values() if each.is_over]
        for session_id in ended[:-MAX_ENDED]:
            self._end(self._sessions.pop(session_id))

    def _end(self, session: _Session) -> None:
        # In a task of its own, because the caller may be cancelled.
        self._tasks.create_task(_close(session.process))


class _Session:
    """One command, and its output until now."""

    def __init__(self, session_id: int, process: Process, command: str, *, tty: bool) -> None:
        self.id = session_id
        self.process = process
        self.tty = tty
        self.output = CommandOutput(session_id)
        self._command = command
        self._started = time.monotonic()
        self._read_all = asyncio.Event()
        self._failure = ""

    @property
    def is_over(self) -> bool:
        return self._read_all.is_set()

    async def pump(self) -> None:
        """Read all output."""
        try:
            while chunks := await self.process.read_some():
                for chunk in chunks:
                    self.output.append(chunk.data)
        except ExecServerError as error:
            self._failure = str(error)
        finally:
            self._read_all.set()

    async def write(self, data: bytes) -> None:
        """Write to the terminal; raises InvalidParams if the command does not read."""
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                await self.process.write(data)
        except TimeoutError:
            raise InvalidParams(
                "the command does not read its input: a part of the text was not written"
            ) from None

    async def wait(self, wait_ms: int, report: Report | None) -> None:
        """Wait for the exit, at most for the time that was asked for."""
        loop = asyncio.get_running_loop()
        # A model may ask for a number that is no float.
        seconds = min(max(wait_ms, 0), 1000 * MAX_WAIT_SECONDS) / 1000
        deadline = loop.time() + max(seconds, QUIET_SECONDS)
        while self.process.exit_code is None and not self._failure:
            slice_end = min(deadline, loop.time() + PROGRESS_SECONDS)
            try:
                async with asyncio.timeout_at(slice_end):
                    await self.process.wait()
            except TimeoutError:
                pass
            except ExecServerError:
                break  # `pump` has it too
            if loop.time() >= deadline:
                return
            if report is not None:
                await report(time.monotonic() - self._started, self.output.size)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(QUIET_SECONDS):
                await self._read_all.wait()

    def reply(self, tokens: int) -> str:
        """What the model reads: the state, and the output that it has not seen."""
        seconds = time.monotonic() - self._started
        return (
            f"{self._state()}\nWall time: {seconds:.1f} seconds\nOutput:\n"
            f"{self.output.take(tokens)}"
        )

    def line(self) -> str:
        command = self._command if len(self._command) <= 200 else f"{self._command[:200]}…"
        return f"session_id={self.id}: {self._state()}; {self.output.size} bytes: {command!r}"

    def _state(self) -> str:
        process = self.process
        if process.exit_code is None:
            return f"Lost: {self._failure}" if self._failure else f"Running, session_id={self.id}"
        text = f"Exited with code {process.exit_code}"
        if not self.is_over:
            text += f"; its children still run, session_id={self.id}"
        return f"{text}; the sandbox has denied something" if process.sandbox_denied else text


async def _close(process: Process) -> None:
    with contextlib.suppress(ExecServerError):  # the connection is lost, and the command with it
        await process.aclose()
