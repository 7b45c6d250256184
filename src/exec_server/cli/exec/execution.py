"""Joins the local streams, terminal and signals to a command on a server, new or detached.

Every way to end sets one `_Outcome`, and the first one counts. One task copies output and one
copies stdin; signals arrive as callbacks and start short tasks of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import os
import signal
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from exec_server.cli.connection import (
    attached,
    describe_error,
    error_text,
    open_environment,
    run_event_loop,
    run_until_signal,
    unignored,
)
from exec_server.cli.errors import (
    EXIT_CONNECTION,
    EXIT_FAILURE,
    EXIT_NOT_EXECUTABLE,
    EXIT_NOT_FOUND,
    EXIT_NOT_RUN,
    EXIT_TIMEOUT,
    CommandError,
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
    denial_lines,
    is_null_device,
    print_error,
    print_status,
    print_text,
)
from exec_server.client.environment import Environment
from exec_server.client.process import REST_SECONDS, Process
from exec_server.client.targets import Target
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


class _Outcome(NamedTuple):
    """How it ends; without `has_ended` the command may still be running."""

    code: int
    has_ended: bool = False
    text: str | None = None


def execute(arguments: argparse.Namespace, target: Target) -> int:
    """Run the command that the arguments of `exec` describe; returns the exit code."""
    has_terminal = os.isatty(0) and not arguments.no_stdin
    if not arguments.argv and has_terminal and os.isatty(1):
        arguments.tty = True
    with _terminal(is_used=arguments.tty and has_terminal) as terminal:
        return run_event_loop(_Execution(arguments, target, terminal).run())


def attach(arguments: argparse.Namespace, target: Target) -> int:
    """Attach to the detached command that the arguments of `attach` name; returns the exit code."""
    with _terminal(is_used=os.isatty(0) and not arguments.no_stdin) as terminal:
        return run_event_loop(_Attachment(arguments, target, terminal).run())


def _terminal(*, is_used: bool) -> contextlib.AbstractContextManager[Terminal | None]:
    screen = 1 if os.isatty(1) else None
    return Terminal(0, screen=screen) if is_used else contextlib.nullcontext()


class _StreamCopy:
    """Joins the local streams to a command until there is an outcome."""

    leaving_signals: tuple[signal.Signals, ...]  # before the command has its own handlers
    write_failure_code: int
    escape_effect: str  # of the escape that leaves

    def __init__(
        self, arguments: argparse.Namespace, target: Target, terminal: Terminal | None
    ) -> None:
        self._arguments = arguments
        self._target = target
        self._terminal = terminal
        self._writer = OutputWriter()
        self._screen = ScreenModes()
        self._can_read = not arguments.no_stdin and not is_null_device(0)
        self._is_joined = False

    async def run(self) -> int:
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[_Outcome] = self._loop.create_future()
        main = asyncio.current_task()
        assert main is not None
        for number in unignored(self.leaving_signals):
            self._loop.add_signal_handler(number, self._leave, number, main)
        try:
            async with open_environment(
                self._target, self._print_target_stderr, self._print_connection_status
            ) as environment:
                return await self._use(environment)
        except asyncio.CancelledError:
            if not self._outcome.done():
                raise
            return self._outcome.result().code

    def _leave(self, number: int, main: asyncio.Task[Any]) -> None:
        """Handle a signal; without a command yet, by cancelling everything."""
        self._finish(_Outcome(128 + number))
        if not self._is_joined:
            main.cancel()

    async def _use(self, environment: Environment) -> int:
        raise NotImplementedError

    async def _copy_streams(self, process: Process, *, tty: bool, has_input: bool) -> _Outcome:
        async with asyncio.TaskGroup() as tasks:
            signals = SignalForwarder(
                process,
                self._terminal,
                tasks,
                lambda code, text: self._finish(_Outcome(code, text=text)),
            )
            self._suspend = signals.suspend
            self._install(signals)
            if self._terminal is not None:
                self._terminal.make_raw()
                signals.resize()  # the size may have changed since the start request
            copying = [tasks.create_task(self._copy_output(process, tty=tty))]
            if has_input:
                copying.append(tasks.create_task(self._send_input(process)))
            try:
                outcome = await self._wait_for_outcome(process)
            finally:
                if self._terminal is not None:
                    self._terminal.restore()
                for task in copying:
                    task.cancel()
                signals.remove()
        if not outcome.has_ended and (sequence := self._screen.reset_sequence()):
            with contextlib.suppress(OSError):
                os.write(1, sequence)
        for text in filter(None, (outcome.text, *self._notes(process))):
            print_status(text)
        return outcome

    def _install(self, signals: SignalForwarder) -> None:
        raise NotImplementedError

    def _notes(self, process: Process) -> list[str]:
        """What the user is told after the end."""
        raise NotImplementedError

    async def _wait_for_outcome(self, process: Process) -> _Outcome:
        return await self._outcome

    def _finish(self, outcome: _Outcome) -> None:
        if not self._outcome.done():
            self._outcome.set_result(outcome)

    def _print_status(self, text: str) -> None:
        print_status(text, is_raw=self._is_raw)

    def _print_connection_status(self, text: str) -> None:
        if not self._outcome.done():  # afterwards the connection no longer matters
            escape = self._arguments.escape if self._is_raw else None
            has_way_out = escape is not None and not text.endswith("reconnected")
            self._print_status(f"{text}; to leave, type Enter {escape}." if has_way_out else text)

    def _print_target_stderr(self, line: str) -> None:
        print_error(line, is_raw=self._is_raw)

    @property
    def _is_raw(self) -> bool:
        return self._terminal is not None and self._terminal.is_raw

    async def _copy_output(self, process: Process, *, tty: bool) -> None:
        """Write output until its end; the outcome is then the exit code."""
        try:
            await self._writer.write_output(process, self._track_screen_modes if tty else None)
            self._finish(_Outcome(command_code(await process.wait()), has_ended=True))
        except BrokenPipeError:
            # As if the command itself had written to the closed pipe.
            self._finish(_Outcome(128 + signal.SIGPIPE))
        except OSError as error:
            text = f"cannot write output: {error.strerror}"
            self._finish(_Outcome(self.write_failure_code, text=text))
        except ExecServerError as error:
            text = describe_error(error, self._target)
            self._finish(_Outcome(EXIT_CONNECTION, text=text))

    @contextlib.contextmanager
    def _track_screen_modes(self, data: bytes) -> Iterator[None]:
        """Inspect output that the block writes, and keep the restorer process up to date."""
        before = self._screen.reset_sequence()
        self._screen.feed(data)
        while_written = self._tell_restorer(before)
        yield
        self._screen.settle()
        self._tell_restorer(while_written)

    def _tell_restorer(self, before: bytes) -> bytes:
        sequence = self._screen.reset_sequence()
        if self._terminal is not None and sequence != before:
            self._terminal.set_reset_sequence(sequence)
        return sequence

    async def _send_input(self, process: Process) -> None:
        """Send stdin to the command, and what is to follow it."""
        try:
            if self._can_read:
                await self._copy_stdin(process)
            await self._end_input(process)
        except ExecServerError:
            pass  # stdin is closed; `_copy_output` reports a lost session

    async def _end_input(self, process: Process) -> None:
        raise NotImplementedError

    async def _copy_stdin(self, process: Process) -> None:
        escapes = EscapeParser(self._arguments.escape if self._terminal is not None else None)
        reader = StdinReader(0)
        while data := await reader.read():
            for item in escapes.feed(data):
                if isinstance(item, bytes):
                    await process.write(item)
                elif item is Escape.TERMINATE:
                    self._finish(self._escaped())
                elif item is Escape.SUSPEND:
                    self._suspend()
                else:
                    text = HELP_TEXT.format(self._arguments.escape, self.escape_effect)
                    self._print_status(f"\n{text}")

    def _escaped(self) -> _Outcome:
        """The outcome after the user has typed the escape that leaves."""
        raise NotImplementedError


class _Execution(_StreamCopy):
    """A command that ends with this program."""

    leaving_signals = FORWARDED
    write_failure_code = EXIT_NOT_RUN
    escape_effect = "end the command and leave"

    def __init__(
        self, arguments: argparse.Namespace, target: Target, terminal: Terminal | None
    ) -> None:
        super().__init__(arguments, target, terminal)
        self._variables = command_variables(arguments.env, tty=arguments.tty)
        self._policy = load_policy("--sandbox", arguments.sandbox)
        self._is_late = False

    async def _use(self, environment: Environment) -> int:
        arguments = self._arguments
        process = environment.start(
            arguments.argv or [environment.info.shell.path, "-l"],
            cwd=arguments.cwd,
            env=self._variables,
            tty=arguments.tty,
            size=window_size(0) if self._terminal is not None else None,
            stdin=self._can_read,
            sandbox=command_sandbox(self._policy, arguments.cwd, environment.info),
            user=arguments.user,
        )
        async with contextlib.AsyncExitStack() as stack:
            with _describe_start_errors(arguments, self._target):
                await stack.enter_async_context(process)
            has_input = self._can_read or arguments.tty
            outcome = await self._copy_streams(process, tty=arguments.tty, has_input=has_input)
            if outcome.has_ended:
                # Background children end with the session, or on request, which is not answered.
                if not environment.capabilities.session_close:
                    environment.session.post(TERMINATE, TerminateParams(process.id))
                return outcome.code
            is_killed = await self._kill(process)
            if self._is_late or not is_killed:
                self._print_end(is_killed=is_killed)
            if not is_killed:
                # The server is unreachable: do not wait for it once more.
                environment.session.is_silent = True
                await environment.session.close()
            return outcome.code

    def _print_end(self, *, is_killed: bool) -> None:
        """Tell what became of a command that has not ended by itself."""
        unknown = "may still run, because the server did not report its end"
        if not self._is_late:
            print_status(f"the command {unknown}")
            return
        limit = f"{self._arguments.timeout:g} s"
        if is_killed:
            print_status(f"the command was killed after {limit}")
        else:
            print_status(f"the command did not end within {limit}; it {unknown}")

    def _install(self, signals: SignalForwarder) -> None:
        signals.install()

    async def _wait_for_outcome(self, process: Process) -> _Outcome:
        limit = self._arguments.timeout
        await asyncio.wait([self._outcome], timeout=limit)
        if not self._outcome.done():
            if process.exit_code is None:
                self._is_late = True
                self._finish(_Outcome(EXIT_TIMEOUT))
            else:
                await self._end_output(process, command_code(process.exit_code))
        return self._outcome.result()

    async def _end_output(self, process: Process, code: int) -> None:
        """Kill the children that keep the output of an exited command open; write what is left."""
        await self._kill(process)
        while not self._outcome.done():
            await asyncio.wait([self._outcome], timeout=REST_SECONDS)
            # Some servers cannot kill such children.
            if not process.is_over and not self._writer.is_writing:
                self._finish(_Outcome(code))

    async def _kill(self, process: Process) -> bool:
        """Whether the server has killed the command in time."""
        with contextlib.suppress(TimeoutError, ExecServerError):
            async with asyncio.timeout(TERMINATE_SECONDS):
                await process.kill()
                return True
        return False

    def _notes(self, process: Process) -> list[str]:
        denial, lost = process.sandbox_denial, process.lost_bytes
        notes = [] if denial is None else [printable(line) for line in denial_lines(denial)]
        if lost:
            notes.append(f"{lost} bytes of output were lost: more than the server buffers")
        return notes

    async def _end_input(self, process: Process) -> None:
        try:
            await process.close_stdin()
        except Unsupported:
            self._print_status(
                "this server cannot close the command's stdin; "
                "if the command waits for the end of its input, end it with Ctrl-C"
            )

    def _escaped(self) -> _Outcome:
        return _Outcome(EXIT_CONNECTION, text=f"terminated by {self._arguments.escape}.")


class _Attachment(_StreamCopy):
    """A detached command, which goes on when this program leaves."""

    leaving_signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    write_failure_code = EXIT_FAILURE
    escape_effect = "leave; the command goes on"

    async def _use(self, environment: Environment) -> int:
        async with attached(environment, self._target, self._arguments.name) as process:
            self._is_joined = True
            if not process.tty:
                self._terminal = None  # its keys are lines, and Ctrl-C is a signal
            has_input = process.has_stdin and self._can_read
            outcome = await self._copy_streams(process, tty=process.tty, has_input=has_input)
            return outcome.code

    def _install(self, signals: SignalForwarder) -> None:
        if self._terminal is not None:
            self._loop.add_signal_handler(signal.SIGWINCH, signals.resize)

    def _notes(self, process: Process) -> list[str]:
        lost = process.lost_bytes
        return [f"{lost} bytes of older output are not retained any more"] if lost else []

    async def _end_input(self, process: Process) -> None:
        """Do not send the end: others may be attached, and go on writing."""

    def _escaped(self) -> _Outcome:
        return _Outcome(0, text=f"left {self._arguments.name}, which goes on")


@contextlib.contextmanager
def _describe_start_errors(arguments: argparse.Namespace, target: Target) -> Iterator[None]:
    try:
        yield
    except (ConnectionLost, SessionLost):
        raise
    except ExecServerError as error:
        raise start_failure(error, arguments.argv, target.label) from None


def command_code(code: int) -> int:
    """The exit code for that of a command: servers before 0.140 report -1 for every signal."""
    return 128 if code == -1 else code & 0xFF


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
            with _describe_start_errors(arguments, target):
                await process
            await process.aclose()
        print_text(f"{process.name}\n")
        return 0

    return run_until_signal(work)
