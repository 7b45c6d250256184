"""CommandRun: one command from its start to its exit, with its output in a Result.

Delivered output passes the queue of the process, so that a slow receiver slows the command down.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import dataclasses
import errno
import inspect
import io
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, Self, TypedDict, Unpack

import msgspec

from exec_server.client.arguments import (
    AnyNetworkProxy,
    AnyPath,
    AnySandbox,
    argv_list,
    check_callable,
)
from exec_server.client.engine.flow_control import separate_consumer
from exec_server.client.engine.recovery import KILL_SECONDS, UNANSWERED_KILL_SECONDS, RemoteProcess
from exec_server.client.engine.server_features import SYSTEM_FIRST
from exec_server.client.exceptions import CommandDenied, CommandFailed, ProgramNotFound, Timeout
from exec_server.client.handle import Handle
from exec_server.client.process import KILLED, QUIET_SECONDS, REST_SECONDS, Process, ProcessInput
from exec_server.client.results import Chunk, Result, RunProgress
from exec_server.errors import Cancelled, InternalError, InvalidParams, StdinClosed
from exec_server.protocol.process import OutputParams, Stream

# Servers count queued input in pieces, and some stop answering if there are too many. So at most
# INPUT_PIECES pieces are sent, each but the last of at least INPUT_PIECE_BYTES.
INPUT_PIECES: Final = 64
INPUT_PIECE_BYTES: Final = 262_144

# A slow receiver of the output may need longer for the rest, which pipes and servers limit.
REST_BYTES: Final = 4 * 1_048_576

# Output of a command that the client runs for its own purposes: a digest, or error messages.
HELPER_OUTPUT_BYTES: Final = 65_536
# The exit code of a shell that has not found a program.
_NO_PROGRAM: Final = 127


# Called with each chunk; a coroutine that it returns is awaited before the next chunk.
OnOutput = Callable[[Chunk], Awaitable[None] | None]
Logger = logging.Logger | logging.LoggerAdapter[Any]
# A local file by its path, an open file of bytes or text such as `sys.stdout`, or a logger.
OutputTarget = str | os.PathLike[str] | io.IOBase | Logger

# A longer line is logged in pieces.
LOGGED_CHARACTERS = 65_536
# The end of a stream grows by so much beyond its limit before it is cut, so that small chunks are
# not moved each time.
SLACK_BYTES: Final = 65_536


class Delivery:
    """The receivers of a command's output, for `async with`; a terminal's output is stdout."""

    def __init__(
        self, on_output: OnOutput | None, stdout: OutputTarget | None, stderr: OutputTarget | None
    ) -> None:
        """Raises TypeError for a target of another type, ValueError for `stderr="stdout"`."""
        if stderr == "stdout":  # in other libraries it merges the streams
            raise ValueError(
                'stderr="stdout" would write a file of that name: use merge_stderr=True, or '
                '"./stdout" for the file'
            )
        check_callable(on_output, "on_output")
        self._on_output = on_output
        self._writers = {
            stream: _writer(target, stream)
            for target, stream in ((stdout, _STDOUT), (stderr, _STDERR))
            if target is not None
        }
        if _is_same_path(stdout, stderr):  # opened twice, each would overwrite the other
            self._writers[_STDERR] = self._writers[_STDOUT]

    @property
    def has_receivers(self) -> bool:
        return self._on_output is not None or bool(self._writers)

    async def __aenter__(self) -> Self:
        self._opened = await asyncio.to_thread(self._open) if self._writers else None
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._opened is not None:
            await asyncio.to_thread(self._opened.close)

    def _open(self) -> contextlib.ExitStack:
        with contextlib.ExitStack() as opened:
            for writer in dict.fromkeys(self._writers.values()):
                writer.open()
                opened.callback(writer.close)
            return opened.pop_all()

    async def deliver(self, chunks: Sequence[Chunk]) -> None:
        """Pass chunks to all receivers; raises the exception of the first one that fails."""
        if self._on_output is not None:
            for chunk in chunks:
                waiting = self._on_output(chunk)
                if inspect.isawaitable(waiting):
                    await waiting
        if self._writers:
            # A disk, a pipe or a terminal may block.
            await asyncio.to_thread(self._write, chunks)

    def _write(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            writer = self._writers.get(_STDERR if chunk.stream == "stderr" else _STDOUT)
            if writer is not None:
                writer.write(chunk.data)
        for writer in self._writers.values():
            writer.flush()


class _Writer(Protocol):
    def open(self) -> None: ...
    def write(self, data: bytes) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class _PathWriter:
    """A local file that is replaced when the command starts."""

    _file: io.BufferedWriter

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path

    def open(self) -> None:
        self._file = open(self._path, "wb")  # noqa: SIM115 - `close` closes it

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _FileWriter:
    """An open file of bytes, which stays open."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def open(self) -> None: ...

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None: ...


class _TextWriter(_FileWriter):
    """An open file of text; characters may be divided between chunks."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, data: bytes) -> None:
        self._file.write(self._decoder.decode(data))

    def close(self) -> None:
        if remaining := self._decoder.decode(b"", final=True):
            self._file.write(remaining)


class _LogWriter:
    """A logger, which gets each line."""

    def __init__(self, logger: Logger, level: int) -> None:
        self._logger = logger
        self._level = level
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._line = ""

    def open(self) -> None: ...

    def write(self, data: bytes) -> None:
        *lines, self._line = (self._line + self._decoder.decode(data)).split("\n")
        for line in lines:
            self._log(line)
        if len(self._line) > LOGGED_CHARACTERS:
            self._log(self._line)
            self._line = ""

    def flush(self) -> None: ...

    def close(self) -> None:
        self._line += self._decoder.decode(b"", final=True)
        if self._line:
            self._log(self._line)

    def _log(self, line: str) -> None:
        self._logger.log(self._level, "%s", line.removesuffix("\r"))


_STDOUT: Stream = "stdout"
_STDERR: Stream = "stderr"


def _is_same_path(stdout: OutputTarget | None, stderr: OutputTarget | None) -> bool:
    if isinstance(stdout, str | os.PathLike) and isinstance(stderr, str | os.PathLike):
        return os.path.realpath(stdout) == os.path.realpath(stderr)
    return False


def _writer(target: OutputTarget, stream: Stream) -> _Writer:
    if isinstance(target, str | os.PathLike):
        return _PathWriter(target)
    if isinstance(target, logging.Logger | logging.LoggerAdapter):
        return _LogWriter(target, logging.INFO if stream == _STDOUT else logging.WARNING)
    if isinstance(target, io.TextIOBase) or hasattr(target, "encoding"):
        return _TextWriter(target)
    if hasattr(target, "write") and hasattr(target, "flush"):
        return _FileWriter(target)
    kind = type(target).__name__
    raise TypeError(f"{stream} must be a path, an open file or a logger, not {kind}")


# CollectedOutput: the output of a command up to a limit, for both streams together or for each.
class OutputLimit(msgspec.Struct, frozen=True):
    """A limit for each stream: its first `head` bytes and its last `tail` bytes are kept."""

    head: int = 0
    tail: int = 0


class CollectedOutput:
    """The output of a command up to a limit; the rest is counted, for each stream."""

    def __init__(self, limit: int | OutputLimit) -> None:
        # Not lists of chunks: chunks of one byte would take fifty times their size.
        self._streams: dict[bool, _SharedLimit | _HeadAndTail]
        self.received = 0
        # The bytes of each stream before those that are missing; None: they are missing at its end.
        self.kept_head = limit.head if isinstance(limit, OutputLimit) else None
        if isinstance(limit, OutputLimit):
            _check_size(limit.head, "head of output_limit")
            _check_size(limit.tail, "tail of output_limit")
            self._streams = {is_error: _HeadAndTail(limit) for is_error in (False, True)}
            return
        _check_size(limit, "output_limit")
        remaining = _Remaining(limit)
        self._streams = {is_error: _SharedLimit(remaining) for is_error in (False, True)}

    def add(self, stream: Stream, data: bytes) -> None:
        self._streams[stream == "stderr"].add(data)

    @property
    def stdout(self) -> bytes:
        return self._streams[False].content()

    @property
    def stderr(self) -> bytes:
        return self._streams[True].content()

    @property
    def lost_stdout(self) -> int:
        return self._streams[False].lost_bytes

    @property
    def lost_stderr(self) -> int:
        return self._streams[True].lost_bytes


def _check_size(size: int, name: str) -> None:
    """Raise TypeError for a size that cannot cut bytes, InvalidParams for a negative one."""
    if not isinstance(size, int):
        raise TypeError(f"{name} must be an int, not {type(size).__name__}")
    if size < 0:
        raise InvalidParams(f"{name} must not be negative: {size}")


class _Remaining:
    """The bytes that two streams may still keep."""

    def __init__(self, size: int) -> None:
        self.size = size


class _SharedLimit:
    """The beginning of a stream that shares its limit with the other one."""

    def __init__(self, remaining: _Remaining) -> None:
        self._remaining = remaining
        self._data = bytearray()
        self.lost_bytes = 0

    def add(self, data: bytes) -> None:
        part = data[: self._remaining.size]
        self._remaining.size -= len(part)
        self.lost_bytes += len(data) - len(part)
        self._data += part

    def content(self) -> bytes:
        return bytes(self._data)


class _HeadAndTail:
    """The beginning and the end of a stream."""

    def __init__(self, limit: OutputLimit) -> None:
        self._limit = limit
        self._head = bytearray()
        self._tail = bytearray()
        self._received = 0

    def add(self, data: bytes) -> None:
        self._received += len(data)
        taken = min(len(data), self._limit.head - len(self._head))
        self._head += data[:taken]
        self._tail += data[taken:]
        if len(self._tail) > self._limit.tail + SLACK_BYTES:
            self._cut()

    def _cut(self) -> None:
        del self._tail[: max(0, len(self._tail) - self._limit.tail)]

    def content(self) -> bytes:
        self._cut()
        return bytes(self._head) + bytes(self._tail)

    @property
    def lost_bytes(self) -> int:
        return self._received - len(self._head) - min(len(self._tail), self._limit.tail)


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
                is_killed = self.exit_code is not None or not remote.may_run
                raise Timeout(
                    seconds, self._result(began), is_killed=is_killed, was_sent=remote.may_run
                ) from None
            raise
        finally:
            if self._delivering is not None:
                self._delivering.cancel()
            self._leave(remote)
        return self._result(began)

    async def _exit(self, remote: RemoteProcess, data: bytes | None) -> None:
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
        """Kill what may run, and wait for the rest of its output, for KILL_SECONDS in all.

        A server that can kill the children of an exited command is asked also if the output has
        ended: children whose output goes elsewhere run on.
        """
        if not remote.may_run:
            return
        if self._is_closed and not self._capabilities.process_terminate_exited:
            return
        answers = remote.is_started and self._session.is_connected
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_SECONDS if answers else UNANSWERED_KILL_SECONDS):
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
            kept_head=output.kept_head,
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


# run_many and run_each: several commands, some of them at the same time.
class RunOptions(TypedDict, total=False):
    """The options of Environment.run, for the methods that pass them on."""

    cwd: AnyPath | None
    env: Mapping[str, AnyPath] | None
    clean_env: bool
    timeout: float | None
    input: bytes | str | None
    sandbox: AnySandbox | None
    tty: bool
    merge_stderr: bool
    user: str | int | None
    network_proxy: AnyNetworkProxy | None
    check: bool
    output_limit: int | OutputLimit
    leave_running: bool
    on_output: OnOutput | None
    stdout: OutputTarget | None
    stderr: OutputTarget | None


_NO_NUMBERS: Final = iter(range(0))


@dataclasses.dataclass(frozen=True, init=False)
class Command:
    """A command with options of its own, for run_many and run_each: those of Environment.run."""

    argv: tuple[AnyPath, ...]
    options: RunOptions

    def __init__(self, argv: Iterable[AnyPath], **options: Unpack[RunOptions]) -> None:
        """An option that is not given is that of the call."""
        if unknown := options.keys() - RunOptions.__annotations__.keys():
            raise TypeError(f"Command() got an unexpected keyword argument {min(unknown)!r}")
        object.__setattr__(self, "argv", tuple(argv_list(argv)))
        object.__setattr__(self, "options", options)


class ResultStream(Handle):
    """The results of several commands as they come, for `async for`; see Environment.run_each.

    `await`, `async with` or the first result that is asked for starts them. `aclose`, or leaving
    the block, kills those that run and starts no further one.
    """

    def __init__(
        self,
        run: Callable[[int], Awaitable[Result]],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Future[None]],
        total: int,
        *,
        concurrency: int,
        stops: bool = False,
    ) -> None:
        """`run` runs the command with a number, `spawn` starts a task that may be cancelled.

        With `stops`, no further command is started after one that raises an exception.
        """
        super().__init__()
        if not isinstance(concurrency, int):
            raise TypeError(f"concurrency must be an int, not {type(concurrency).__name__}")
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {concurrency}")
        self._run = run
        self._spawn = spawn
        self._total = total
        self._concurrency = concurrency
        self._stops = stops
        self._numbers = iter(range(total))
        self._done = 0
        self._is_begun = False
        self._workers: list[asyncio.Future[None]] = []
        # As many results as commands: a slow reader holds up the next ones.
        self._results: deque[RunProgress] = deque()
        self._working = 0
        self._changed = asyncio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RunProgress:
        """The next result; raises Cancelled if the stream was closed before the last one."""
        if not self._is_begun:
            await self
        await self._wait_until(lambda: bool(self._results) or self._is_over)
        if self._results:
            self._changed.set()
            return self._results.popleft()
        if self._done < self._total:
            raise Cancelled("the commands were cancelled before the last one has ended")
        raise StopAsyncIteration

    @property
    def _is_over(self) -> bool:
        return not self._working and all(worker.done() for worker in self._workers)

    async def _open(self) -> None:
        self._is_begun = True
        for _ in range(min(self._concurrency, self._total)):
            worker = self._spawn(self._work())
            worker.add_done_callback(lambda _: self._changed.set())
            self._workers.append(worker)

    async def _close(self) -> None:
        for worker in self._workers:
            worker.cancel()
        await self._wait_until(lambda: self._is_over)

    async def _work(self) -> None:
        self._working += 1
        try:
            while (number := next(self._numbers, None)) is not None:
                try:
                    outcome: Result | Exception = await self._run(number)
                except Exception as error:
                    outcome = error
                    if self._stops:
                        self._numbers = _NO_NUMBERS
                await self._wait_until(lambda: len(self._results) < self._concurrency)
                self._done += 1
                self._results.append(RunProgress(self._done, self._total, number, outcome))
                self._changed.set()
        finally:
            self._working -= 1
            self._changed.set()

    async def _wait_until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            self._changed.clear()
            await self._changed.wait()


# Programs of the system come first: a server's PATH may begin with directories of a project, where
# a confined command may have put a program of any name.
def with_system_programs(argv: Sequence[str]) -> list[str]:
    """A command, or a script of `/bin/sh -c`, that finds programs of the system first."""
    if list(argv[:2]) == ["/bin/sh", "-c"]:
        return [*argv[:2], SYSTEM_FIRST + argv[2], *argv[3:]]
    return ["/bin/sh", "-c", f'{SYSTEM_FIRST}exec "$@"', "sh", *argv]


class SystemCommands:
    """Runs commands with programs of the system, by the methods of an environment."""

    def __init__(
        self,
        run: Callable[..., Awaitable[Result]],
        start: Callable[..., Process],
        user: str | None = None,
    ) -> None:
        """They run in `/` and as `user`, unless the options of a command say otherwise."""
        self._run = run
        self._start = start
        self._user = user

    def as_user(self, user: str | None) -> SystemCommands:
        return SystemCommands(self._run, self._start, user)

    async def run(self, argv: Sequence[str], **options: Any) -> Result:
        """Raises ProgramNotFound if a command, not one of a script, does not exist."""
        options = {"cwd": "/", "user": self._user, "output_limit": HELPER_OUTPUT_BYTES} | options
        result = await self._run(with_system_programs(argv), **options)
        if result.exit_code == _NO_PROGRAM and argv[0] != "/bin/sh":
            text = "No such file or directory (os error 2)"
            error = InternalError(f"cannot start {argv[0]}: {text}")
            raise ProgramNotFound.from_rpc(error, errno.ENOENT, argv[0])
        return result

    def start(self, argv: Sequence[str], **options: Any) -> Process:
        """Its exit code is 127 if the command does not exist."""
        options = {"cwd": "/", "user": self._user} | options
        return self._start(with_system_programs(argv), **options)
