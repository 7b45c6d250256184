"""DetachedProcesses: processes of the server, to which every client may attach by name.

They are never paused: output that no client takes is retained up to the limit of an OutputLog. They
end with the server, or at one of their own limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol, cast

import msgspec

from exec_server.errors import InvalidParams, InvalidRequest
from exec_server.host.event_loop import guarded_call
from exec_server.process.command import Command
from exec_server.process.process import Process
from exec_server.process.table import LaunchMode, ProcessTable, TableLimits
from exec_server.protocol import process as wire
from exec_server.protocol.decoding import Notice

log = logging.getLogger(__name__)

# Attachments of one process. Each event is sent to all of them on the event loop, so this many
# bound the time that a chunk takes. A further one is refused.
MAX_ATTACHMENTS = 32
# Chunks that are taken from the log at a time.
BATCH_CHUNKS = 32
# An attachment that has fallen behind sends for this long before others do; `server.connection` has
# the same limit for requests.
BURST_SECONDS = 0.002

Event = wire.OutputParams | wire.ExitedParams | wire.ClosedParams
_NOTICES: dict[type[Event], Notice[msgspec.Struct]] = {
    wire.OutputParams: wire.OUTPUT,
    wire.OutputRun: wire.OUTPUT,
    wire.ExitedParams: wire.EXITED,
    wire.ClosedParams: wire.CLOSED,
}

# Detached processes that have not closed. They outlive their clients, so only a limit of the server
# itself bounds them; a start beyond it is refused.
MAX_RUNNING = 64
# Closed ones stay readable for this long, because the client that reads the end of a build may come
# much later than its end. Beyond the number or the memory the one that closed first is forgotten.
RETENTION_SECONDS = 3600.0
MAX_CLOSED = 64
CLOSED_BYTES = 64 * 1_048_576
# A name is a word in command lines and tables.
NAME_CHARACTERS = 64
# Characters of the program in a name that the server chooses.
PROGRAM_CHARACTERS = 32
# A longer lifetime or idle timeout is refused: timers of the event loop take no larger numbers.
MAX_LIMIT_SECONDS = 365 * 86_400.0
# After SIGTERM a process that has reached a limit has this long to end in its own way.
GRACE_SECONDS = 5.0
# A kill is immediate, except for a child in an uninterruptible system call.
END_SECONDS = 5.0

# Compiled at the first use: most servers have no detached process.
_is_name = partial(re.fullmatch, rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_CHARACTERS - 1}}}")

# A ProcessTable without its `emit`, `limits` and `observer`.
MakeTable = Callable[..., ProcessTable]


class Channel(Protocol):
    """The session of an attachment, as far as an attachment needs it."""

    @property
    def is_writable(self) -> bool:
        """Whether there is a connection, and it takes notifications."""
        ...

    def notify(self, notice: Notice[msgspec.Struct], params: msgspec.Struct) -> None: ...

    def attachment_ended(self, process_id: wire.ProcessId) -> None:
        """The process was not started, or is forgotten."""
        ...


class Broadcast:
    """The events of one detached process, and the attachments that receive them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process: Process | None = None  # None while it starts
        self.attachments: dict[Attachment, None] = {}
        self.last_activity = 0.0  # output, or an attachment that came or went
        self._ends: list[wire.ExitedParams | wire.ClosedParams] = []  # two at most, in order
        self._serials = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self.touch()

    def touch(self) -> None:
        """Count from now how long the process is idle."""
        self.last_activity = self._loop.time()

    def attach(self, process_id: wire.ProcessId, channel: Channel) -> Attachment:
        """Add an attachment, which sends nothing before its `begin` or the next event."""
        if len(self.attachments) >= MAX_ATTACHMENTS:
            raise InvalidRequest(
                f"at most {MAX_ATTACHMENTS} clients may be attached to {self.name}"
            )
        attachment = Attachment(process_id, self, channel, next(self._serials))
        self.attachments[attachment] = None
        self.touch()
        return attachment

    def publish(self, event: Event) -> None:
        """Send an event that has just occurred; output is already in the log of the process."""
        self.touch()
        if not isinstance(event, wire.OutputParams):
            self._ends.append(event)
        for attachment in tuple(self.attachments):
            guarded_call(attachment.receive, event)

    def end(self) -> None:
        """End all attachments: the process was not started, or is forgotten."""
        for attachment in tuple(self.attachments):
            guarded_call(attachment.announce_end)
            attachment.close()
            guarded_call(attachment.channel.attachment_ended, attachment.process_id)

    @property
    def last_seq(self) -> int:
        """The number of the last event."""
        return 0 if self.process is None else self.process.log.next_seq - 1

    @property
    def last_position(self) -> int:
        """The latest event after which an attachment may begin: exit and close are always sent."""
        return self._ends[0].seq - 1 if self._ends else self.last_seq

    def after(self, seq: int) -> list[Event]:
        """Some of the events numbered above `seq`, in order; none only if there are none."""
        if self.process is None:
            return []
        chunks = self.process.log.next_chunks(seq, BATCH_CHUNKS)
        events: list[Event] = [
            wire.OutputParams(self.process.id, chunk.seq, chunk.stream, chunk.chunk)
            for chunk in chunks
        ]
        is_complete = len(chunks) < BATCH_CHUNKS
        for end in self._ends:
            if end.seq > seq and (is_complete or end.seq < chunks[-1].seq):
                events.append(end)
        events.sort(key=lambda event: event.seq)
        return events


class Attachment:
    """One session's subscription to the events of a detached process, under an id of its own.

    A slow client delays neither the process nor others: it falls behind, and `push` continues with
    the retained output once its connection is writable. Dropped output leaves a gap in the numbers,
    so that the client asks process/read how much is lost.
    """

    def __init__(
        self, process_id: wire.ProcessId, broadcast: Broadcast, channel: Channel, serial: int
    ) -> None:
        self.process_id = process_id
        self.broadcast = broadcast
        self.channel = channel
        self.after_seq = 0  # where the client asked to begin
        self._serial = serial
        self._position = 0  # the last event that was sent, or left out by the flow `retain`
        self._flow: wire.Flow = "send"
        self._next_push: asyncio.Handle | None = None

    def begin(self, after: int) -> None:
        """Send the events after this one, soon: the answer to the request precedes them."""
        self.after_seq = self._position = min(after, self.broadcast.last_position)
        self._schedule_push()

    def skip_to_end(self) -> None:
        """Send only new events: the client of a new connection reads those that it has missed."""
        self._position = self.broadcast.last_seq

    def receive(self, event: Event) -> None:
        """Send an event that has just occurred, unless earlier ones have to be sent first."""
        if event.seq == self._position + 1 and self._may_send:
            self._send(event)

    def set_flow(self, flow: wire.Flow) -> None:
        """Do with the events as the client wishes; the process itself is not paused."""
        self._flow = flow
        self._schedule_push()

    @property
    def _may_send(self) -> bool:
        return self._flow != "pause" and self.channel.is_writable

    def push(self) -> None:
        """Send the events after the position while the connection takes them."""
        self._next_push = None
        loop = asyncio.get_running_loop()
        until = loop.time() + BURST_SECONDS
        while self._may_send and (events := self.broadcast.after(self._position)):
            for event in events:
                if not self._may_send:
                    return  # the session calls `push` again when it is writable
                self._send(event)
            if loop.time() >= until:
                self._schedule_push()
                return

    def announce_end(self) -> None:
        """Send the last event to a client that lacks earlier ones, which are forgotten now.

        The gap makes the client ask for them, and the answer tells it that they are lost.
        """
        last = self.broadcast.after(self.broadcast.last_seq - 1)
        if last and self._position < last[0].seq:
            self._send(last[0])

    def close(self) -> None:
        """Send nothing more; the process goes on."""
        if self._next_push is not None:
            self._next_push.cancel()
        self.broadcast.attachments.pop(self, None)
        self.broadcast.touch()

    def write_id(self, write_id: str | None) -> str | None:
        """A write id that differs from those of other attachments: each client numbers its own."""
        return None if write_id is None else f"{self._serial}:{write_id}"

    def _schedule_push(self) -> None:
        if self._next_push is None:
            self._next_push = asyncio.get_running_loop().call_soon(self.push)

    def _send(self, event: Event) -> None:
        self._position = event.last_seq if isinstance(event, wire.OutputRun) else event.seq
        if self._flow == "retain" and isinstance(event, wire.OutputParams):
            return
        labelled = msgspec.structs.replace(event, process_id=self.process_id)
        self.channel.notify(_NOTICES[type(event)], labelled)


class _Detached:
    """One detached process, its limits and their timers."""

    def __init__(self, name: str, max_lifetime: float | None, idle_timeout: float | None) -> None:
        self.broadcast = Broadcast(name)
        self.max_lifetime = max_lifetime
        self.idle_timeout = idle_timeout
        self.started_at_ms = int(time.time() * 1000)
        self.ended_by: wire.EndedBy | None = None
        # The last timer of each callback, so three at most; cancelling one that has fired is free.
        self.timers: dict[Callable[[_Detached], None], asyncio.Handle] = {}

    def cancel_timers(self) -> None:
        for timer in self.timers.values():
            timer.cancel()
        self.timers.clear()

    def listed(self, process: Process) -> wire.DetachedProcessInfo:
        members = msgspec.structs.asdict(process.summary())
        del members["process_id"]  # it is the name
        return wire.DetachedProcessInfo(
            **members,
            name=self.broadcast.name,
            started_at_ms=self.started_at_ms,
            attached=len(self.broadcast.attachments),
            max_lifetime_ms=_milliseconds(self.max_lifetime),
            idle_timeout_ms=_milliseconds(self.idle_timeout),
            ended_by=self.ended_by,
        )


class DetachedProcesses:
    """The detached processes of a server by name; the TableObserver of their table."""

    def __init__(self, make_table: MakeTable) -> None:
        limits = TableLimits(MAX_RUNNING, MAX_CLOSED, CLOSED_BYTES, RETENTION_SECONDS)
        self._table = make_table(self._emit, limits=limits, observer=self)
        self._by_name: dict[str, _Detached] = {}
        self._numbers = itertools.count(1)
        self._loop = asyncio.get_running_loop()

    def reserve(self, detach: wire.Detach, program: str) -> Broadcast:
        """Reserve the name for a start, or choose one; a closed process of this name is forgotten.

        Raises InvalidParams or InvalidRequest.
        """
        max_lifetime = _seconds("maxLifetimeMs", detach.max_lifetime_ms)
        idle_timeout = _seconds("idleTimeoutMs", detach.idle_timeout_ms)
        name = self._unused_name(program) if detach.name is None else detach.name
        if not _is_name(name):
            raise InvalidParams(
                f"the name of a detached process has 1 to {NAME_CHARACTERS} letters, digits, dots, "
                "dashes and underscores, and begins with a letter or digit"
            )
        if self._table.live_count >= MAX_RUNNING:
            raise InvalidRequest(f"at most {MAX_RUNNING} detached processes may run on a server")
        if name in self._by_name and not self._table.forget(wire.ProcessId(name)):
            raise InvalidRequest(f"the name {name} is in use by another detached process")
        self._table.reserve(wire.ProcessId(name))
        detached = self._by_name[name] = _Detached(name, max_lifetime, idle_timeout)
        return detached.broadcast

    def _unused_name(self, program: str) -> str:
        word = program.rpartition("/")[2][:PROGRAM_CHARACTERS]
        word = re.sub(r"[^A-Za-z0-9_-]+", "-", word).strip("-_") or "process"
        names = (f"{word}-{number}" for number in self._numbers)
        return next(name for name in names if name not in self._by_name)

    async def start(self, name: str, command: Command, launch_mode: LaunchMode) -> None:
        """Start a command under a reserved name; see ProcessTable.start."""
        await self._table.start(wire.ProcessId(name), command, launch_mode)

    def started(self, process: Process) -> None:
        detached = self._by_name[process.id]
        detached.broadcast.process = process
        detached.broadcast.touch()
        if detached.max_lifetime is not None:
            self._set_timer(detached, detached.max_lifetime, self._end_lifetime)
        if detached.idle_timeout is not None:
            self._set_timer(detached, detached.idle_timeout, self._check_idle)

    def start_failed(self, process_id: wire.ProcessId) -> None:
        self._by_name.pop(process_id).broadcast.end()

    def forgotten(self, process: Process) -> None:
        self._by_name.pop(process.id).broadcast.end()

    def _emit(self, notice: Notice[msgspec.Struct], params: msgspec.Struct) -> None:
        event = cast(Event, params)
        detached = self._by_name[event.process_id]
        detached.broadcast.publish(event)
        process = detached.broadcast.process
        if process is not None and process.closed:
            detached.cancel_timers()

    def find(self, name: str) -> Broadcast:
        """The events of a running or closed process; raises InvalidRequest."""
        detached = self._by_name.get(name)
        if detached is None:
            raise InvalidRequest(f"unknown detached process {name}")
        if detached.broadcast.process is None:
            raise InvalidRequest(f"detached process {name} is starting")
        return detached.broadcast

    def terminate(self, name: str) -> bool:
        """Kill a process with all its descendants; True if it was running."""
        return self._table.terminate(wire.ProcessId(name))

    def listed(self) -> list[wire.DetachedProcessInfo]:
        """The processes in order of their start, without those that are still starting."""
        every = [(each, each.broadcast.process) for each in self._by_name.values()]
        return [each.listed(process) for each, process in every if process is not None]

    def _set_timer(
        self, detached: _Detached, delay: float, callback: Callable[[_Detached], None]
    ) -> None:
        detached.timers[callback] = self._loop.call_later(delay, callback, detached)

    def _end_lifetime(self, detached: _Detached) -> None:
        self._end_by_limit(detached, "maxLifetime")

    def _check_idle(self, detached: _Detached) -> None:
        assert detached.idle_timeout is not None
        if detached.broadcast.attachments:
            self._set_timer(detached, detached.idle_timeout, self._check_idle)
            return
        remaining = detached.broadcast.last_activity + detached.idle_timeout - self._loop.time()
        if remaining > 0:
            self._set_timer(detached, remaining, self._check_idle)
        else:
            self._end_by_limit(detached, "idleTimeout")

    def _end_by_limit(self, detached: _Detached, limit: wire.EndedBy) -> None:
        """Send SIGTERM, and kill the process with all its descendants after a grace."""
        process = detached.broadcast.process
        if process is None or detached.ended_by is not None:
            return
        log.info("detached process %s ends: %s", detached.broadcast.name, limit)
        detached.ended_by = limit
        with contextlib.suppress(OSError):  # of a program that has changed its user
            process.signal("SIGTERM")
        self._set_timer(detached, GRACE_SECONDS, self._kill)

    def _kill(self, detached: _Detached) -> None:
        self.terminate(detached.broadcast.name)

    async def end_all(self) -> None:
        """Kill all processes: the server ends."""
        for detached in self._by_name.values():
            detached.cancel_timers()
        try:
            async with asyncio.timeout(END_SECONDS):
                await self._table.end()
        except TimeoutError:
            log.error("some detached processes could not be killed")


def _seconds(name: str, milliseconds: int | None) -> float | None:
    if milliseconds is None:
        return None
    if not 0 < milliseconds <= MAX_LIMIT_SECONDS * 1000:
        raise InvalidParams(f"{name} must be 1 to {MAX_LIMIT_SECONDS * 1000:.0f}")
    return milliseconds / 1000


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)
