"""Process: one command on the server while it runs; detached ones outlive sessions."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import reprlib
import uuid
from collections.abc import Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Self, get_args

import msgspec

from exec_server.client import exceptions
from exec_server.client.arguments import check_number, check_seconds
from exec_server.client.engine.flow_control import FlowRequests, OutputQueue, Reader
from exec_server.client.engine.recovery import (
    KILL_SECONDS,
    UNANSWERED_KILL_SECONDS,
    RemoteProcess,
    RemoteProcesses,
)
from exec_server.client.engine.session import ClientSession
from exec_server.client.handle import Handle
from exec_server.client.output import Lines, Pattern, PatternMatch, expect, wait_for_output
from exec_server.client.results import Chunk, Screen
from exec_server.errors import (
    ExecServerError,
    InternalError,
    InvalidParams,
    ProcessLost,
    StdinClosed,
    Unsupported,
)
from exec_server.protocol.decoding import Base64, Call
from exec_server.protocol.jsonrpc import Attached
from exec_server.protocol.process import (
    CLOSE_STDIN,
    READ,
    RESIZE,
    SIGNAL,
    WRITE,
    WRITE_BINARY,
    CloseStdinParams,
    Detach,
    ExitedParams,
    OutputParams,
    ProcessId,
    ReadParams,
    ResizeParams,
    Signal,
    SignalParams,
    StartParams,
    WriteBinaryParams,
    WriteParams,
    WriteResult,
)
from exec_server.protocol.sandbox import Denial

if TYPE_CHECKING:
    from exec_server.client.screen import TerminalScreen

# Size of one request: large enough to make the cost per request small, small enough to queue.
PIECE_BYTES: Final = 131_072
# Data that is sent and not acknowledged. A writer beyond either limit waits, so that a process
# that does not read slows its writer down. All of it is sent again after a lost connection, and
# some connections carry few calls at a time.
UNACKNOWLEDGED_BYTES: Final = 1_048_576
UNACKNOWLEDGED_PIECES: Final = 32

# Line ends in the initial mode of a terminal, which translates a return to a newline.
_LINE_ENDS: Final = (b"\n", b"\r", b"\x04")

_NO_EOF: Final = (
    "stdin cannot be closed; use run(input=...), or a terminal and write "
    'b"\\x04", or let the command recognise the end of its input by the data'
)

# How long a process may take to end after SIGTERM: enough for a web server or a database, and half
# of the time that `docker stop` allows.
GRACE_SECONDS: Final = 5.0
# Output of one `collect`: as much as is queued for a slow reader. The rest stays unread.
COLLECTED_BYTES: Final = 16 * 1_048_576
# Output that is kept by default: more than a caller can use, less than would exhaust the memory of
# this machine. The rest is counted in `lost_bytes`.
OUTPUT_BYTES: Final = 256 * 1_048_576
# The exit code of a killed process, as servers report it.
KILLED: Final = 128 + 9
# After the exit, children of the command may keep its output open for as long as they like. The
# rest of the command's own output arrives within milliseconds; on a slow network it keeps arriving.
# So `collect` and a run return when no output was received for the first time, a run at the latest
# after the second.
QUIET_SECONDS: Final = 0.2
REST_SECONDS: Final = 1.0

# A name that this client chooses is the program and a random number, because the answer that names
# it could be lost. The server checks names that callers choose.
_NAME_DIGITS: Final = 6
_PROGRAM_CHARACTERS: Final = 32
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_-]+")

# The key of a terminal for an interrupt, unless a program has changed it.
_CTRL_C: Final = b"\x03"
# Output requested at a time.
_READ_BYTES: Final = 262_144
_SESSIONS_ONLY: Final = "its processes end with the session of their client"


class ProcessInput:
    """The stdin of one process: numbered writes, which are sent again after a lost connection."""

    def __init__(self, session: ClientSession, process_id: ProcessId, *, is_terminal: bool) -> None:
        self._session = session
        self._id = process_id
        self.is_terminal = is_terminal
        self._last_number = 0
        self._is_inside_line = False
        self._unacknowledged = 0
        self._writes: set[asyncio.Future[None]] = set()
        self._failure: ExecServerError | None = None
        self._progress = asyncio.Event()
        # Keeps the pieces of one write together.
        self._lock = asyncio.Lock()

    def fail(self, error: ExecServerError) -> None:
        """Make this and all further writes raise `error`."""
        self._failure = self._failure or error
        self._progress.set()

    async def write(self, data: bytes, piece_bytes: int = PIECE_BYTES) -> None:
        """Send data, waiting if much is unacknowledged; raises StdinClosed, or an earlier error."""
        async with self._lock:
            if data:
                self._is_inside_line = data[-1:] not in _LINE_ENDS
            for piece in _pieces(data, piece_bytes):
                while self.is_full:
                    await self._wait_for_progress()
                self._check()
                self._last_number += 1
                self._unacknowledged += len(piece)
                self._spawn(self._write(piece, str(self._last_number)))

    @property
    def is_full(self) -> bool:
        """Whether a write would wait, because the process does not read what was sent."""
        return (
            self._unacknowledged >= UNACKNOWLEDGED_BYTES
            or len(self._writes) >= UNACKNOWLEDGED_PIECES
        )

    @property
    def can_close(self) -> bool:
        """Whether the server can close this input."""
        return self.is_terminal or self._session.features.capabilities.process_close_stdin

    async def close(self) -> None:
        """Close stdin after all writes; raises Unsupported if the server cannot.

        Does not wait for the writes: the caller may have to read the output of a process that
        reads its input slowly.
        """
        if self.is_terminal:
            # Ctrl-D completes the current read: inside of a line the first one delivers the
            # started line, and only the second one is the end of the input.
            await self.write(b"\x04\x04" if self._is_inside_line else b"\x04")
            return
        if not self.can_close:
            raise Unsupported("processCloseStdin", _NO_EOF)
        async with self._lock:
            self._check()
            earlier = list(self._writes)
            self.fail(StdinClosed("the input of the process was closed"))
            self._spawn(self._close(earlier))

    async def _close(self, earlier: list[asyncio.Future[None]]) -> None:
        if earlier:
            await asyncio.wait(earlier)
        try:
            await self._session.call_in_background(CLOSE_STDIN, CloseStdinParams(self._id))
        except ExecServerError:
            pass  # the process or the session has ended

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _wait_for_progress(self) -> None:
        self._check()
        self._progress.clear()
        await self._progress.wait()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        future = self._session.spawn(work)
        self._writes.add(future)
        future.add_done_callback(self._done)

    def _done(self, future: asyncio.Future[None]) -> None:
        self._writes.discard(future)
        self._progress.set()

    async def _write(self, piece: bytes, number: str) -> None:
        # In the background: a process that does not read its input must not exempt full queues
        # from flow control.
        features, send = self._session.features, self._session.call_in_background
        try:
            if features.capabilities.process_binary:
                data = Attached(WriteBinaryParams(self._id, number), piece)
                answer = await send(_WRITE_BINARY, data)
            else:
                params = WriteParams(self._id, Base64(piece), number)
                answer = await send(WRITE, params, is_retryable=features.repeats_writes_safely)
            status = answer.status
        except InternalError as error:
            self.fail(StdinClosed(f"the process takes no input: {error}"))
        except ExecServerError as error:
            self.fail(error)
        else:
            if status != "accepted":
                self.fail(StdinClosed(f"the process takes no input: {_REASONS[status]}"))
        finally:
            self._unacknowledged -= len(piece)


_WRITE_BINARY: Final[Call[Attached[WriteBinaryParams], WriteResult]] = Call(
    WRITE_BINARY.name, Attached, WriteResult
)
_REASONS: Final = {
    "unknownProcess": "it has ended",
    "stdinClosed": "it was started without stdin, or its stdin was closed",
    "starting": "it is still starting",
}


def _pieces(data: bytes, size: int) -> Iterator[bytes]:
    if isinstance(data, bytes) and len(data) <= size:
        return iter((data,) if data else ())  # not copied
    view = memoryview(data)
    return (bytes(view[start : start + size]) for start in range(0, len(data), size))


class Process(Handle):
    """A command that `await` or `async with` starts.

    `aclose`, or leaving the block, kills it with all its descendants, and so does closing its
    environment. Iterating gives its output in order. Raises SessionLost or ProcessLost if the
    further output cannot be known.
    """

    name: str | None = None
    """The name of a detached process."""
    _params: StartParams  # of a process that is started

    def __init__(
        self,
        session: ClientSession,
        processes: RemoteProcesses,
        params: StartParams | None,
        *,
        argv: tuple[str, ...],
        name: str,
        size: tuple[int, int] | None = None,
    ) -> None:
        """Prepare a start with `params`, whose process id is replaced by an unused one.

        `name` names the command in the error of a failed start. Without `params` a subclass opens
        the process.
        """
        super().__init__()
        self.argv = argv
        self._name = name
        self.exit_code: int | None = None
        self.sandbox_denied = False
        self.sandbox_denial: Denial | None = None
        self.lost_bytes = 0
        self._session = session
        self._processes = processes
        self._capabilities = session.features.capabilities
        if params is not None:
            self._params = params
        self._size = size  # of the terminal, if it is known
        self._screen: TerminalScreen | None = None
        self._remote: RemoteProcess | None = None
        self._input: ProcessInput | None = None
        self._output: OutputQueue  # set when it is started
        self._unread_gap = 0
        self._is_closed = False
        self._is_output_discarded = False
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        words = reprlib.repr(list(self.argv))
        name = "" if self.name is None else f" {self.name!r}"
        pid = "" if self._remote is None or self.pid is None else f", pid {self.pid}"
        return f"<{type(self).__name__}{name} {words}{pid}, {self._state_text()}>"

    def _state_text(self) -> str:
        if self._remote is None:
            return "not started"
        if self.exit_code is not None:
            return f"exited with code {self.exit_code}"
        if self._failure is not None:
            return "lost"
        return "running"

    async def _open(self) -> None:
        remote = self._register()
        try:
            await self._start(remote)
        except BaseException:
            if remote.may_run:
                self._processes.kill(remote)
            self._forget(remote)
            raise

    async def _start(self, remote: RemoteProcess) -> None:
        self._open_input(remote, is_terminal=self._params.tty, is_pipe=self._params.pipe_stdin)
        await self._processes.start(remote, self._params, self._name)

    def _open_input(self, remote: RemoteProcess, *, is_terminal: bool, is_pipe: bool) -> None:
        if is_terminal or is_pipe:
            self._input = ProcessInput(self._session, remote.id, is_terminal=is_terminal)

    async def _close(self) -> None:
        remote = self._started()
        self._discard_output()
        try:
            await self._kill_and_wait(UNANSWERED_KILL_SECONDS)
        finally:
            self._forget(remote)

    def _register(self) -> RemoteProcess:
        remote = self._remote = self._processes.open(self, is_detached=self.name is not None)
        requests = FlowRequests(self._session, remote.id)
        self._output = OutputQueue(self._session.flow_control, remote, requests)
        return remote

    def _forget(self, remote: RemoteProcess) -> None:
        """Receive no more events; pending waits fail if the exit is unknown."""
        self._processes.forget(remote)
        if self.exit_code is None:
            self.on_failed(ProcessLost("the process was abandoned before its exit was received"))

    def _started(self) -> RemoteProcess:
        if self._remote is None:
            raise RuntimeError("the process is not started: await it, or use it with `async with`")
        return self._remote

    @property
    def id(self) -> ProcessId:
        """The id of the process in the protocol."""
        return self._started().id

    @property
    def pid(self) -> int | None:
        """The process id on the server's machine; None if the server does not tell it."""
        return self._started().pid

    @property
    def returncode(self) -> int | None:
        """Another name of `exit_code`: 128 + N after signal N, not -N as in subprocess."""
        return self.exit_code

    @property
    def is_over(self) -> bool:
        """Whether the process has ended and all its output was received, or it was lost."""
        return self._is_closed or self._failure is not None

    def __aiter__(self) -> OutputIterator:
        return OutputIterator(self)

    async def __anext__(self) -> Chunk:
        return await self._next(None)

    async def read_some(self) -> list[Chunk]:
        """All queued output, or else the next chunk; an empty list at the end."""
        return await self._next_some(None)

    def lines(self) -> Lines:
        """The output by lines, for `async for`: texts without their ends, each of one stream.

        The end of a stream ends its last line. A line above 1 MiB is given in pieces.
        """
        return Lines(OutputIterator(self))

    async def read_until(
        self,
        pattern: Pattern,
        timeout: float | None = None,  # noqa: ASYNC109 - nothing is lost by it
    ) -> bytes:
        """Read the output of both streams up to and including the pattern, and return it.

        The pattern is a literal, or a compiled pattern of bytes. Raises TimeoutError after
        `timeout` seconds, and PatternNotFound if the output ends, or 16 MiB of it have no match;
        all output then stays unread.
        """
        match = await self.expect([pattern], timeout)
        return match.before + match.matched

    async def expect(
        self,
        patterns: Sequence[Pattern],
        timeout: float | None = None,  # noqa: ASYNC109 - nothing is lost by it
    ) -> PatternMatch:
        """Read the output of both streams up to and including the first match of any pattern.

        Of matches that begin at the same place, that of the first pattern wins. Exceptions are
        those of `read_until`: the end of the output is a PatternNotFound.
        """
        if isinstance(patterns, bytes | str | re.Pattern):
            raise TypeError("expect() takes a list of patterns: expect([b'$ ', b'password: '])")
        return await expect(OutputIterator(self), patterns, timeout)

    async def wait_for_output(
        self,
        pattern: Pattern,
        timeout: float | None = None,  # noqa: ASYNC109 - nothing is lost by it
    ) -> bytes:
        """Wait until the unread output contains the pattern, and return the text that matches.

        The output stays unread. Arguments and exceptions are those of `read_until`.
        """
        return await wait_for_output(OutputIterator(self), pattern, timeout)

    async def collect(self, seconds: float, *, limit: int = COLLECTED_BYTES) -> bytes:
        """Read the output of both streams for this time, or until the process is over.

        Returns as soon as `limit` bytes or more were read; the rest stays unread. Children that go
        on after the exit are not waited for.
        """
        self._started()
        check_seconds(seconds, "seconds")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        output, pieces, size = self._output, list[bytes](), 0
        while True:
            output.begin_read(None)
            while output and size < limit:
                pieces.append(output.pop_whole().data)
                size += len(pieces[-1])
            output.recover_skipped()
            if self._failure is not None and not pieces:
                raise self._failure
            if size >= limit or self.is_over or self._is_output_discarded:
                break
            until = deadline if self.exit_code is None else loop.time() + QUIET_SECONDS
            try:
                async with asyncio.timeout_at(min(until, deadline)):
                    await self._wait_for_change()
            except TimeoutError:
                break
        return b"".join(pieces)

    async def _next(self, reader: Reader | None) -> Chunk:
        """The next chunk, for a reader; raises StopAsyncIteration at the end."""
        await self._wait_for_output(reader)
        return self._output.pop()

    async def _wait_for_output(self, reader: Reader | None) -> None:
        """Wait until output is queued; raises StopAsyncIteration at the end."""
        self._started()
        output = self._output
        output.begin_read(reader)
        while not output:
            output.recover_skipped()
            if self._failure is not None:
                raise self._failure
            if self._is_closed or self._is_output_discarded:
                raise StopAsyncIteration
            await self._wait_for_change()

    async def _next_some(self, reader: Reader | None) -> list[Chunk]:
        try:
            await self._wait_for_output(reader)
        except StopAsyncIteration:
            return []
        chunks = []
        while self._output:
            chunks.append(self._output.pop_whole())
        return chunks

    async def wait(self, timeout: float | None = None) -> int:  # noqa: ASYNC109 - as in Popen
        """Wait for the exit and return the exit code.

        Raises TimeoutError after `timeout` seconds; the process goes on. Output can be read before,
        after, or at the same time. Unread output is kept as far as the queue has space for it.
        """
        self._started()
        check_seconds(timeout)
        scope = asyncio.timeout(timeout)
        try:
            async with scope:
                return await self._wait_for_exit()
        except TimeoutError:
            if not scope.expired():
                raise
            if self.exit_code is not None:
                return self.exit_code  # it exited in the same moment
            raise TimeoutError(f"{self._name} has not exited after {timeout:g} s") from None

    async def _wait_for_exit(self) -> int:
        consumers = self._session.flow_control.begin_wait(self._output)
        try:
            with self._output.waiting_for_exit():
                while self.exit_code is None:
                    if self._failure is not None:
                        raise self._failure
                    await self._wait_for_change()
        finally:
            self._session.flow_control.end_wait(consumers, self._output)
        return self.exit_code

    def _discard_output(self) -> None:
        self._is_output_discarded = True
        self._output.discard()
        self._changed.set()

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        self._session.check_loop()
        await self._changed.wait()

    async def write(self, data: bytes | str) -> None:
        """Send data, or a text in UTF-8, to stdin or the terminal, after all earlier writes.

        Waits only while too much is unacknowledged. Raises StdinClosed, perhaps for an earlier
        write.
        """
        if isinstance(data, str):
            data = data.encode()
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"data must be bytes or str, not {type(data).__name__}")
        await self._stdin().write(data)

    async def close_stdin(self) -> None:
        """Let the process read the end of its input; for a terminal, send Ctrl-D.

        Raises Unsupported if the server cannot close a pipe.
        """
        await self._stdin().close()

    def _stdin(self) -> ProcessInput:
        self._started()
        if self._input is None:
            raise StdinClosed("the process has no stdin: use start(..., stdin=True)")
        return self._input

    async def resize(self, rows: int, columns: int) -> None:
        """Change the size of the terminal; raises Unsupported if the server cannot."""
        if not self._capabilities.process_resize:
            raise Unsupported("processResize", "the terminal keeps its initial size")
        if self._screen is not None:
            await self.screen()  # earlier output was for the earlier size
        params = ResizeParams(self.id, rows, columns)
        await self._session.call(RESIZE, params, is_retryable=True, is_bound=True)
        self._size = rows, columns

    async def screen(self) -> Screen:
        """What a person would see on the terminal now; needs pyte, the extra `screen`.

        The output stays unread, and it may have been read before. Raises ImportError without pyte,
        ProcessLost if the server has forgotten the process.
        """
        self._started()
        if self._input is None or not self._input.is_terminal:
            raise RuntimeError("the process has no screen: use start(..., tty=True)")
        from exec_server.client.screen import DEFAULT_SIZE, TerminalScreen

        if self._screen is None:
            self._screen = TerminalScreen(self._session, self.id)
        return await self._screen.update(self._size or DEFAULT_SIZE)

    async def interrupt(self) -> None:
        """Press Ctrl-C on a terminal; otherwise send SIGINT to the process group.

        The terminal sends SIGINT to its foreground program, or gives it the character, as a shell
        that edits a line asks for. `signal("INT")` is sent to that program in any case, also if it
        does not read its input. Raises Unsupported if the server cannot interrupt.
        """
        self._started()
        terminal = self._input if self._input is not None and self._input.is_terminal else None
        if terminal is not None and not terminal.is_full:
            with contextlib.suppress(StdinClosed):  # it has ended: no signal would find it
                await terminal.write(_CTRL_C)
        elif terminal is not None and self._capabilities.process_signals:
            await self._session.call(SIGNAL, SignalParams(self.id, "SIGINT"), is_bound=True)
        elif self._session.features.has_interrupt:
            await self._session.call(SIGNAL, SignalParams(self.id, "interrupt"), is_bound=True)
        else:
            raise Unsupported("process/signal", "kill the process, or start it in a terminal")

    async def signal(self, name: str | int) -> None:
        """Send a signal to the process group: a name with or without `SIG`, or a number.

        A number is one of this machine. Raises Unsupported if the server knows only INT and KILL.
        """
        self._started()
        full = _signal_name(name)
        if self._capabilities.process_signals:
            known: Signal = full  # type: ignore[assignment]  # the server refuses unknown ones
            await self._session.call(SIGNAL, SignalParams(self.id, known), is_bound=True)
        elif full == "SIGINT":
            await self.interrupt()
        elif full == "SIGKILL":
            await self.kill()
        else:
            raise Unsupported("processSignals", f"{full} cannot be sent, only INT and KILL")

    async def terminate(self, grace: float = GRACE_SECONDS) -> None:
        """Let the process end: SIGTERM to its group, and `kill` after `grace` seconds.

        Returns when the process has exited; raises TimeoutError as `kill` does. On a server without
        `processSignals` it is killed at once.
        """
        self._started()
        check_seconds(grace, "grace")
        if self.is_over:
            return
        if self._capabilities.process_signals and self.exit_code is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await self.signal("SIGTERM")
                    await self._wait_until_gone()
        await self._kill_to_exit()

    async def _wait_until_gone(self) -> None:
        """Wait for the exit, and for the end of the output if all of it is received."""
        remote = self._started()
        consumers = self._session.flow_control.begin_wait(self._output)
        try:
            with self._output.waiting_for_exit():
                while not self.is_over and not (remote.is_skipping and self.exit_code is not None):
                    await self._wait_for_change()
        finally:
            self._session.flow_control.end_wait(consumers, self._output)

    async def kill(self, *, wait: bool = False) -> None:
        """Kill the process at once with all its descendants, unless it is over.

        With `wait` it returns when the process has exited, as `terminate` does; the children may
        take a moment longer. Raises TimeoutError then if the server has not reported the exit after
        5 s; it kills the process when it gets the request.
        """
        await (self._kill_to_exit() if wait else self._kill(None))

    async def _kill_to_exit(self) -> None:
        await self._kill_and_wait()
        if self.exit_code is None and not self.is_over:
            raise TimeoutError(
                f"{self._name} may still run: the server has not reported its exit within "
                f"{KILL_SECONDS:g} s after the kill"
            )

    async def _kill(self, seconds: float | None) -> bool:
        """Kill the process, unless it is over; whether the server has answered in time."""
        remote = self._started()
        self._session.check_loop()
        if self.is_over:
            return True
        answered, _ = await asyncio.wait([self._processes.kill(remote)], timeout=seconds)
        return bool(answered)

    async def _kill_and_wait(self, answer_seconds: float = KILL_SECONDS) -> None:
        """Kill the process, unless it is over, and wait for its exit up to KILL_SECONDS.

        A server that has not answered after `answer_seconds` is not waited for.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_SECONDS):
                if not await self._kill(answer_seconds):
                    return
                while not self.is_over and self.exit_code is None:
                    await self._wait_for_change()

    def on_output(self, event: OutputParams) -> None:
        self._output.append(Chunk(event.stream, event.chunk, self._unread_gap))
        self._unread_gap = 0
        self._changed.set()

    def on_gap(self, size: int) -> None:
        self.lost_bytes += size
        self._unread_gap += size

    def on_exited(self, event: ExitedParams) -> None:
        if self.exit_code is None:
            self.exit_code = self._known_code(event.exit_code)
            self.sandbox_denied = event.sandbox_denied
            self.sandbox_denial = event.sandbox_denial
            if self._input is not None:
                self._input.fail(StdinClosed("the process has ended"))
        self._changed.set()

    def _known_code(self, code: int) -> int:
        """The exit code; servers before 0.140 report -1 for every signal."""
        is_killed = self._remote is not None and self._remote.is_killed
        return KILLED if code == -1 and is_killed else code

    def on_closed(self) -> None:
        self._is_closed = True
        self._output.end()
        self._changed.set()

    def on_failed(self, error: ExecServerError) -> None:
        if not self._is_closed:
            self._failure = self._failure or error
            self._output.end()
            if self._input is not None:
                self._input.fail(error)
        self._changed.set()


class OutputIterator(Reader):
    """One iteration over the output of a process; the output is wanted until this is deleted."""

    __slots__ = ("_process",)

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process

    def __aiter__(self) -> Self:
        return self

    @property
    def has_more(self) -> bool:
        """Whether the next chunk was received already."""
        return bool(self._process._output)

    async def __anext__(self) -> Chunk:
        return await self._process._next(self)

    async def read_some(self) -> list[Chunk]:
        """All queued output, or else the next chunk; an empty list at the end."""
        return await self._process._next_some(self)

    def put_back(self, chunks: Sequence[Chunk]) -> None:
        """Make chunks that were taken the next ones again."""
        self._process._output.put_back(chunks)


def _signal_name(name: str | int) -> str:
    if isinstance(name, str):
        full = f"SIG{name.upper().removeprefix('SIG')}"
        if full not in get_args(Signal):
            raise InvalidParams(f"unknown signal {name!r}: use a name such as TERM, INT or USR1")
        return full
    if not isinstance(name, int):
        raise TypeError(f"a signal is a name or a number, not {type(name).__name__}")
    if name not in exceptions.SIGNALS:
        raise InvalidParams(f"unknown signal number {name}")
    return f"SIG{exceptions.SIGNALS[name]}"


class DetachedProcess(Process):
    """A process of the server that `await` or `async with` starts or attaches to.

    `aclose`, or leaving the block, leaves it running, and so does closing its environment; `kill`
    and `terminate` end it. It is never paused: a reader that is too slow loses the oldest output,
    which `lost_bytes` and `lost_before` of the next chunk count.
    """

    def __init__(
        self,
        session: ClientSession,
        processes: RemoteProcesses,
        params: StartParams | None,
        *,
        argv: tuple[str, ...],
        name: str,
        label: str,
        after: int = 0,
        size: tuple[int, int] | None = None,
    ) -> None:
        """Prepare a start with `params`, or without them an attachment that begins after an event.

        `label` names the command in the error of a failed start.
        """
        super().__init__(session, processes, params, argv=argv, name=label, size=size)
        self.name = name
        self._after = after
        self._is_attached = params is None  # and not started
        self.tty = params is not None and params.tty
        """Whether it runs on a terminal."""
        self.has_stdin = params is not None and (params.tty or params.pipe_stdin)
        """Whether it can be written to."""

    async def _start(self, remote: RemoteProcess) -> None:
        if not self._is_attached:
            await super()._start(remote)
            return
        assert self.name is not None
        answer = await self._processes.attach(remote, self.name, self._after)
        self.argv = tuple(answer.argv)
        self.tty = answer.tty
        self.has_stdin = answer.tty or answer.pipe_stdin
        self._open_input(remote, is_terminal=answer.tty, is_pipe=answer.pipe_stdin)

    async def _close(self) -> None:
        remote = self._started()
        self._discard_output()
        try:
            leaving = self._processes.detach(remote)
            await asyncio.wait([leaving], timeout=UNANSWERED_KILL_SECONDS)
        finally:
            self._forget(remote)


def check_support(session: ClientSession) -> None:
    """Raise Unsupported if the server has no detached processes."""
    if not session.features.capabilities.process_detach:
        raise Unsupported("processDetach", _SESSIONS_ONLY)


def detached_params(
    params: StartParams,
    program: str,
    *,
    name: str | None,
    max_lifetime: float | None,
    idle_timeout: float | None,
) -> tuple[StartParams, str]:
    """The params of a start that detaches, and the name of the process."""
    if name is None:
        name = _unused_name(program)
    detach = Detach(
        name,
        _milliseconds("max_lifetime", max_lifetime),
        _milliseconds("idle_timeout", idle_timeout),
    )
    return msgspec.structs.replace(params, detach=detach), name


async def read_retained(
    session: ClientSession, process: DetachedProcess, last: int
) -> tuple[list[Chunk], int, int]:
    """Read the output of a process up to the event `last`, as far as the server retains it.

    Returns also the number of bytes that it does not, and of the event with which the output ends.
    """
    chunks: list[Chunk] = []
    after = lost = 0
    while after < last:
        params = ReadParams(process.id, after, _READ_BYTES, 0)
        answer = await session.call(READ, params, is_retryable=True)
        lost += answer.lost_bytes or 0
        if not answer.chunks:
            break
        chunks += (Chunk(each.stream, each.chunk) for each in answer.chunks)
        after = answer.chunks[-1].seq
    return chunks, lost, after


def _unused_name(program: str) -> str:
    word = os.path.basename(program)[:_PROGRAM_CHARACTERS]
    word = _NOT_IN_NAMES.sub("-", word).strip("-_") or "process"
    return f"{word}-{uuid.uuid4().hex[:_NAME_DIGITS]}"


def _milliseconds(name: str, seconds: float | None) -> int | None:
    check_number(seconds, name)
    if seconds is None or seconds == math.inf:
        return None
    if not seconds > 0:
        raise InvalidParams(f"{name} must be a positive number of seconds, not {seconds!r}")
    return max(1, round(seconds * 1000))
