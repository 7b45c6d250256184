"""`exec-server exec`: a command there, with our stdin, stdout, stderr, signals and terminal.

Theory of operation. Everything that can end it decides on a `_Verdict`, the first one counts:
the command has ended, a stream or the session broke, time is over, the user gave up. Beside the
task that waits for it there are one that shows output, one that reads stdin and one that sends
what was read; signals arrive as plain calls and start short tasks of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import uvloop

from exec_server.client.environment import Environment
from exec_server.client.process import Process
from exec_server.commands.arguments import access
from exec_server.commands.connection import connected, explain, reason
from exec_server.commands.failures import EXEC_FAILED, TIMED_OUT, Failure, Mistake
from exec_server.commands.printing import complain, say
from exec_server.commands.screen import HELP_TEXT, Escape, Escapes, ScreenModes
from exec_server.commands.signals import PASSED_ON, SignalPasser, heeded
from exec_server.commands.streams import Inlet, Outlet, is_nothing
from exec_server.commands.targets import Target, find_target
from exec_server.commands.terminal import Terminal, window_size
from exec_server.errors import ExecServerError, Unsupported

# How long the server may take to end what is given up; it may be out of reach.
TERMINATE_SECONDS: Final = 2.0


@dataclass(frozen=True)
class _Verdict:
    """How it ends; with force if the command may still be running."""

    code: int
    by_force: bool = True
    text: str | None = None


def run(arguments: argparse.Namespace) -> int:
    """Do what the arguments say; returns the exit code."""
    target = find_target(arguments.target, access(arguments))
    has_terminal = os.isatty(0) and not arguments.no_stdin
    if not arguments.argv and has_terminal and os.isatty(1):
        arguments.tty = True
    with contextlib.ExitStack() as stack:
        terminal = None
        if arguments.tty and has_terminal:
            screen = 1 if os.isatty(1) else None
            terminal = stack.enter_context(Terminal(0, screen=screen))
        return uvloop.run(_Execution(arguments, target, terminal).run())


class _Execution:
    def __init__(
        self, arguments: argparse.Namespace, target: Target, terminal: Terminal | None
    ) -> None:
        self._arguments = arguments
        self._target = target
        self._terminal = terminal
        self._variables = _variables(arguments)
        self._outlet = Outlet()
        self._screen = ScreenModes()
        self._has_input = not arguments.no_stdin and not is_nothing(0)
        self._early_end: int | None = None

    # ---- from the beginning to the end ------------------------------------------------

    async def run(self) -> int:
        self._loop = asyncio.get_running_loop()
        self._verdict: asyncio.Future[_Verdict] = self._loop.create_future()
        main = asyncio.current_task()
        assert main is not None
        for number in heeded(PASSED_ON):
            self._loop.add_signal_handler(number, self._end_early, number, main)
        try:
            async with connected(self._target, self._complain, self._tell) as environment:
                return await self._start(environment)
        except asyncio.CancelledError:
            if self._early_end is None:
                raise
            return self._early_end

    def _end_early(self, number: int, main: asyncio.Task[Any]) -> None:
        """A signal before there is a command to pass it on to."""
        self._early_end = 128 + number
        main.cancel()

    async def _start(self, environment: Environment) -> int:
        arguments = self._arguments
        process = environment.start(
            arguments.argv or [environment.info.shell.path, "-l"],
            cwd=arguments.cwd,
            env=self._variables,
            tty=arguments.tty,
            size=window_size(0) if self._terminal is not None else None,
            stdin=self._has_input,
        )
        async with contextlib.AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(process)
            except ExecServerError as error:
                raise Failure(f"{self._target.label}: {reason(error)}") from None
            verdict = await self._attend(process)
            if verdict.by_force:
                await self._end_by_force(environment, process)
            return verdict.code

    async def _attend(self, process: Process) -> _Verdict:
        """Everything between the start of the command and the verdict."""
        async with asyncio.TaskGroup() as tasks:
            signals = SignalPasser(
                process, self._terminal, tasks, lambda code: self._decide(_Verdict(code))
            )
            self._suspend = signals.suspend
            signals.install()
            if self._terminal is not None:
                self._terminal.make_raw()
                signals.resize()  # it may have changed on the way
            working = [tasks.create_task(self._show(process))]
            if self._has_input:
                working.append(tasks.create_task(self._feed(process)))
            try:
                verdict = await self._wait_for_verdict()
            finally:
                if self._terminal is not None:
                    self._terminal.restore()
                for task in working:
                    task.cancel()
                signals.remove()
        self._report(verdict, process)
        return verdict

    async def _wait_for_verdict(self) -> _Verdict:
        limit = self._arguments.timeout
        await asyncio.wait([self._verdict], timeout=limit)
        if not self._verdict.done():
            self._decide(_Verdict(TIMED_OUT, text=f"the command was ended after {limit:g} s"))
        return self._verdict.result()

    def _report(self, verdict: _Verdict, process: Process) -> None:
        if verdict.by_force and (undo := self._screen.undo()):
            with contextlib.suppress(OSError):
                os.write(1, undo)
        if verdict.text is not None:
            say(verdict.text)
        if process.lost_bytes:
            say(f"{process.lost_bytes} bytes of output were lost: the server kept no more")

    async def _end_by_force(self, environment: Environment, process: Process) -> None:
        with contextlib.suppress(TimeoutError, ExecServerError):
            async with asyncio.timeout(TERMINATE_SECONDS):
                await process.terminate()
                return
        # The server is out of reach: nothing more will come of this session.
        await environment.session.close()

    def _decide(self, verdict: _Verdict) -> None:
        if not self._verdict.done():
            self._verdict.set_result(verdict)

    def _say(self, text: str) -> None:
        say(text, is_raw=self._is_raw)

    def _tell(self, text: str) -> None:
        """Say what becomes of the connection, as long as it matters."""
        if not self._verdict.done():
            self._say(text)

    def _complain(self, line: str) -> None:
        """Pass on what a program that is the target says on its stderr."""
        complain(line, is_raw=self._is_raw)

    @property
    def _is_raw(self) -> bool:
        return self._terminal is not None and self._terminal.is_raw

    # ---- streams ----------------------------------------------------------------------

    async def _show(self, process: Process) -> None:
        """Pass on output until there is no more, and then the exit code."""
        try:
            while chunks := await process.read_some():
                for is_error, run in groupby(chunks, lambda chunk: chunk.stream == "stderr"):
                    data = b"".join(chunk.data for chunk in run)
                    if self._arguments.tty:
                        self._note(data)
                    await self._outlet.write(2 if is_error else 1, data)
            self._decide(_Verdict(await process.wait() & 0xFF, by_force=False))
        except BrokenPipeError:
            # What the kernel would have done to a command that writes there itself.
            self._decide(_Verdict(128 + signal.SIGPIPE))
        except OSError as error:
            self._decide(_Verdict(EXEC_FAILED, text=f"cannot write output: {error.strerror}"))
        except ExecServerError as error:
            self._decide(_Verdict(EXEC_FAILED, text=explain(error, self._target)))

    def _note(self, data: bytes) -> None:
        """Look at what is about to be shown, and have the keeper know how to undo it."""
        before = self._screen.undo()
        self._screen.feed(data)
        if self._terminal is not None and (undo := self._screen.undo()) != before:
            self._terminal.note_undo(undo)

    async def _feed(self, process: Process) -> None:
        """Send it our input, and that it has ended."""
        escapes = Escapes(self._arguments.escape if self._terminal is not None else None)
        inlet = Inlet(0)
        try:
            while data := await inlet.read():
                for item in escapes.feed(data):
                    if isinstance(item, bytes):
                        await process.write(item)
                    else:
                        self._obey(item)
            await process.close_stdin()
        except Unsupported:
            self._say(
                "this server cannot tell the command that its input has ended; "
                "if it waits for that, end it with Ctrl-C"
            )
        except ExecServerError:
            pass  # it takes no more input; if there is more behind it, `_show` hears of it, too

    def _obey(self, escape: Escape) -> None:
        match escape:
            case Escape.LEAVE:
                self._decide(_Verdict(EXEC_FAILED, text="left"))
            case Escape.SUSPEND:
                self._suspend()
            case Escape.HELP:
                self._say(f"\n{HELP_TEXT.format(self._arguments.escape)}")


def _variables(arguments: argparse.Namespace) -> dict[str, str]:
    """What the command gets beside the server's own environment; raises Mistake."""
    variables = {}
    if arguments.tty:
        variables["TERM"] = os.environ.get("TERM", "dumb")
        if "COLORTERM" in os.environ:
            variables["COLORTERM"] = os.environ["COLORTERM"]
    for word in arguments.env:
        name, equals, value = word.partition("=")
        if not name:
            raise Mistake(f"--env {word}: there is no name")
        if not equals and name not in os.environ:
            raise Mistake(f"--env {word}: there is no such variable here; write {name}=VALUE")
        variables[name] = value if equals else os.environ[name]
    return variables
