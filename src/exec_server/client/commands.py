"""CommandRun: one command from its start to its exit, with its output in a Result.

`run_many` runs several; SystemCommands runs those that the client needs for itself.

Output is collected as it is received. If it is also delivered, to a callback or to files, it passes
the queue of the process, so that a slow receiver slows the command down and loses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypedDict, TypeVar

from exec_server.client.arguments import AnyNetworkProxy, AnyPath, AnySandbox
from exec_server.client.engine.flow_control import separate_consumer
from exec_server.client.engine.recovery import KILL_SECONDS, RemoteProcess
from exec_server.client.engine.server_features import SYSTEM_FIRST
from exec_server.client.exceptions import CommandDenied, CommandFailed, ProgramNotFound, Timeout
from exec_server.client.output import CollectedOutput, Delivery, OnOutput, OutputLimit, Target
from exec_server.client.process import KILLED, Process, ProcessInput
from exec_server.client.results import Result, RunProgress
from exec_server.errors import InternalError, StdinClosed
from exec_server.protocol.process import OutputParams

if TYPE_CHECKING:
    from exec_server.client.transfer.plan import Commands


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
# A slow receiver of the output may need longer for the rest, which pipes and servers limit.
REST_BYTES: Final = 4 * 1_048_576

T = TypeVar("T")

# Enough to hide the latency of a connection, without starting more than a small machine bears.
CONCURRENCY: Final = 8

# The exit code of a shell that has not found a program.
_NO_PROGRAM: Final = 127


class CommandRun(Process):
    """A command whose output is collected; for one `to_exit`."""

    _collected: CollectedOutput
    _delivery: Delivery | None = None
    _delivering: asyncio.Future[None] | None = None

    async def to_exit(
        self,
        data: bytes | None,
        seconds: float | None,
        output_limit: int | OutputLimit,
        *,
        leave_running: bool,
        delivery: Delivery,
    ) -> Result:
        """Start the command, send `data` to it, and wait for its exit; raises Timeout.

        Children that go on are killed unless `leave_running`. Whatever is raised, the command is
        killed with all its descendants.
        """
        began = asyncio.get_running_loop().time()
        self._collected = CollectedOutput(output_limit)
        self._delivery = delivery if delivery.has_receivers else None
        remote = self._register()
        scope = asyncio.timeout(seconds)
        try:
            async with scope:
                await self._exit(remote, data)
            await self._wait_for_rest(remote)
            if not leave_running:
                await self._kill_rest(remote)
            await self._finish_delivery()
        except BaseException as error:
            await self._kill_rest(remote)
            if isinstance(error, TimeoutError) and scope.expired():
                assert seconds is not None
                await self._finish_delivery()
                is_killed = self.exit_code is not None
                raise Timeout(seconds, self._result(began), is_killed=is_killed) from None
            raise
        finally:
            if self._delivering is not None:
                self._delivering.cancel()
            self._leave(remote)
        return self._result(began)

    async def _exit(self, remote: RemoteProcess, data: bytes | None) -> None:
        """Start the command and wait for its exit."""
        await self._processes.start(remote, self._params, self._name)
        if self._delivery is not None:
            self._delivering = self._session.spawn(self._deliver(self._delivery))
            self._delivering.add_done_callback(self._fail_with)
        writing: asyncio.Future[None] | None = None
        if data is None and self._params.tty:
            data = b""  # a terminal has no end of input by itself
        if data is not None and (self._params.pipe_stdin or self._params.tty):
            writing = self._session.spawn(self._write_input(data))
            writing.add_done_callback(self._fail_with)
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

    def _fail_with(self, work: asyncio.Future[None]) -> None:
        """Fail if input was not written or output not taken: the command could wait forever."""
        if not work.cancelled() and (error := work.exception()) is not None:
            self._failure = self._failure or error
            self._changed.set()

    async def _deliver(self, delivery: Delivery) -> None:
        """Pass the output to its receivers, until it ends or is discarded."""
        separate_consumer()  # the task that waits for the exit is another one
        output = aiter(self)
        while chunks := await output.read_some():
            for chunk in chunks:
                self._collected.add(chunk.stream, chunk.data)
            await delivery.deliver(chunks)

    async def _finish_delivery(self) -> None:
        """Deliver the output that was received, and no more; raises the error of a receiver."""
        if self._delivering is not None:
            self._is_output_discarded = True
            self._changed.set()
            await self._delivering

    async def _wait_for_rest(self, remote: RemoteProcess) -> None:
        """Wait for the end of the output, or until nothing more is to be expected."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + REST_SECONDS
        most_bytes = self._collected.received + REST_BYTES
        while not self.is_over:
            received = self._collected.received
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(QUIET_SECONDS):
                    await self._wait_until_over()
            is_behind = bool(self._output) and self._collected.received < most_bytes
            if is_behind or self._is_catching_up(remote):
                continue  # the server has output that could not be received yet
            if self._collected.received == received or loop.time() >= deadline:
                break
        if self._failure is not None:
            raise self._failure

    def _is_catching_up(self, remote: RemoteProcess) -> bool:
        is_recovering = remote.recovery is not None and not remote.recovery.done()
        return is_recovering or not self._session.is_connected

    async def _wait_until_over(self) -> None:
        consumers = self._session.flow_control.begin_wait(self._output)
        try:
            while not self.is_over:
                await self._wait_for_change()
        finally:
            self._session.flow_control.end_wait(consumers, self._output)

    async def _kill_rest(self, remote: RemoteProcess) -> None:
        """Kill what may run, and wait for the rest of its output, for KILL_SECONDS in all."""
        if self._is_closed or not remote.may_run:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_SECONDS):
                await asyncio.wait([self._processes.kill(remote)])
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
            stdout=output.stdout,
            stderr=output.stderr,
            # Without an exit event a kill was requested.
            exit_code=KILLED if self.exit_code is None else self.exit_code,
            duration=asyncio.get_running_loop().time() - began,
            sandbox_denied=self.sandbox_denied,
            sandbox_denial=self.sandbox_denial,
            lost_bytes=self.lost_bytes + output.lost_stdout + output.lost_stderr,
            lost_stdout=output.lost_stdout,
            lost_stderr=output.lost_stderr,
        )

    def on_output(self, event: OutputParams) -> None:
        self._collected.received += len(event.chunk)
        if self._delivery is None:
            self._collected.add(event.stream, event.chunk)
        elif not self._is_output_discarded:
            super().on_output(event)


def checked_result(result: Result) -> Result:
    """The result, if its exit code is 0; raises CommandFailed or CommandDenied."""
    if not result.exit_code:
        return result
    is_denied = result.sandbox_denied or result.sandbox_denial is not None
    raise CommandDenied(result) if is_denied else CommandFailed(result)


# run_many: several commands, some of them at the same time.
class RunOptions(TypedDict, total=False):
    """The options of Environment.run, for the methods that pass them on."""

    cwd: AnyPath | None
    env: Mapping[str, AnyPath] | None
    clean_env: bool
    timeout: float | None
    input: bytes | None
    sandbox: AnySandbox | None
    tty: bool
    merge_stderr: bool
    user: str | int | None
    network_proxy: AnyNetworkProxy | None
    check: bool
    output_limit: int | OutputLimit
    leave_running: bool
    on_output: OnOutput | None
    stdout: Target | None
    stderr: Target | None


async def run_many(
    run: Callable[[T], Awaitable[Result]],
    commands: Sequence[T],
    *,
    concurrency: int,
    progress: Callable[[RunProgress], None] | None,
) -> list[Result]:
    """Run all commands, at most `concurrency` at a time; see Environment.run_many."""
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, not {concurrency}")
    results: dict[int, Result] = {}
    waiting = iter(enumerate(commands))
    failures: list[Exception] = []

    async def work() -> None:
        for index, command in waiting:
            try:
                result = results[index] = await run(command)
                if progress is not None:
                    progress(RunProgress(len(results), len(commands), index, result))
            except Exception as error:
                failures.append(error)
                raise

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(concurrency, len(commands))):
                tasks.create_task(work())
    except BaseExceptionGroup:
        if not failures:
            raise
        raise failures[0] from None  # the others were cancelled, or failed after it
    return [results[index] for index in range(len(commands))]


# SystemCommands: commands of the machine that the client runs for itself, such as find and xargs.
#
# The PATH of a server may begin with directories of a project (`.venv/bin`, `node_modules/.bin`),
# where a confined command may have put a program of any name. For these commands the directories
# of the system come first.
def with_system_programs(argv: Sequence[str]) -> list[str]:
    """A command, or a script of `/bin/sh -c`, that finds programs of the system first."""
    if list(argv[:2]) == ["/bin/sh", "-c"]:
        return [*argv[:2], SYSTEM_FIRST + argv[2], *argv[3:]]
    return ["/bin/sh", "-c", f'{SYSTEM_FIRST}exec "$@"', "sh", *argv]


class SystemCommands:
    """Runs commands with programs of the system, through an environment."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands

    async def run(self, argv: Sequence[str], **options: Any) -> Result:
        """Raises ProgramNotFound if a command, not one of a script, does not exist."""
        done = await self._commands.run(with_system_programs(argv), **options)
        if done.exit_code == _NO_PROGRAM and argv[0] != "/bin/sh":
            text = "No such file or directory (os error 2)"
            error = InternalError(f"cannot start {argv[0]}: {text}")
            raise ProgramNotFound.from_rpc(error, errno.ENOENT, argv[0])
        return done

    def start(self, argv: Sequence[str], **options: Any) -> Process:
        """Its exit code is 127 if the command does not exist."""
        return self._commands.start(with_system_programs(argv), **options)


class CommandsAs:
    """Runs commands as another user."""

    def __init__(self, commands: Commands, user: str | None) -> None:
        self._commands = commands
        self._user = user

    def run(self, *args: Any, **kwargs: Any) -> Awaitable[Result]:
        return self._commands.run(*args, user=self._user, **kwargs)

    def start(self, *args: Any, **kwargs: Any) -> Process:
        return self._commands.start(*args, user=self._user, **kwargs)
