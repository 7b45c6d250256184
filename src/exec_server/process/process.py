"""Process: one command of a client from its start to the end of its output.

The output path is hot and consists of plain calls from `Process._read` to the transport's buffer.
When that is full, `pause_reading` removes the descriptors from the loop, the pipe fills and the
child blocks. A client does the same for one process with `set_flow`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from collections.abc import Callable

import msgspec

from exec_server.errors import InternalError
from exec_server.host.pipes import ENLARGED_BYTES, PIPE_BYTES, enlarge_pipe
from exec_server.process import descendants
from exec_server.process.command import Command
from exec_server.process.orphans import Owner
from exec_server.process.output import OutputLog, RecentOutputBudget
from exec_server.process.spawn import Child, resize_terminal, signal_foreground
from exec_server.protocol import process as wire
from exec_server.protocol.decoding import Notice
from exec_server.protocol.sandbox import Denial

# As many chunks as the reference queues; a further write waits for space.
QUEUED_CHUNKS = 128
# The same queue in bytes: large chunks would otherwise hold gigabytes for a child that sleeps.
QUEUED_BYTES = 1_048_576

Bytes = bytes | memoryview
Emit = Callable[[Notice[msgspec.Struct], msgspec.Struct], None]
# Whether the sandbox denied something to a command, judging by its exit code and its output.
DenialCheck = Callable[[int, list[wire.OutputChunk]], tuple[bool, Denial | None]]

# One read empties a pipe, also one that was enlarged, and becomes several chunks.
READ_BYTES = ENLARGED_BYTES
# The size of one read of a terminal, and how many reads are joined.
TERMINAL_READ_BYTES = 4096
TERMINAL_READS = 8
# Output that is in the pipe when the child exits is sent before the exit, up to this many bytes.
DRAINED_BYTES = READ_BYTES
# How long the exit of a confined command waits for the end of its output, which the denial check
# needs. Usually the output ends together with the command.
DENIAL_CHECK_SECONDS = 0.02
# Ids of accepted writes by which a repeated request is recognised; the oldest are dropped.
WRITE_IDS = 4096
WRITE_ID_COST = 192  # upper bound for the memory of one id in bytes, without its characters
# Upper bound for the memory of a closed process in bytes, without its output and its texts.
CLOSED_COST = 2048
# Upper bound for the memory of a character that is not ASCII, or is in a text with one: 4 bytes of
# the text, and 4 of its encoded form, which stays with the text once it has been sent.
WIDE_CHARACTER_COST = 8
# Characters of a command line kept for process/list; a whole command line may have megabytes.
LISTED_ARGV = 1024
# A terminal's keys send these signals to the foreground job, not to the session leader's group.
_KEYBOARD_SIGNALS = frozenset({"SIGINT", "SIGQUIT", "SIGTSTP"})


class StdinQueue:
    """Writes chunks to a descriptor in order and completely, without blocking the loop.

    The owner of the descriptor closes it, after `close`. `on_eof` is called when all input up to
    `write_eof` is written. The number of chunks that wait for space is bounded by the requests
    that a connection may have under way.
    """

    __slots__ = (
        *("_chunks", "_descriptor", "_eof", "_loop", "_on_eof", "_open", "_queued_bytes"),
        *("_waiting", "_writing"),
    )

    def __init__(self, descriptor: int, on_eof: Callable[[], None]) -> None:
        self._descriptor = descriptor
        self._on_eof = on_eof
        # Done when the end of the input is accepted; None before `write_eof`.
        self._eof: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._chunks: deque[memoryview] = deque()
        self._queued_bytes = 0
        # Chunks that wait for space in the queue; the end of the input waits with an empty chunk.
        self._waiting: deque[tuple[Bytes, asyncio.Future[None]]] = deque()
        self._open = True
        self._writing = False

    def write(self, data: Bytes) -> asyncio.Future[None] | None:
        """Queue a chunk, or return a future for that; its cancellation withdraws the chunk."""
        if not self._open or not data:
            return None
        if self._waiting or not self._has_space():
            accepted: asyncio.Future[None] = self._loop.create_future()
            self._waiting.append((data, accepted))
            return accepted
        self._append(data)
        if not self._writing:
            self._flush()
        return None

    @property
    def has_eof(self) -> bool:
        """Whether the end of the input is queued or waits for space."""
        return self._eof is not None and not self._eof.cancelled()

    def write_eof(self) -> asyncio.Future[None] | None:
        """Queue the end of the input, once, behind all chunks; returns a future like `write`."""
        if self._eof is None or self._eof.cancelled():
            self._eof = self._loop.create_future()
            self._waiting.append((b"", self._eof))
            self._accept_waiting()
            if self._is_complete():
                self._on_eof()
        return None if self._eof.done() else self._eof

    def close(self) -> None:
        """Drop the queued chunks."""
        self._open = False
        self._chunks.clear()
        self._queued_bytes = 0
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._descriptor)
        while self._waiting:
            _, accepted = self._waiting.popleft()
            if not accepted.done():
                accepted.set_result(None)

    def _is_complete(self) -> bool:
        return not self._chunks and self.has_eof and self._eof is not None and self._eof.done()

    def _has_space(self) -> bool:
        return len(self._chunks) < QUEUED_CHUNKS and self._queued_bytes < QUEUED_BYTES

    def _append(self, data: Bytes) -> None:
        self._chunks.append(memoryview(data))
        self._queued_bytes += len(data)

    def _flush(self) -> None:
        try:
            while self._chunks:
                chunk = self._chunks[0]
                written = os.write(self._descriptor, chunk)
                self._queued_bytes -= written
                if written < len(chunk):
                    self._chunks[0] = chunk[written:]
                    if written == PIPE_BYTES:
                        enlarge_pipe(self._descriptor)
                else:
                    self._chunks.popleft()
                self._accept_waiting()
        except BlockingIOError:
            pass
        except OSError:
            self.close()  # EPIPE: the child closed its stdin, which is no error
        if self._is_complete():
            self._on_eof()
            return
        if bool(self._chunks) == self._writing:
            return
        self._writing = not self._writing
        if self._writing:
            self._loop.add_writer(self._descriptor, self._flush)
        else:
            self._loop.remove_writer(self._descriptor)

    def _accept_waiting(self) -> None:
        while self._waiting and self._has_space():
            data, accepted = self._waiting.popleft()
            if not accepted.done():
                if accepted is not self._eof:
                    self._append(data)
                accepted.set_result(None)


class Process:
    """One command: its output, its stdin, its exit. Created once the child runs."""

    def __init__(
        self,
        process_id: wire.ProcessId,
        command: Command,
        child: Child,
        owner: Owner,
        emit: Emit,
        *,
        check_denial: DenialCheck | None = None,
        recent_budget: RecentOutputBudget | None = None,
    ) -> None:
        self.id = process_id
        self.tty = command.tty
        # One text: a list of short words takes ten times the memory. No word contains a NUL.
        words = _truncated(command.argv, LISTED_ARGV)
        self._argv = "\0".join(words).encode("utf-8", "surrogatepass")
        self.pid = child.pid
        self.owner = owner
        self.log = OutputLog(recent_budget)
        self._aging: asyncio.TimerHandle | None = None  # while recent output is kept
        self.has_ended = False  # its leader is reaped, or has reported its end
        self.exit_code: int | None = None  # set when the exit is published: see `on_exit`
        self._check_denial = check_denial
        self._unpublished_exit: int | None = None
        self._denial: tuple[bool, Denial | None] = (False, None)
        self.closed = False
        self.terminated = False
        self.on_closed: Callable[[Process], None] | None = None
        self._emit = emit
        self._loop = asyncio.get_running_loop()
        self._outputs: dict[int, wire.Stream] = {fd: stream for stream, fd in child.outputs}
        self.has_stdin = child.stdin is not None
        self._stdin_descriptor = child.stdin
        self._stdin = (  # None after the close, too
            StdinQueue(child.stdin, self._close_stdin) if child.stdin is not None else None
        )
        self._had_eof = False  # at the close
        # A future while the write waits for space, None once it is accepted.
        self._write_ids: dict[str, asyncio.Future[None] | None] = {}
        self._waiters: list[asyncio.Future[None]] = []
        self._may_read = False  # the link of the client has space
        self._flow: wire.Flow = "send"
        self._reading = False

    def resume_reading(self) -> None:
        """Let the loop read the output, unless the client has paused it."""
        self._may_read = True
        self._update_reading()

    def pause_reading(self) -> None:
        """Leave the output in the pipe; a full pipe blocks the child."""
        self._may_read = False
        self._update_reading()

    def set_flow(self, flow: wire.Flow) -> None:
        """Do with the output as the client wishes, until it changes its wish."""
        self._flow = flow
        self._update_reading()

    def _update_reading(self) -> None:
        reading = self._may_read and self._flow != "pause"
        if reading == self._reading:
            return
        self._reading = reading
        for descriptor, stream in self._outputs.items():
            if reading:
                self._loop.add_reader(descriptor, self._read, descriptor, stream)
            else:
                self._loop.remove_reader(descriptor)

    def _read(self, descriptor: int, stream: wire.Stream) -> int:
        """Read and publish the available output once; returns the number of bytes."""
        try:
            data = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""  # EIO: no process has the terminal open any more
        if not data:
            self._end_output(descriptor)
            return 0
        if stream == "pty":
            data = _read_more_of_terminal(descriptor, data)
        elif len(data) == PIPE_BYTES:
            enlarge_pipe(descriptor)
        self._publish(stream, data)
        if self.log.reserved_bytes and self._aging is None:
            self._aging = self._loop.call_later(self.log.recent_seconds(), self._age_output)
        self._wake_waiters()
        return len(data)

    def _age_output(self) -> None:
        self.log.age()
        self._aging = None
        if self.log.reserved_bytes:
            self._aging = self._loop.call_later(self.log.recent_seconds(), self._age_output)

    def release_recent_output(self) -> None:
        """Give the space of recent output back; the process is not used any more."""
        self.log.release_recent()
        if self._aging is not None:
            self._aging.cancel()
            self._aging = None

    def _publish(self, stream: wire.Stream, data: bytes) -> None:
        seq = self.log.next_seq
        for start in range(0, len(data), wire.CHUNK_BYTES):
            self.log.append(stream, data[start : start + wire.CHUNK_BYTES])
        if self._flow != "retain":
            self._emit(wire.OUTPUT, wire.output(self.id, seq, stream, data))

    def _end_output(self, descriptor: int) -> None:
        del self._outputs[descriptor]
        if self._reading:
            self._loop.remove_reader(descriptor)
        # The terminal stays open while its session leader lives, even if the leader has closed
        # it: closing the master would send SIGHUP to the leader.
        if descriptor != self._stdin_descriptor:
            os.close(descriptor)
        if not self._outputs and self._unpublished_exit is not None:
            self._publish_exit()
        self._close_if_done()

    def accepts_write(self, write_id: str | None) -> bool:
        """Whether a write is possible: stdin is open, or this id has been accepted before."""
        if not self.has_stdin:
            return False
        has_eof = self._had_eof if self._stdin is None else self._stdin.has_eof
        return not has_eof or write_id in self._write_ids

    def write(self, data: Bytes, write_id: str | None) -> asyncio.Future[None] | None:
        """Queue input; a future if the queue is full. Raises InternalError after `terminate`."""
        if write_id is not None and write_id in self._write_ids:
            earlier = self._write_ids[write_id]
            if earlier is None or not earlier.cancelled():
                return earlier
        if self.terminated:
            raise InternalError("failed to write to process stdin")
        if self._stdin is None:
            return None  # the process has closed: input for it is accepted and dropped
        accepted = self._stdin.write(data)
        if write_id is not None:
            self._remember_write(write_id, accepted)
        return accepted

    def write_eof(self) -> asyncio.Future[None] | None:
        """Close a stdin pipe after the queued input; returns a future like `write`."""
        if self._stdin is None:
            self._had_eof = True
            return None
        return self._stdin.write_eof()

    def _remember_write(self, write_id: str, accepted: asyncio.Future[None] | None) -> None:
        if accepted is not None:
            accepted.add_done_callback(lambda done: self._on_write_done(write_id, done))
        self._write_ids[write_id] = accepted
        if len(self._write_ids) > WRITE_IDS:
            del self._write_ids[next(iter(self._write_ids))]

    def _on_write_done(self, write_id: str, accepted: asyncio.Future[None]) -> None:
        """Record that a waiting write was accepted, or cancelled with its connection."""
        if self._write_ids.get(write_id) is accepted:
            if accepted.cancelled():
                del self._write_ids[write_id]
            else:
                self._write_ids[write_id] = None

    def memory_bytes(self) -> int:
        """An upper bound for the memory of a closed process."""
        ids = WRITE_ID_COST * len(self._write_ids) + sum(map(_text_bytes, self._write_ids))
        denial = self._denial[1]
        texts = () if denial is None else (denial.text, denial.path, denial.rule)
        names = _text_bytes(self.id) + len(self._argv) + sum(_text_bytes(each) for each in texts)
        return CLOSED_COST + names + ids + self.log.memory_bytes()

    def _close_stdin(self) -> None:
        """Close the descriptor of stdin; for a terminal that is the output's descriptor too."""
        if self._stdin is not None:
            self._stdin.close()
        if self._stdin_descriptor is not None:
            os.close(self._stdin_descriptor)
            self._stdin_descriptor = None

    def read(self, after: int, max_bytes: int | None) -> wire.ReadResult:
        """The current result of process/read."""
        chunks, next_seq = self.log.read(after, max_bytes)
        exited = self.exit_code is not None
        loss = self.log.loss(after) or (None, None)
        return wire.ReadResult(
            chunks, next_seq, exited, self.exit_code, self.closed, None, *self._denial, *loss
        )

    def summary(self) -> wire.ProcessInfo:
        """The current entry of this process in process/list."""
        argv = self._argv.decode("utf-8", "surrogatepass").split("\0")
        running, code = self.exit_code is None, self.exit_code
        next_seq = self.log.next_seq
        return wire.ProcessInfo(
            self.id, argv, self.tty, running, code, self.closed, next_seq, self.pid
        )

    async def next_event(self) -> None:
        """Wait for output, the exit or the close."""
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if not waiter.done() or waiter.cancelled():
                self._waiters.remove(waiter)

    def _wake_waiters(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if waiter.done():
                    self._waiters.append(waiter)  # cancelled: `next_event` removes it
                else:
                    waiter.set_result(None)

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of the terminal, unless the terminal is closed."""
        if self._stdin_descriptor is not None:
            resize_terminal(self._stdin_descriptor, rows, columns)

    def signal(self, name: wire.Signal) -> None:
        """Signal the process group, unless the leader has ended."""
        if self.has_ended:
            return
        number = signal.SIGINT if name == "interrupt" else signal.Signals[name]
        if self.tty and name in _KEYBOARD_SIGNALS:
            assert self._stdin_descriptor is not None
            signal_foreground(self._stdin_descriptor, number)
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass  # the leader is reaped; `on_exit` follows

    def terminate(self) -> bool:
        """Kill the command and its descendants; False if it had exited before.

        The ProcessTable kills the survivors of an exited leader.
        """
        running = not self.has_ended
        self.terminated = self.terminated or running
        if self._stdin is not None:
            self._stdin.close()
        if running:
            descendants.kill_tree(self.pid)
        return running

    def on_exit(self, code: int) -> None:
        """The leader has ended: publish the output left in the pipes, then the exit."""
        self.has_ended = True
        self._unpublished_exit = code
        for descriptor, stream in list(self._outputs.items()):
            self._drain(descriptor, stream)
        if self._unpublished_exit is None:
            return  # the output ended while it was drained
        if self._check_denial is not None and self._outputs and not self.terminated:
            self._loop.call_later(DENIAL_CHECK_SECONDS, self._publish_exit)
        else:
            self._publish_exit()

    def _publish_exit(self) -> None:
        """Emit the exit, once; the exit code and the denial do not change afterwards."""
        code, self._unpublished_exit = self._unpublished_exit, None
        if code is None:
            return
        if self._check_denial is not None:
            self._denial = self._check_denial(code, self.log.newest())
        self.exit_code = code
        seq = self.log.number_event()
        self._emit(wire.EXITED, wire.ExitedParams(self.id, seq, code, *self._denial))
        self._wake_waiters()
        if self.terminated:
            self.abandon_output()
        self._close_if_done()

    def _drain(self, descriptor: int, stream: wire.Stream) -> None:
        drained = 0
        while self._reading and drained < DRAINED_BYTES and descriptor in self._outputs:
            size = self._read(descriptor, stream)
            if not size:
                return
            drained += size

    def abandon_output(self) -> None:
        """Stop reading, even if a descendant still has the other end open."""
        for descriptor in list(self._outputs):
            self._end_output(descriptor)

    def _close_if_done(self) -> None:
        if self._outputs or self.exit_code is None or self.closed:
            return
        self.closed = True
        self._close_stdin()
        self._emit(wire.CLOSED, wire.ClosedParams(self.id, self.log.number_event()))
        self._wake_waiters()
        on_closed = self.on_closed
        self._release()
        if on_closed is not None:
            on_closed(self)

    def _release(self) -> None:
        """Drop what no request needs after the close; closed processes are kept by the thousand.

        The callbacks of a launch hold its params, the environment and the policy among them.
        """
        if self._stdin is not None:
            self._had_eof = self._stdin.has_eof
            self._stdin = None
        self._check_denial = None
        self.on_closed = None
        self._outputs = {}  # it is empty, but has the size that it once needed
        self.log.compact()


def _text_bytes(text: str | None) -> int:
    """An upper bound for the memory of the characters of a text."""
    if text is None:
        return 0
    return len(text) if text.isascii() else WIDE_CHARACTER_COST * len(text)


def _truncated(words: list[str], size: int) -> list[str]:
    """The first words, up to `size` characters in total; the last word may be cut."""
    kept = []
    for word in words:
        if size <= 0:
            break
        kept.append(word[:size])
        size -= len(word) + 1  # the space between words
    return kept


def _read_more_of_terminal(descriptor: int, data: bytes) -> bytes:
    """Join further reads to a large one: the kernel returns at most 4 KiB of a terminal."""
    if len(data) < TERMINAL_READ_BYTES // 2:
        return data
    pieces = [data]
    try:
        while pieces[-1] and len(pieces) < TERMINAL_READS:
            pieces.append(os.read(descriptor, TERMINAL_READ_BYTES))
    except OSError:
        pass  # nothing available now, or the end, which the next read reports again
    return b"".join(pieces)
