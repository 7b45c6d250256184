"""RemoteProcesses: starts and kills processes, and reads the events that were missed.

A `RemoteProcess` exists before its start, because output may arrive before the answer. Its id is
random and used once, so a start whose answer was lost can be repeated.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from exec_server.client.engine.session import CLOSE_SECONDS, ClientSession
from exec_server.errors import (
    ConnectionLost,
    ExecServerError,
    InternalError,
    InvalidRequest,
    MalformedAnswer,
    NotFound,
    ProcessLost,
    RpcError,
    SessionLost,
)
from exec_server.protocol.decoding import Notice
from exec_server.protocol.process import (
    ATTACH,
    DETACH,
    READ,
    START,
    TERMINATE,
    AttachParams,
    AttachResult,
    ClosedParams,
    DetachParams,
    ExitedParams,
    OutputParams,
    OutputRun,
    ProcessId,
    ReadParams,
    ReadResult,
    StartParams,
    TerminateParams,
    output_chunks,
)

# Early events that are kept, as many as the reference keeps. Only a server that sends out of order
# reaches this; events beyond it are dropped and read again.
EARLY_EVENTS: Final = 256
EARLY_BYTES: Final = 1_048_576
# The same while a read is in progress. Everything sent before its answer is early then, so this is
# more than sockets and servers buffer. Events beyond it are dropped and read again, too.
EARLY_EVENTS_DURING_READ: Final = 65_536
EARLY_BYTES_DURING_READ: Final = 16 * 1_048_576

Event = OutputParams | ExitedParams | ClosedParams

# For how long a start is repeated. Servers since 0.169 remember a process for 80 s after its end,
# older ones for 30 s; until then they refuse a second start with the same id.
RESEND_SECONDS: Final = 75.0
OLDER_RESEND_SECONDS: Final = 25.0
# The interval of reads while a start is in progress.
STARTING_SECONDS: Final = 0.02
# How long a start may be in progress on a server that drops starts with their connection.
DROPPED_SECONDS: Final = 0.25
# How long a caller waits for the end of a killed process. It takes milliseconds.
KILL_SECONDS: Final = 5.0
# The same if there is no connection, or the server answers neither the start of a run nor the kill
# of a process that is closed. The kill is made as soon as the server can be reached.
UNANSWERED_KILL_SECONDS: Final = 1.0

# Size of a read. It is halved after each lost connection, down to a minimum: an answer that is
# larger than the connection can carry would never arrive. Then the number of losses in a row.
READ_BYTES: Final = 262_144
MIN_READ_BYTES: Final = 4096
MAX_LOSSES: Final = 64
# Answers in a row without an event that a notification has announced. One is possible: the answer
# may be older than the notification.
MAX_EMPTY_READS: Final = 16

# Numbers of events are unsigned 64-bit integers.
MAX_SEQ: Final = 2**64 - 1

_EXISTS: Final = "already exists"
_STARTING: Final = "is starting"
_ENOENT: Final = "(os error 2)"
_ENOTDIR: Final = "(os error 20)"
_EACCES: Final = "(os error 13)"
# How servers refuse a program of a terminal, which they look for themselves.
_UNABLE: Final = "Unable to spawn "
_UNUSABLE: Final = re.compile(r"(exists but|because it) is (a directory|not executable)")
_CLOSED: Final = "the environment was closed"


def _with_number(error: RpcError) -> RpcError:
    """The error; that of a program of a terminal in the words of one on pipes."""
    if not isinstance(error, InternalError) or not error.message.startswith(_UNABLE):
        return error
    number = errno.EACCES if _UNUSABLE.search(error.message) else errno.ENOENT
    return error.explained(f"{os.strerror(number)} (os error {number})")


def _remembers_long(version: str) -> bool:
    """Whether a server of this version remembers a process for 80 s after its end."""
    numbers = re.match(r"(\d{1,9})\.(\d{1,9})\.", version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= (0, 169)


# EventSequence: the events of one process, each once and in order. Pure.
#
# Theory of operation: every event of a process has a number, from 1 and without gaps: each chunk
# of output, the exit, the end. `receive` returns the events that are next, keeps early ones and
# drops repeated ones. Notifications that were missed while there was no connection are not sent
# again. So the client calls `process/read` for the events after `begin_read()`, and `apply_read`
# derives the missed events from the answer, until an answer has no chunks.
#
# An answer names chunks only. An answer with chunks covers the numbers up to its last chunk: a
# number missing between chunks is the exit; numbers missing before them are chunks that the server
# has discarded (a `Gap`), or a single number that is the exit. An answer without chunks covers all
# numbers: the last one is the end, if the process has ended, and a missing one is the exit.
#
# The events of a detached process are sent in order, but the server leaves out those that it has
# discarded because this client was slow. So an early event means that a read is needed.
class Gap(NamedTuple):
    """Lost output: its size in bytes, or a lower bound if the server does not tell."""

    size: int


class EventSequence:
    """Puts the events of one process into order; no I/O."""

    def __init__(self, process_id: ProcessId, *, is_detached: bool = False, last: int = 0) -> None:
        """`last` is the number after which the events of a detached process are wanted."""
        self._id = process_id
        self._is_detached = is_detached
        self.last = last  # the number of the last event that was delivered
        self._early: dict[int, Event] = {}
        self._early_bytes = 0
        self._dropped = 0  # the highest number among dropped events
        self._has_exited = False
        self._is_reading = False
        self._delivered_bytes = 0  # since the read began

    @property
    def needs_read(self) -> bool:
        """Whether an event is missing that no notification will bring."""
        return self._dropped > self.last or (self._is_detached and bool(self._early))

    def receive(self, event: Event) -> Sequence[Event]:
        """Take an event; returns the events that are next."""
        if isinstance(event, OutputRun) and (self._early or event.seq != self.last + 1):
            return [each for chunk in _single(event) for each in self.receive(chunk)]
        if event.seq == self.last + 1:
            if self._lacks_exit(event):
                return ()
            delivered = (event,) if self._deliver(event) else ()
            return (*delivered, *self._ready()) if self._early else delivered
        if event.seq > self.last and event.seq not in self._early:
            self._keep_early(event)
        return ()

    def begin_read(self) -> int:
        """The number after which to read; the answer goes to `apply_read`."""
        self._is_reading = True
        self._delivered_bytes = 0
        return self.last

    def apply_read(self, answer: ReadResult) -> list[Event | Gap]:
        """Take the answer to a read; returns the events that are next."""
        self._is_reading = False
        end = answer.chunks[-1].seq if answer.chunks else answer.next_seq - 1
        known = self._known(answer, end)
        holes = self._holes(known, end)
        exit_seq = self._exit_seq(answer, known, holes)
        if exit_seq is not None:
            known[exit_seq] = self._exit(answer, exit_seq)
            holes = self._holes(known, end)
        gaps = self._gaps(holes, known, answer)
        events: list[Event | Gap] = []
        for seq in sorted(known.keys() | gaps.keys()):
            if seq > end:
                break
            self._drop_early(seq)
            if seq in gaps:
                events.append(gaps[seq])
            else:
                event = known[seq]
                if isinstance(event, ClosedParams) and not self._has_exited:
                    # The exit is among the discarded events: deliver it late, but before the end.
                    events.append(self._exit(answer, seq))
                    self._has_exited = True
                if self._deliver(event):
                    events.append(event)
        self.last = max(self.last, end)
        if not answer.chunks and answer.exit_code is not None and not self._has_exited:
            events.append(self._exit(answer, end))
            self._has_exited = True
        events += self._ready()
        return events

    def _deliver(self, event: Event) -> bool:
        """Count an event; False for a second exit, and for empty output, which takes memory."""
        self.last = event.seq
        if isinstance(event, OutputParams):
            self.last = event.last_seq
            self._delivered_bytes += len(event.chunk)
            return bool(event.chunk)
        if isinstance(event, ExitedParams):
            if self._has_exited:
                return False
            self._has_exited = True
        return True

    def _ready(self) -> list[Event]:
        """The early events that are next now."""
        ready = []
        while (event := self._early.get(self.last + 1)) is not None:
            if self._lacks_exit(event):
                break
            self._drop_early(event.seq)
            if self._deliver(event):
                ready.append(event)
        return ready

    def _lacks_exit(self, event: Event) -> bool:
        """Whether this is an end whose exit was lost, so that a read is needed."""
        if not isinstance(event, ClosedParams) or self._has_exited:
            return False
        self._dropped = event.seq
        return True

    def _keep_early(self, event: Event) -> None:
        max_events, max_bytes = EARLY_EVENTS, EARLY_BYTES
        if self._is_reading:
            max_events, max_bytes = EARLY_EVENTS_DURING_READ, EARLY_BYTES_DURING_READ
        size = _size(event)
        if len(self._early) >= max_events or self._early_bytes + size > max_bytes:
            self._dropped = max(self._dropped, event.seq)
            return
        self._early[event.seq] = event
        self._early_bytes += size

    def _drop_early(self, seq: int) -> None:
        event = self._early.pop(seq, None)
        if event is not None:
            self._early_bytes -= _size(event)

    def _known(self, answer: ReadResult, end: int) -> dict[int, Event]:
        known = dict(self._early)
        for chunk in answer.chunks:
            if chunk.seq > self.last:
                known[chunk.seq] = OutputParams(self._id, chunk.seq, chunk.stream, chunk.chunk)
        if answer.closed and not answer.chunks and end > self.last:
            known[end] = ClosedParams(self._id, end)
        return known

    def _holes(self, known: dict[int, Event], end: int) -> list[tuple[int, int]]:
        """The unknown numbers up to `end`, as ranges."""
        holes = []
        reached = self.last
        for seq in sorted(known):
            if seq > end:
                break
            if seq > reached + 1:
                holes.append((reached + 1, seq - 1))
            reached = seq
        if reached < end:
            holes.append((reached + 1, end))
        return holes

    def _exit_seq(
        self, answer: ReadResult, known: dict[int, Event], holes: list[tuple[int, int]]
    ) -> int | None:
        """The number of the exit, if the answer determines it."""
        if answer.exit_code is None or self._knows_exit(known):
            return None
        if not answer.chunks:
            return holes[-1][1] if holes else None
        first = answer.chunks[0].seq
        for start, stop in holes:
            if start > first or (start == stop and answer.first_seq is None):
                return stop
        return None

    def _exit(self, answer: ReadResult, seq: int) -> ExitedParams:
        code = 0 if answer.exit_code is None else answer.exit_code
        return ExitedParams(self._id, seq, code, answer.sandbox_denied, answer.sandbox_denial)

    def _knows_exit(self, known: dict[int, Event]) -> bool:
        return self._has_exited or any(isinstance(event, ExitedParams) for event in known.values())

    def _gaps(
        self, holes: list[tuple[int, int]], known: dict[int, Event], answer: ReadResult
    ) -> dict[int, Gap]:
        """The lost output, by its first number; a chunk has at least one byte."""
        # One of the numbers may be the exit's.
        spared = answer.exit_code is not None and not self._knows_exit(known)
        gaps = {start: Gap(max(1, stop - start + 1 - spared)) for start, stop in holes}
        if holes and answer.first_seq is not None and answer.lost_bytes is not None:
            # The server counts from the number of the request. Notifications may have brought
            # some of these bytes meanwhile.
            received = sum(_size(event) for seq, event in known.items() if seq < answer.first_seq)
            exact = answer.lost_bytes - self._delivered_bytes - received
            others = sum(gaps[start].size for start, _ in holes[1:])
            gaps[holes[0][0]] = Gap(exact - others)
            if exact <= others:  # the missing number is the exit, not a chunk
                del gaps[holes[0][0]]
        return gaps


def _single(run: OutputRun) -> Iterator[OutputParams]:
    """The chunks of a run as events of their own."""
    for seq, data in output_chunks(run):
        yield OutputParams(run.process_id, seq, run.stream, bytes(data))


def _size(event: Event) -> int:
    return len(event.chunk) if isinstance(event, OutputParams) else 0


class Sink(Protocol):
    """Receives the events of one process by plain calls, in order."""

    def on_output(self, event: OutputParams) -> None: ...

    def on_gap(self, size: int) -> None:
        """`size` bytes of output are lost."""
        ...

    def on_exited(self, event: ExitedParams) -> None:
        """The process has exited. May be called twice, the first time early while skipping."""
        ...

    def on_closed(self) -> None:
        """The process has exited and its output has ended."""
        ...

    def on_failed(self, error: ExecServerError) -> None:
        """No further event can be received."""
        ...


class RemoteProcess:
    """Client-side state of one remote process; the Source of its output queue."""

    def __init__(self, processes: RemoteProcesses, sink: Sink, *, is_detached: bool) -> None:
        self._processes = processes
        self.id = ProcessId(os.urandom(16).hex())
        self.sink = sink
        self.is_detached = is_detached  # it belongs to the server and is left running
        self.sequence = EventSequence(self.id, is_detached=is_detached)
        self.is_started = False  # the start was answered
        self.pid: int | None = None  # None if the server does not tell it
        self.may_run = False  # a start was sent and has not failed
        self.is_killed = False  # the client has requested it
        # Notifications are ignored until `recover`, because the sink's queue is full.
        self.is_skipping = False
        # All of its output exists, and is being requested or was received.
        self.is_ending = False
        self.recovery: asyncio.Future[None] | None = None

    def set_started(self) -> None:
        """Note the answer to the start, or to an attachment: a lost session now ends the process.

        The session may be lost by the very next message, before the task of the start runs.
        """
        self.is_started = True

    def set_sent(self) -> None:
        """Note that the start is on its way."""
        self.may_run = True

    def recover(self) -> asyncio.Future[None]:
        """Read all missed events; a recovery in progress covers them."""
        return self._processes.recover(self)


class RemoteProcesses:
    """The processes of an environment; a Subscriber of its session."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session
        self._processes: dict[ProcessId, RemoteProcess] = {}
        self._ends: set[asyncio.Future[None]] = set()  # kills and detachments in progress
        self._is_closed = False
        self._unsubscribe = session.subscribe(self)

    def open(self, sink: Sink, *, is_detached: bool = False) -> RemoteProcess:
        """Register a process that is to be started or attached; the caller must `forget` it."""
        self._session.check_loop()
        if self._is_closed:
            raise SessionLost(_CLOSED)
        process = RemoteProcess(self, sink, is_detached=is_detached)
        self._processes[process.id] = process
        return process

    async def start(self, process: RemoteProcess, params: StartParams, name: str) -> None:
        """Start a process exactly once; the RpcError it raises contains `name`.

        The id in `params` is replaced. After a cancellation the process may run or not.
        """
        is_repeated = False  # the server may have got the request already
        params = msgspec.structs.replace(params, process_id=process.id)
        deadline = asyncio.get_running_loop().time() + self._resend_seconds()
        while True:
            try:
                # A start that may have been performed is not repeated in a new session, nor when
                # the server may have forgotten it.
                async with asyncio.timeout_at(deadline if is_repeated else None):
                    started = await self._session.call(
                        START,
                        params,
                        is_bound=is_repeated,
                        on_send=process.set_sent,
                        on_answer=process.set_started,
                    )
                process.pid = started.pid
                return
            except TimeoutError:
                raise ConnectionLost(f"no answer to the start of {name}") from None
            except ConnectionLost:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                is_repeated = True
            except SessionLost:
                process.may_run = False  # the server kills it with the session
                raise
            except RpcError as error:
                if not is_repeated or not error.message.endswith(_EXISTS):
                    process.may_run = False
                    raise await self._refusal(error, params, name) from None
                if await self._join(process):
                    return

    async def _refusal(self, error: RpcError, params: StartParams, name: str) -> RpcError:
        """The error of a start with the name of the command; tells what is missing."""
        from exec_server.client.exceptions import (
            FileError,
            NotADirectory,
            PermissionDenied,
            ProgramNotFound,
            WorkingDirectoryNotFound,
        )
        from exec_server.protocol.files import GET_METADATA, GetMetadataParams

        error = _with_number(error)
        text = f"cannot start {name}: {error.message}"
        if isinstance(error, InternalError) and error.message.endswith(_ENOTDIR):
            path = await self._not_a_directory(params)
            return NotADirectory.from_rpc(error, errno.ENOTDIR, path).explained(text)
        if isinstance(error, InternalError) and error.message.endswith(_EACCES):
            return PermissionDenied.from_rpc(error, errno.EACCES, params.argv[0]).explained(text)
        if not isinstance(error, InternalError) or not error.message.endswith(_ENOENT):
            return error.explained(text)
        kind: type[FileError] = ProgramNotFound
        path = params.argv[0]
        try:
            await self._session.call(GET_METADATA, GetMetadataParams(params.cwd, user=params.user))
        except NotFound:
            kind, path = WorkingDirectoryNotFound, params.cwd.native()
        except ExecServerError:
            pass  # the directory exists, or the connection is lost
        refusal = kind.from_rpc(error, errno.ENOENT, path)
        return refusal.explained(text)

    async def _not_a_directory(self, params: StartParams) -> str:
        """The path that leads through a file: the directory of a command, or its program."""
        from exec_server.protocol.files import GET_METADATA, GetMetadataParams

        try:
            metadata = await self._session.call(
                GET_METADATA, GetMetadataParams(params.cwd, user=params.user)
            )
        except ExecServerError:
            return params.cwd.native()
        return params.argv[0] if metadata.is_directory else params.cwd.native()

    async def _join(self, process: RemoteProcess) -> bool:
        """Take over a process that the server has begun to start; False if it has not."""
        began = asyncio.get_running_loop().time()
        while True:
            try:
                await self._catch_up(process)
                process.set_started()
                return True
            except InvalidRequest as error:
                if not error.message.endswith(_STARTING):
                    return False
                if asyncio.get_running_loop().time() - began > self._max_start_seconds():
                    # The start was dropped. Killing makes the id free for another attempt.
                    await self._kill(process.id)
                    return False
                await asyncio.sleep(STARTING_SECONDS)

    def _resend_seconds(self) -> float:
        """How long after its first request a start may be repeated."""
        granted = self._session.granted_retention
        if granted is not None:
            # A process that ends while its client is away is remembered as long as the session.
            return granted + RESEND_SECONDS
        version = self._session.environment_info.executor_version
        return RESEND_SECONDS if _remembers_long(version) else OLDER_RESEND_SECONDS

    def _max_start_seconds(self) -> float:
        """How long a start may be in progress.

        The reference drops a start with its connection, and reports it as starting ever after.
        Our server completes it; the `processReadLoss` capability identifies our server.
        """
        is_ours = self._session.features.capabilities.process_read_loss
        return OLDER_RESEND_SECONDS if is_ours else DROPPED_SECONDS

    async def attach(self, process: RemoteProcess, name: str, after: int) -> AttachResult:
        """Receive the events of a detached process that follow event `after`."""
        process.sequence = EventSequence(process.id, is_detached=True, last=after)
        params = AttachParams(process.id, name, after)
        answer = await self._session.call(
            ATTACH, params, is_retryable=True, on_answer=process.set_started
        )
        process.pid = answer.pid
        if answer.after_seq < after:
            # There is no such event yet. Events that have come meanwhile seemed to be older.
            process.sequence = EventSequence(process.id, is_detached=True, last=answer.after_seq)
            self.recover(process)
        return answer

    def detach(self, process: RemoteProcess) -> asyncio.Future[None]:
        """Leave a detached process running, and tell the server; a future like that of `kill`."""
        return self._spawn_end(self._detach(process.id))

    async def _detach(self, process_id: ProcessId) -> None:
        try:
            params = DetachParams(process_id)
            await self._session.call(DETACH, params, is_retryable=True, is_bound=True)
        except ExecServerError:
            pass  # the attachment ends with the session

    def kill(self, process: RemoteProcess) -> asyncio.Future[None]:
        """Kill a process and its descendants, even if cancelled; done when the server answers."""
        process.is_killed = True
        return self._spawn_end(self._kill(process.id))

    def _spawn_end(self, work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        ending = self._session.spawn(work)
        self._ends.add(ending)
        ending.add_done_callback(self._ends.discard)
        return ending

    async def _kill(self, process_id: ProcessId) -> None:
        try:
            params = TerminateParams(process_id)
            await self._session.call(TERMINATE, params, is_retryable=True, is_bound=True)
        except ExecServerError:
            pass  # the server kills it with the session

    def forget(self, process: RemoteProcess) -> None:
        """Deliver no more events of a process."""
        self._processes.pop(process.id, None)
        if process.recovery is not None:
            process.recovery.cancel()

    def discard(self, process: RemoteProcess) -> None:
        """Discard the further output of a process, and forget it when that has ended."""
        process.sink = _Discarded(self, process)
        if process.is_skipping:
            self.recover(process)

    async def close(self) -> None:
        """Leave the detached processes, and kill all others, unless the server is about to do that.

        The sinks get SessionLost at once: an exit by this kill would look like one of its own.
        """
        self._is_closed = True
        # The end of the session is the end of its processes, and of those that are forgotten here.
        ends_with_session = self._session.features.capabilities.session_close
        for process in list(self._processes.values()):
            if not ends_with_session:
                self.detach(process) if process.is_detached else self.kill(process)
            process.sink.on_failed(SessionLost(_CLOSED))
            self.forget(process)
        if self._ends and not ends_with_session:
            # One that has not answered the clean-up would not answer this either.
            seconds = 0 if self._session.is_silent else CLOSE_SECONDS
            _, unanswered = await asyncio.wait(self._ends, timeout=seconds)
            self._session.is_silent = bool(unanswered)
        self._unsubscribe()

    def on_notice(self, notice: Notice[Any], params: Any) -> bool:
        if not isinstance(params, OutputParams | ExitedParams | ClosedParams):
            return False
        process = self._processes.get(params.process_id)
        if process is None:
            return False
        is_useful = params.seq > process.sequence.last
        if isinstance(params, OutputParams):
            is_useful = params.last_seq > process.sequence.last and bool(params.chunk)
        if process.is_skipping:
            if isinstance(params, ExitedParams):
                process.sink.on_exited(params)
                # Its number is not that of a lost chunk.
                self._deliver(process, process.sequence.receive(params))
            elif isinstance(params, ClosedParams):
                self._finish(process)
            return is_useful
        self._deliver(process, process.sequence.receive(params))
        if process.sequence.needs_read:
            self.recover(process)
        return is_useful

    def on_disconnected(self) -> None:
        """Nothing can be read before the session is resumed."""

    def on_resumed(self) -> None:
        for process in tuple(self._processes.values()):
            if process.is_skipping:
                self._session.spawn(self._learn_end(process))
            elif process.is_started:
                self.recover(process)

    def on_lost(self, error: SessionLost) -> None:
        # A start in progress gets the error itself, or is made in a new session.
        for process in [each for each in self._processes.values() if each.is_started]:
            process.sink.on_failed(error)
            self.forget(process)

    def recover(self, process: RemoteProcess) -> asyncio.Future[None]:
        """Read all missed events; a recovery in progress covers them."""
        process.is_skipping = False
        if process.recovery is None or process.recovery.done():
            process.recovery = self._session.spawn(self._recover(process))
        return process.recovery

    def _finish(self, process: RemoteProcess) -> None:
        """Read the rest of a skipped process that has closed: the server will forget it soon."""
        process.is_ending = True
        self.recover(process)

    async def _learn_end(self, process: RemoteProcess) -> None:
        """Learn whether a skipped process has ended while there was no connection."""
        params = ReadParams(process.id, process.sequence.last, 1, 0)
        try:
            answer = await self._session.call(READ, params, is_retryable=True, is_bound=True)
        except ExecServerError:
            return  # its reader gets the error
        if not process.is_skipping:
            return
        if answer.exit_code is not None:
            denial = answer.sandbox_denied, answer.sandbox_denial
            event = ExitedParams(process.id, answer.next_seq, answer.exit_code, *denial)
            process.sink.on_exited(event)
        if answer.closed:
            self._finish(process)

    async def _recover(self, process: RemoteProcess) -> None:
        try:
            await self._catch_up(process)
        except InvalidRequest as error:
            process.sink.on_failed(ProcessLost(f"output cannot be recovered: {error}"))
        except ExecServerError as error:
            process.sink.on_failed(error)

    async def _catch_up(self, process: RemoteProcess) -> None:
        """Read until no event is missing."""
        size = READ_BYTES
        losses = empty_reads = 0
        while True:
            params = ReadParams(process.id, process.sequence.begin_read(), size, 0)
            try:
                answer = await self._session.call(READ, params, is_bound=True)
            except ConnectionLost:
                losses += 1
                if losses > MAX_LOSSES:
                    raise
                size = max(size // 2, MIN_READ_BYTES)
                continue
            losses = 0
            _check_read(answer, params.after_seq or 0)
            self._deliver(process, process.sequence.apply_read(answer))
            if not answer.chunks and not process.sequence.needs_read:
                return
            if process.is_skipping:
                return  # the queue is full again; it asks for the rest when it has space
            empty_reads = 0 if answer.chunks else empty_reads + 1
            if empty_reads > MAX_EMPTY_READS:
                raise MalformedAnswer("process/read does not return an event that was announced")

    def _deliver(self, process: RemoteProcess, events: Iterable[Event | Gap]) -> None:
        for event in events:
            if isinstance(event, OutputParams):
                process.sink.on_output(event)
            elif isinstance(event, Gap):
                process.sink.on_gap(event.size)
            elif isinstance(event, ExitedParams):
                process.sink.on_exited(event)
            else:
                process.sink.on_closed()


class _Discarded:
    """The sink of a process whose output is not wanted."""

    def __init__(self, processes: RemoteProcesses, process: RemoteProcess) -> None:
        self._processes = processes
        self._process = process

    def on_output(self, event: OutputParams) -> None: ...

    def on_gap(self, size: int) -> None: ...

    def on_exited(self, event: ExitedParams) -> None: ...

    def on_closed(self) -> None:
        self._processes.forget(self._process)

    def on_failed(self, error: ExecServerError) -> None:
        self._processes.forget(self._process)


def _check_read(answer: ReadResult, after: int) -> None:
    """Refuse numbers that go backwards: reading on would never come to an end."""
    last = after
    for chunk in answer.chunks:
        if chunk.seq <= last:
            raise MalformedAnswer(f"process/read returned event {chunk.seq} after event {last}")
        last = chunk.seq
    if max(last, answer.next_seq) > MAX_SEQ:
        raise MalformedAnswer(f"process/read returned an event with a number above {MAX_SEQ}")
    if min(answer.next_seq, answer.first_seq or 0, answer.lost_bytes or 0) < 0:
        raise MalformedAnswer("process/read returned a negative number")
