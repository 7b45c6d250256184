"""Process: one command of a client from start to close. ProcessTable: those of a session.

The output path is the heart of the program and is made of plain calls: the loop finds a
descriptor readable, `Process._read` takes what is there, numbers it in chunks, and hands
each to `emit`, which ends in the transport's buffer. When that buffer is high, `pause`
takes the descriptors from the loop; the pipe fills and the child waits in its write.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from exec_server.core import descendants
from exec_server.core.command import Command
from exec_server.core.output import CHUNK_BYTES, OutputLog
from exec_server.core.reaper import Reaper
from exec_server.core.spawn import Child, resize_terminal, signal_foreground, spawn
from exec_server.core.stdin import StdinQueue
from exec_server.core.threads import Threads
from exec_server.errors import InternalError, InvalidRequest, os_error_text
from exec_server.protocol.method import Notice
from exec_server.protocol.process import (
    CLOSED,
    EXITED,
    OUTPUT,
    Chunk,
    ClosedParams,
    ExitedParams,
    Listed,
    OutputParams,
    ProcessId,
    ReadResult,
    Signal,
    Stream,
)
from exec_server.protocol.sandbox import Denial

Emit = Callable[[Notice[msgspec.Struct], msgspec.Struct], None]
# Whether the sandbox denied something to a command that ended with this code and output.
Judge = Callable[[int, list[Chunk]], tuple[bool, Denial | None]]

# What a pipe holds when it is made, and when it has been found full. One read takes all of it
# and becomes several chunks.
PIPE_BYTES = 65_536
READ_BYTES = 4 * PIPE_BYTES
# One read of a terminal, and how many are put together.
TERMINAL_READ_BYTES = 4096
TERMINAL_READS = 8
# Output that is already in the pipe when the child ends is sent before the exit, up to here.
DRAINED_BYTES = READ_BYTES
# How long the exit of a confined command waits for the rest of its output, which tells whether
# the sandbox denied it something. Usually the output has ended with the command.
JUDGE_SECONDS = 0.02
# Ids of accepted writes that a repeated request is recognised by; the oldest go first.
WRITE_IDS = 4096
WRITE_ID_COST = 384  # bytes of one of them, at the most
# A finished process stays readable this long.
RETENTION_SECONDS = 30.0
# Commands of one session that have not closed. Beyond it a start is refused.
MAX_LIVE = 1024
# Finished commands of one session, and what they hold of output. Beyond either the one that
# closed first is forgotten before its time.
MAX_CLOSED = 4096
CLOSED_BYTES = 64 * 1_048_576
# What is remembered of a command line, to be shown in a list; all of it may be megabytes.
LISTED_ARGV = 1024
# Processes in one list: all that have not closed, and as many of the others. With the longest ids
# and words, every character of them escaped, that is just below the 64 MiB of a message.
MAX_LISTED = 2 * MAX_LIVE
# What the keys of a terminal send goes to the job in its foreground, as it would from a keyboard.
_FROM_KEYS = frozenset({"SIGINT", "SIGQUIT", "SIGTSTP"})


@dataclass(frozen=True, slots=True)
class Start:
    """How to start a command, and how to judge its end: both differ in a sandbox."""

    spawn: Callable[[Command, int], Child] | None = None  # None: as the server itself
    judge: Judge | None = None


class Process:
    """One command: its output, its stdin, its end. Created when the child runs."""

    def __init__(
        self,
        process_id: ProcessId,
        command: Command,
        child: Child,
        tag: int,
        emit: Emit,
        *,
        judge: Judge | None = None,
    ) -> None:
        self.id = process_id
        self.tty = command.tty
        self._argv = _beginning(command.argv, LISTED_ARGV)
        self.pid = child.pid
        self.tag = tag
        self.log = OutputLog()
        self.is_reaped = False
        self.exit_code: int | None = None  # as clients know it: see `exited`
        self._judge = judge
        self._unpublished_exit: int | None = None
        self._denial: tuple[bool, Denial | None] = (False, None)
        self.closed = False
        self.terminated = False
        self.on_closed: Callable[[Process], None] | None = None
        self._emit = emit
        self._loop = asyncio.get_running_loop()
        self._outputs: dict[int, Stream] = {fd: stream for stream, fd in child.outputs}
        self._stdin_descriptor = child.stdin
        self._stdin = (
            StdinQueue(child.stdin, self._close_stdin) if child.stdin is not None else None
        )
        self._write_ids: dict[str, asyncio.Future[None] | None] = {}  # a future while it waits
        self._waiters: list[asyncio.Future[None]] = []
        self._reading = False

    # ---- output -----------------------------------------------------------------------

    def resume(self) -> None:
        """Have the loop read the output."""
        if not self._reading:
            self._reading = True
            for descriptor, stream in self._outputs.items():
                self._loop.add_reader(descriptor, self._read, descriptor, stream)

    def pause(self) -> None:
        """Leave the output in the pipe, where it makes the child wait."""
        if self._reading:
            self._reading = False
            for descriptor in self._outputs:
                self._loop.remove_reader(descriptor)

    def _read(self, descriptor: int, stream: Stream) -> int:
        """Take what is there, at most READ_BYTES or a little more; returns how much that was."""
        try:
            data = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""  # EIO: the last user of the terminal is gone
        if not data:
            self._end_of(descriptor)
            return 0
        if stream == "pty":
            data = _more_of_terminal(descriptor, data)
        elif len(data) == PIPE_BYTES:
            _widen(descriptor)
        if len(data) <= CHUNK_BYTES:
            self._publish(stream, data)
        else:
            for start in range(0, len(data), CHUNK_BYTES):
                self._publish(stream, data[start : start + CHUNK_BYTES])
        self._wake()
        return len(data)

    def _publish(self, stream: Stream, chunk: bytes) -> None:
        seq = self.log.append(stream, chunk)
        self._emit(OUTPUT, OutputParams(self.id, seq, stream, chunk))

    def _end_of(self, descriptor: int) -> None:
        del self._outputs[descriptor]
        if self._reading:
            self._loop.remove_reader(descriptor)
        # A terminal stays open while its leader lives, even if that has let go of it: closing
        # our end would hang up on the leader.
        if descriptor != self._stdin_descriptor:
            os.close(descriptor)
        if not self._outputs and self._unpublished_exit is not None:
            self._publish_exit()
        self._close_if_done()

    # ---- stdin ------------------------------------------------------------------------

    @property
    def has_stdin(self) -> bool:
        return self._stdin is not None

    def takes(self, write_id: str | None) -> bool:
        """Whether a write may be made: while the input has not ended, or again if it was made."""
        if self._stdin is None:
            return False
        return not self._stdin.has_ended or write_id in self._write_ids

    def write(self, data: bytes, write_id: str | None) -> asyncio.Future[None] | None:
        """Queue input; a future means that it waits for room and is not accepted before.

        Raises InternalError after `terminate`.
        """
        if write_id is not None and write_id in self._write_ids:
            earlier = self._write_ids[write_id]
            if earlier is None or not earlier.cancelled():
                return earlier
        if self.terminated:
            raise InternalError("failed to write to process stdin")
        assert self._stdin is not None
        turn = self._stdin.offer(data)
        if write_id is not None and not self.closed:
            self._remember(write_id, turn)
        return turn

    def end_input(self) -> asyncio.Future[None] | None:
        """Close a pipe's stdin behind what is written to it; a future as of `write`."""
        assert self._stdin is not None
        return self._stdin.end()

    def _remember(self, write_id: str, turn: asyncio.Future[None] | None) -> None:
        if turn is not None:
            turn.add_done_callback(lambda done: self._settle(write_id, done))
        self._write_ids[write_id] = turn
        if len(self._write_ids) > WRITE_IDS:
            del self._write_ids[next(iter(self._write_ids))]

    def _settle(self, write_id: str, turn: asyncio.Future[None]) -> None:
        """A write no longer waits: it is accepted, or was taken back with its connection."""
        if self._write_ids.get(write_id) is turn:
            if turn.cancelled():
                del self._write_ids[write_id]
            else:
                self._write_ids[write_id] = None

    def held_bytes(self) -> int:
        """What a closed process costs, roughly."""
        return self.log.held_bytes() + WRITE_ID_COST * len(self._write_ids)

    def _close_stdin(self) -> None:
        """Close the descriptor of stdin, which of a terminal is that of the output too."""
        if self._stdin is not None:
            self._stdin.close()
        if self._stdin_descriptor is not None:
            os.close(self._stdin_descriptor)
            self._stdin_descriptor = None

    # ---- reading by request -----------------------------------------------------------

    def read(self, after: int, max_bytes: int | None) -> ReadResult:
        """What process/read answers now."""
        chunks, next_seq = self.log.read(after, max_bytes)
        exited = self.exit_code is not None
        loss = self.log.loss(after) or (None, None)
        return ReadResult(
            chunks, next_seq, exited, self.exit_code, self.closed, None, *self._denial, *loss
        )

    def listed(self) -> Listed:
        """What process/list says of it now."""
        running, code = self.exit_code is None, self.exit_code
        return Listed(self.id, self._argv, self.tty, running, code, self.closed, self.log.next_seq)

    async def next_event(self) -> None:
        """Wait for output, the exit or the close."""
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if not waiter.done() or waiter.cancelled():
                self._waiters.remove(waiter)

    def _wake(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if waiter.done():
                    self._waiters.append(waiter)  # cancelled: removes itself
                else:
                    waiter.set_result(None)

    # ---- the terminal and signals -----------------------------------------------------

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of the terminal, as long as there is one."""
        if self._stdin_descriptor is not None:
            resize_terminal(self._stdin_descriptor, rows, columns)

    def signal(self, name: Signal) -> None:
        """Signal the process group, if the leader lives."""
        if self.is_reaped:
            return
        number = signal.SIGINT if name == "interrupt" else signal.Signals[name]
        if self.tty and name in _FROM_KEYS:
            assert self._stdin_descriptor is not None
            signal_foreground(self._stdin_descriptor, number)
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass  # reaped, and about to be told so

    # ---- the end ----------------------------------------------------------------------

    def terminate(self) -> bool:
        """Kill the command and everything below it; False if it had exited on its own.

        Survivors of an exited leader carry its tag and are killed by the table.
        """
        running = not self.is_reaped
        self.terminated = self.terminated or running
        if self._stdin is not None:
            self._stdin.close()
        if running:
            descendants.kill_tree(self.pid)
        return running

    def exited(self, code: int) -> None:
        """The leader is reaped: what it left in the pipes first, then the exit."""
        self.is_reaped = True
        self._unpublished_exit = code
        for descriptor, stream in list(self._outputs.items()):
            self._drain(descriptor, stream)
        if self._unpublished_exit is None:
            return  # the output ended while it was drained
        if self._judge is not None and self._outputs and not self.terminated:
            self._loop.call_later(JUDGE_SECONDS, self._publish_exit)
        else:
            self._publish_exit()

    def _publish_exit(self) -> None:
        """Tell of the exit, once; from here on it is a fact that nothing changes."""
        code, self._unpublished_exit = self._unpublished_exit, None
        if code is None:
            return
        if self._judge is not None:
            self._denial = self._judge(code, self.log.retained())
        self.exit_code = code
        seq = self.log.take_number()
        self._emit(EXITED, ExitedParams(self.id, seq, code, *self._denial))
        self._wake()
        if self.terminated:
            self.abandon_output()
        self._close_if_done()

    def _drain(self, descriptor: int, stream: Stream) -> None:
        drained = 0
        while self._reading and drained < DRAINED_BYTES and descriptor in self._outputs:
            taken = self._read(descriptor, stream)
            if not taken:
                return
            drained += taken

    def abandon_output(self) -> None:
        """Stop reading, whoever still holds the other end."""
        for descriptor in list(self._outputs):
            self._end_of(descriptor)

    def _close_if_done(self) -> None:
        if self._outputs or self.exit_code is None or self.closed:
            return
        self.closed = True
        self._close_stdin()
        self._emit(CLOSED, ClosedParams(self.id, self.log.take_number()))
        self._wake()
        if self.on_closed is not None:
            self.on_closed(self)


def _beginning(words: list[str], size: int) -> list[str]:
    """As many words as have `size` characters together; the last of them may be cut."""
    kept = []
    for word in words:
        if size <= 0:
            break
        kept.append(word[:size])
        size -= len(word) + 1  # the space between them
    return kept


def _more_of_terminal(descriptor: int, data: bytes) -> bytes:
    """What follows a large read: a terminal hands out 4 KiB at a time, however much it has."""
    if len(data) < TERMINAL_READ_BYTES // 2:
        return data
    pieces = [data]
    try:
        while pieces[-1] and len(pieces) < TERMINAL_READS:
            pieces.append(os.read(descriptor, TERMINAL_READ_BYTES))
    except OSError:
        pass  # no more for now, or for good, which the next read will tell
    return b"".join(pieces)


def _widen(descriptor: int) -> None:
    """Make a pipe that was full hold more, so that a busy child is woken less often.

    Only then: what an ordinary user may have in pipes altogether is limited.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, READ_BYTES)
    except OSError:
        pass  # it works as it is


def _unheard(notice: Notice[msgspec.Struct], params: msgspec.Struct) -> None:
    """Where the events of a process go whose start has failed."""


class ProcessTable:
    """The processes of one session, by the ids that its client chose."""

    def __init__(
        self, emit: Emit, reaper: Reaper, tags: descendants.TagPool, threads: Threads
    ) -> None:
        self._emit = emit
        self._reaper = reaper
        self._tags = tags.for_session()
        self._threads = threads
        self._loop = asyncio.get_running_loop()
        self._processes: dict[ProcessId, Process] = {}
        self._starting: dict[ProcessId, bool] = {}  # True once a terminate has cancelled it
        self._closed: dict[Process, asyncio.TimerHandle] = {}  # in the order of closing
        self._closed_bytes = 0
        self._paused = False
        self._ended = False

    def get(self, process_id: ProcessId) -> Process | None:
        return self._processes.get(process_id)

    def is_starting(self, process_id: ProcessId) -> bool:
        return process_id in self._starting

    def reserve(self, process_id: ProcessId) -> None:
        """Take an id for a start; raises InvalidRequest if it is taken or there are too many."""
        if process_id in self._processes or process_id in self._starting:
            raise InvalidRequest(f"process {process_id} already exists")
        if len(self._processes) - len(self._closed) + len(self._starting) >= MAX_LIVE:
            raise InvalidRequest(f"at most {MAX_LIVE} processes may run per session")
        self._starting[process_id] = False

    async def start(self, process_id: ProcessId, command: Command, start: Start) -> None:
        """Start a command under a reserved id.

        Its output is not read before the caller's next await, so that an answer made at once
        precedes every notification.
        """
        tag = self._tags.take()
        self._reaper.expect()
        future = self._threads.run(start.spawn or spawn, command, tag)
        try:
            child = await asyncio.shield(future)
        except asyncio.CancelledError:
            # The connection is gone, the start is not: the process belongs to the session.
            future.add_done_callback(
                lambda done: self._started_alone(process_id, command, done, tag, start.judge)
            )
            raise
        except (OSError, InternalError) as error:
            self._failed(process_id)
            raise InternalError(
                os_error_text(error) if isinstance(error, OSError) else error.message
            ) from error
        self._started(process_id, command, child, tag, start.judge)

    def _started_alone(
        self,
        process_id: ProcessId,
        command: Command,
        done: asyncio.Future[Child],
        tag: int,
        judge: Judge | None,
    ) -> None:
        if done.exception() is not None:
            self._failed(process_id)
            return
        try:
            self._started(process_id, command, done.result(), tag, judge)
        except InvalidRequest:
            pass  # cancelled, and nobody left to tell

    def _failed(self, process_id: ProcessId) -> None:
        self._reaper.forget()
        del self._starting[process_id]

    def _started(
        self, process_id: ProcessId, command: Command, child: Child, tag: int, judge: Judge | None
    ) -> None:
        """Enter a running child; raises InvalidRequest if it was terminated meanwhile."""
        if self._starting.pop(process_id) or self._ended:
            # The start fails, so nobody hears of the child and its id is free.
            process = Process(process_id, command, child, tag, _unheard)
            self._watch(process, child)
            self._terminate(process)
            raise InvalidRequest(f"process {process_id} start was cancelled")
        process = Process(process_id, command, child, tag, self._emit, judge=judge)
        process.on_closed = self._on_closed
        self._processes[process_id] = process
        if not self._paused:
            process.resume()
        self._watch(process, child)

    def _watch(self, process: Process, child: Child) -> None:
        """Have the process told of its end, after what has to be tidied up by then."""
        clean_up = child.clean_up
        if clean_up is None:
            self._reaper.watch(process.pid, process.exited)
            return

        def ended(code: int) -> None:
            process.is_reaped = True
            done = self._loop.run_in_executor(None, clean_up)
            done.add_done_callback(lambda _: process.exited(code))

        self._reaper.watch(process.pid, ended)

    def listed(self) -> tuple[list[Listed], bool]:
        """The processes in their order of start, and whether closed ones had to be left out."""
        surplus = max(0, len(self._processes) - MAX_LISTED)
        left_out = set(itertools.islice(self._closed, surplus))  # those that closed first
        kept = [process.listed() for process in self._processes.values() if process not in left_out]
        return kept, bool(left_out)

    # ---- back-pressure ----------------------------------------------------------------

    def pause(self) -> None:
        """The client does not read: leave all output in the pipes."""
        self._paused = True
        for process in self._processes.values():
            process.pause()

    def resume(self) -> None:
        self._paused = False
        for process in self._processes.values():
            if not process.closed:
                process.resume()

    # ---- the end ----------------------------------------------------------------------

    def terminate(self, process_id: ProcessId) -> bool:
        """Kill a process with all its descendants; True if it was running."""
        if process_id in self._starting:
            self._starting[process_id] = True
            return True
        process = self._processes.get(process_id)
        return process is not None and self._terminate(process)

    def _terminate(self, process: Process) -> bool:
        running = process.terminate()
        self._sweep(range(process.tag, process.tag + 1), {process.pid})
        return running

    def _sweep(self, tags: range, leaders: set[int]) -> asyncio.Future[None]:
        """Kill, in a thread, whatever escaped with one of these tags.

        Not one of the threads that start commands: those can hang on a dead disk.
        """
        others = self._reaper.watched() - leaders
        return self._loop.run_in_executor(None, descendants.kill_carriers, tags, others)

    def _on_closed(self, process: Process) -> None:
        self._closed[process] = self._loop.call_later(RETENTION_SECONDS, self._forget, process)
        self._closed_bytes += process.held_bytes()
        while len(self._closed) > MAX_CLOSED or self._closed_bytes > CLOSED_BYTES:
            self._forget(next(iter(self._closed)))

    def _forget(self, process: Process) -> None:
        self._closed.pop(process).cancel()
        self._closed_bytes -= process.held_bytes()
        del self._processes[process.id]

    async def end(self) -> None:
        """Kill everything the session started and forget it. Returns when all is dead."""
        self._ended = True
        for process_id in self._starting:
            self._starting[process_id] = True
        processes = list(self._processes.values())
        for process in processes:
            process.terminate()
        await asyncio.shield(self._sweep(self._tags.all, {process.pid for process in processes}))
        for process in processes:
            while process.exit_code is None:
                await process.next_event()
            process.abandon_output()
        for timer in self._closed.values():
            timer.cancel()
        self._closed.clear()
        self._processes.clear()
