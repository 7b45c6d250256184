"""Runs a command on a server with the local stdin, stdout, stderr and signals.

Theory of operation. Every way to end sets one `_Outcome`, and the first one counts: the command
has exited, a stream or the session failed, the timeout expired, the user aborted. One task copies
output and one copies stdin while the main task waits for the outcome; signals arrive as callbacks
and start short tasks of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import os
import signal
from typing import Any, Final

from exec_server.cli.connection import (
    describe_error,
    error_text,
    open_environment,
    run_event_loop,
    run_until_signal,
    unignored,
)
from exec_server.cli.errors import (
    EXIT_CONNECTION,
    EXIT_NOT_EXECUTABLE,
    EXIT_NOT_FOUND,
    EXIT_NOT_RUN,
    EXIT_TIMEOUT,
    CommandError,
    command_code,
)
from exec_server.cli.exec.terminal import (
    FORWARDED,
    HELP_TEXT,
    Escape,
    EscapeParser,
    ScreenModes,
    SignalForwarder,
    Terminal,
    window_size,
)
from exec_server.cli.start_options import command_sandbox, command_variables, load_policy
from exec_server.cli.streams import (
    OutputWriter,
    StdinReader,
    is_null_device,
    print_error,
    print_status,
    print_text,
)
from exec_server.cli.targets import Target
from exec_server.client.environment import Environment
from exec_server.client.process import REST_SECONDS, Process
from exec_server.errors import (
    ConnectionLost,
    ExecServerError,
    RpcError,
    SessionLost,
    Unsupported,
    printable,
)
from exec_server.protocol.process import TERMINATE, TerminateParams

# Time for the server to terminate an abandoned command; the server may be unreachable.
TERMINATE_SECONDS: Final = 2.0
# The server's machine is short of something; the program itself can be executed.
_SHORTAGES: Final = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})


class _Outcome:
    """How the execution ends; `must_terminate` if the command may still be running."""

    def __init__(self, code: int, *, must_terminate: bool = True, text: str | None = None) -> None:
        self.code = code
        self.must_terminate = must_terminate
        self.text = text


def execute(arguments: argparse.Namespace, target: Target) -> int:
    """Run the command that the arguments of `exec` describe; returns the exit code."""
    has_terminal = os.isatty(0) and not arguments.no_stdin
    if not arguments.argv and has_terminal and os.isatty(1):
        arguments.tty = True
    with contextlib.ExitStack() as stack:
        terminal = None
        if arguments.tty and has_terminal:
            screen = 1 if os.isatty(1) else None
            terminal = stack.enter_context(Terminal(0, screen=screen))
        return run_event_loop(_Execution(arguments, target, terminal).run())


class _Execution:
    def __init__(
        self, arguments: argparse.Namespace, target: Target, terminal: Terminal | None
    ) -> None:
        self._arguments = arguments
        self._target = target
        self._terminal = terminal
        self._variables = command_variables(arguments.env, tty=arguments.tty)
        self._policy = load_policy("--sandbox", arguments.sandbox)
        self._writer = OutputWriter()
        self._screen = ScreenModes()
        self._has_input = not arguments.no_stdin and not is_null_device(0)
        self._startup_exit_code: int | None = None

    # ---- start to end -----------------------------------------------------------------

    async def run(self) -> int:
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[_Outcome] = self._loop.create_future()
        main = asyncio.current_task()
        assert main is not None
        for number in unignored(FORWARDED):
            self._loop.add_signal_handler(number, self._signal_during_startup, number, main)
        try:
            async with open_environment(
                self._target, self._print_target_stderr, self._print_connection_status
            ) as environment:
                return await self._start(environment)
        except asyncio.CancelledError:
            if self._startup_exit_code is None:
                raise
            return self._startup_exit_code

    def _signal_during_startup(self, number: int, main: asyncio.Task[Any]) -> None:
        """Leave: the command does not run yet."""
        self._startup_exit_code = 128 + number
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
            sandbox=command_sandbox(self._policy, arguments.cwd, environment.info),
            user=arguments.user,
        )
        async with contextlib.AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(process)
            except (ConnectionLost, SessionLost):
                raise
            except ExecServerError as error:
                raise start_failure(error, arguments.argv, self._target.label) from None
            outcome = await self._run_process(process)
            if outcome.must_terminate:
                await self._terminate(environment, process)
            else:
                # Background children end with the command; the answer is not waited for.
                environment.session.post(TERMINATE, TerminateParams(process.id))
            return outcome.code

    async def _run_process(self, process: Process) -> _Outcome:
        """Copy streams and forward signals until there is an outcome."""
        async with asyncio.TaskGroup() as tasks:
            signals = SignalForwarder(
                process, self._terminal, tasks, lambda code: self._finish(_Outcome(code))
            )
            self._suspend = signals.suspend
            signals.install()
            if self._terminal is not None:
                self._terminal.make_raw()
                signals.resize()  # the size may have changed since the start request
            copying = [tasks.create_task(self._copy_output(process))]
            if self._has_input or self._arguments.tty:
                copying.append(tasks.create_task(self._send_input(process)))
            try:
                outcome = await self._wait_for_outcome(process)
            finally:
                if self._terminal is not None:
                    self._terminal.restore()
                for task in copying:
                    task.cancel()
                signals.remove()
        self._report(outcome, process)
        return outcome

    async def _wait_for_outcome(self, process: Process) -> _Outcome:
        limit = self._arguments.timeout
        await asyncio.wait([self._outcome], timeout=limit)
        if not self._outcome.done():
            if process.exit_code is None:
                text = f"the command was killed after {limit:g} s"
                self._finish(_Outcome(EXIT_TIMEOUT, text=text))
            else:
                await self._end_output(process, command_code(process.exit_code))
        return self._outcome.result()

    async def _end_output(self, process: Process, code: int) -> None:
        """Kill the children that keep the output of an exited command open, and write the rest."""
        with contextlib.suppress(TimeoutError, ExecServerError):
            async with asyncio.timeout(TERMINATE_SECONDS):
                await process.kill()
        while not self._outcome.done():
            await asyncio.wait([self._outcome], timeout=REST_SECONDS)
            # Some servers cannot kill such children.
            if not process.is_over and not self._writer.is_writing:
                self._finish(_Outcome(code))

    def _report(self, outcome: _Outcome, process: Process) -> None:
        if outcome.must_terminate and (sequence := self._screen.reset_sequence()):
            with contextlib.suppress(OSError):
                os.write(1, sequence)
        if outcome.text is not None:
            print_status(outcome.text)
        if process.sandbox_denial is not None:
            from exec_server.cli.streams import denial_lines

            for line in denial_lines(process.sandbox_denial):
                print_status(printable(line))
        if process.lost_bytes:
            print_status(
                f"{process.lost_bytes} bytes of output were lost: more than the server buffers"
            )

    async def _terminate(self, environment: Environment, process: Process) -> None:
        with contextlib.suppress(TimeoutError, ExecServerError):
            async with asyncio.timeout(TERMINATE_SECONDS):
                await process.kill()
                return
        # The server is unreachable: do not wait for the session to be resumed.
        await environment.session.close()

    def _finish(self, outcome: _Outcome) -> None:
        if not self._outcome.done():
            self._outcome.set_result(outcome)

    def _print_status(self, text: str) -> None:
        print_status(text, is_raw=self._is_raw)

    def _print_connection_status(self, text: str) -> None:
        if not self._outcome.done():  # afterwards the connection no longer matters
            self._print_status(text)

    def _print_target_stderr(self, line: str) -> None:
        """Print a line that a stdio target has written to its stderr."""
        print_error(line, is_raw=self._is_raw)

    @property
    def _is_raw(self) -> bool:
        return self._terminal is not None and self._terminal.is_raw

    # ---- streams ----------------------------------------------------------------------

    async def _copy_output(self, process: Process) -> None:
        """Write output until its end; the outcome is then the exit code."""
        try:
            inspect = self._track_screen_modes if self._arguments.tty else None
            await self._writer.write_output(process, inspect)
            self._finish(_Outcome(command_code(await process.wait()), must_terminate=False))
        except BrokenPipeError:
            # As if the command itself had written to the closed pipe.
            self._finish(_Outcome(128 + signal.SIGPIPE))
        except OSError as error:
            text = f"cannot write output: {error.strerror}"
            self._finish(_Outcome(EXIT_NOT_RUN, text=text))
        except ExecServerError as error:
            text = describe_error(error, self._target)
            self._finish(_Outcome(EXIT_CONNECTION, text=text))

    def _track_screen_modes(self, data: bytes) -> None:
        """Inspect output before it is written, and keep the restorer process up to date."""
        before = self._screen.reset_sequence()
        self._screen.feed(data)
        if self._terminal is not None and (after := self._screen.reset_sequence()) != before:
            self._terminal.set_reset_sequence(after)

    async def _send_input(self, process: Process) -> None:
        """Send stdin to the command, if there is any, and then its end."""
        try:
            if self._has_input:
                await self._copy_stdin(process)
            await process.close_stdin()
        except Unsupported:
            self._print_status(
                "this server cannot close the command's stdin; "
                "if the command waits for the end of its input, end it with Ctrl-C"
            )
        except ExecServerError:
            pass  # stdin is closed; `_copy_output` reports a lost session

    async def _copy_stdin(self, process: Process) -> None:
        escapes = EscapeParser(self._arguments.escape if self._terminal is not None else None)
        reader = StdinReader(0)
        while data := await reader.read():
            for item in escapes.feed(data):
                if isinstance(item, bytes):
                    await process.write(item)
                else:
                    self._handle_escape(item)

    def _handle_escape(self, escape: Escape) -> None:
        match escape:
            case Escape.TERMINATE:
                text = f"terminated by {self._arguments.escape}."
                self._finish(_Outcome(EXIT_CONNECTION, text=text))
            case Escape.SUSPEND:
                self._suspend()
            case Escape.HELP:
                self._print_status(f"\n{HELP_TEXT.format(self._arguments.escape)}")


def start_failure(error: ExecServerError, argv: list[str], label: str) -> CommandError:
    """The error of a command that could not be started on the target `label`."""
    from exec_server.client.exceptions import ProgramNotFound, error_number

    text = f"{label}: {error_text(error)}"
    if isinstance(error, ProgramNotFound):
        return CommandError(f"{text}{_hint(argv)}", EXIT_NOT_FOUND)
    number = error_number(error.message) if isinstance(error, RpcError) else None
    if number is None or number in _SHORTAGES:
        return CommandError(text, EXIT_NOT_RUN)
    return CommandError(text, EXIT_NOT_EXECUTABLE)


def _hint(argv: list[str]) -> str:
    import re
    import shlex

    if len(argv) != 1 or re.search(r"[\s|&;<>]", argv[0]) is None:
        return ""
    return (
        "\nThe command is a single word. Write its words without quotes, or let a shell read it: "
        f"sh -c {shlex.quote(argv[0])}"
    )


def start_detached(arguments: argparse.Namespace, target: Target) -> int:
    """Start the command that the arguments of `exec -d` describe, and print its name."""
    variables = command_variables(arguments.env, tty=arguments.tty)
    policy = load_policy("--sandbox", arguments.sandbox)

    async def work() -> int:
        async with open_environment(target) as environment:
            process = environment.start(
                arguments.argv,
                cwd=arguments.cwd,
                env=variables,
                tty=arguments.tty,
                size=window_size(0) if arguments.tty else None,
                stdin=arguments.interactive,
                sandbox=command_sandbox(policy, arguments.cwd, environment.info),
                user=arguments.user,
                detach=True,
                name=arguments.name,
                max_lifetime=arguments.max_lifetime,
                idle_timeout=arguments.idle_timeout,
            )
            try:
                await process
            except (ConnectionLost, SessionLost):
                raise
            except ExecServerError as error:
                raise start_failure(error, arguments.argv, target.label) from None
            await process.aclose()
        print_text(f"{process.name}\n")
        return 0

    return run_until_signal(work)
