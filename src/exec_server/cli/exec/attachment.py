"""Joins the local streams to a detached command until it ends or the user leaves.

Theory of operation. Every way to end sets one outcome, and the first one counts: the command has
exited, the user or a signal leaves, a stream or the session failed. One task copies output and one
copies stdin while the main task waits for the outcome.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass
from typing import Any, Final

from exec_server.cli.connection import attached, describe_error, open_environment, unignored
from exec_server.cli.errors import EXIT_CONNECTION, EXIT_FAILURE, command_code
from exec_server.cli.exec.terminal import (
    Escape,
    EscapeParser,
    ScreenModes,
    SignalForwarder,
    Terminal,
)
from exec_server.cli.streams import OutputWriter, StdinReader, is_null_device, print_status
from exec_server.cli.targets import Target
from exec_server.client.process import DetachedProcess
from exec_server.errors import ExecServerError
from exec_server.host import event_loop

_LEAVING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_HELP_TEXT: Final = """\
 {0}.   leave; the command goes on
 {0}^Z  suspend exec-server
 {0}?   show this help
 {0}{0}   send {0}
(only at the beginning of a line)
"""


@dataclass(frozen=True)
class _Outcome:
    """How the attachment ends; `has_ended` if the command has."""

    code: int
    has_ended: bool = False
    text: str | None = None


def attach(arguments: argparse.Namespace, target: Target) -> int:
    """Attach as the arguments describe; returns the exit code."""
    with contextlib.ExitStack() as stack:
        terminal = None
        if os.isatty(0) and not arguments.no_stdin:
            screen = 1 if os.isatty(1) else None
            terminal = stack.enter_context(Terminal(0, screen=screen))
        return event_loop.run(_Attaching(arguments, target, terminal).run())


class _Attaching:
    def __init__(
        self, arguments: argparse.Namespace, target: Target, terminal: Terminal | None
    ) -> None:
        self._arguments = arguments
        self._target = target
        self._terminal = terminal
        self._writer = OutputWriter()
        self._screen = ScreenModes()
        self._is_attached = False

    # ---- start to end -----------------------------------------------------------------

    async def run(self) -> int:
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[_Outcome] = self._loop.create_future()
        main = asyncio.current_task()
        assert main is not None
        for number in unignored(_LEAVING):
            self._loop.add_signal_handler(number, self._leave, number, main)
        try:
            async with (
                open_environment(self._target, on_status=self._print_status) as environment,
                attached(environment, self._target, self._arguments.name) as process,
            ):
                self._is_attached = True
                return (await self._use(process)).code
        except asyncio.CancelledError:
            if not self._outcome.done():
                raise
            return self._outcome.result().code

    def _leave(self, number: int, main: asyncio.Task[Any]) -> None:
        """Handle a signal; before there is an attachment, by cancelling everything."""
        self._finish(_Outcome(128 + number))
        if not self._is_attached:
            main.cancel()

    async def _use(self, process: DetachedProcess) -> _Outcome:
        """Copy streams until there is an outcome."""
        if not process.tty:
            self._terminal = None  # its keys are lines, and Ctrl-C is a signal
        async with asyncio.TaskGroup() as tasks:
            window = SignalForwarder(process, self._terminal, tasks, lambda _: None)
            self._suspend = window.suspend
            if self._terminal is not None:
                self._loop.add_signal_handler(signal.SIGWINCH, window.resize)
                self._terminal.make_raw()
                window.resize()
            copying = [tasks.create_task(self._copy_output(process))]
            if self._has_input(process):
                copying.append(tasks.create_task(self._copy_input(process)))
            try:
                outcome = await self._outcome
            finally:
                if self._terminal is not None:
                    self._terminal.restore()
                for task in copying:
                    task.cancel()
                window.remove()
        self._report(outcome, process)
        return outcome

    def _has_input(self, process: DetachedProcess) -> bool:
        return process.has_stdin and not self._arguments.no_stdin and not is_null_device(0)

    def _report(self, outcome: _Outcome, process: DetachedProcess) -> None:
        if not outcome.has_ended and (sequence := self._screen.reset_sequence()):
            with contextlib.suppress(OSError):
                os.write(1, sequence)
        if outcome.text is not None:
            print_status(outcome.text)
        if process.lost_bytes:
            print_status(f"{process.lost_bytes} bytes of older output are not retained any more")

    def _finish(self, outcome: _Outcome) -> None:
        if not self._outcome.done():
            self._outcome.set_result(outcome)

    def _print_status(self, text: str) -> None:
        is_raw = self._terminal is not None and self._terminal.is_raw
        print_status(text, is_raw=is_raw)

    # ---- streams ----------------------------------------------------------------------

    async def _copy_output(self, process: DetachedProcess) -> None:
        """Write output until its end; the outcome is then the exit code."""
        try:
            await self._writer.write_output(process, self._screen.feed if process.tty else None)
            self._finish(_Outcome(command_code(await process.wait()), has_ended=True))
        except BrokenPipeError:
            self._finish(_Outcome(128 + signal.SIGPIPE))
        except OSError as error:
            text = f"cannot write output: {error.strerror}"
            self._finish(_Outcome(EXIT_FAILURE, text=text))
        except ExecServerError as error:
            text = describe_error(error, self._target)
            self._finish(_Outcome(EXIT_CONNECTION, text=text))

    async def _copy_input(self, process: DetachedProcess) -> None:
        """Send stdin to the command, not its end: others may be attached, and go on writing."""
        escapes = EscapeParser(self._arguments.escape if self._terminal is not None else None)
        reader = StdinReader(0)
        try:
            while data := await reader.read():
                for item in escapes.feed(data):
                    if isinstance(item, bytes):
                        await process.write(item)
                    else:
                        self._handle_escape(item)
        except ExecServerError:
            pass  # stdin is closed; `_copy_output` reports a lost session

    def _handle_escape(self, escape: Escape) -> None:
        match escape:
            case Escape.TERMINATE:
                text = f"left {self._arguments.name}, which goes on"
                self._finish(_Outcome(0, text=text))
            case Escape.SUSPEND:
                self._suspend()
            case Escape.HELP:
                self._print_status(f"\n{_HELP_TEXT.format(self._arguments.escape)}")
