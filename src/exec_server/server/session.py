"""Session: the processes of a client, which survive reconnecting. SessionRegistry: all sessions."""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import msgspec

from exec_server.errors import InvalidRequest, SessionAttached
from exec_server.host.clock import boot_time
from exec_server.host.event_loop import GuardedTasks, guarded_call
from exec_server.process.process import Emit, Process
from exec_server.process.table import ProcessTable
from exec_server.protocol.decoding import Call, Notice
from exec_server.protocol.process import ProcessId
from exec_server.protocol.session import SessionId
from exec_server.server.detached import Attachment, Broadcast

log = logging.getLogger(__name__)

# Sessions: as many as connections, 4,096, and twice as many detached ones, which clients that come
# and go at a rate of 100 a second leave behind. Beyond this a detached session without running
# processes ends before its retention; `initialize` is refused if there is none.
MAX_SESSIONS = 12_288
# Sessions whose clients were granted a longer retention than that of the server, a twelfth of all:
# however long they are kept, they cannot lock out clients that connect. Further ones get the
# retention of the server, which the answer to `initialize` tells them.
MAX_LONG_SESSIONS = 1024
# Looking through all sessions for processes that have ended takes milliseconds, so it is done once
# in this time. Until then `initialize` may be refused without need.
SEARCH_SECONDS = 0.1
# A kill is immediate, except for a child in an uninterruptible system call.
END_SECONDS = 5.0


class AttachedConnection(Protocol):
    """The connection a session is attached to."""

    def notify(self, notice: Notice[msgspec.Struct], params: msgspec.Struct) -> None: ...

    def ask(self, call: Call[Any, Any], params: msgspec.Struct) -> asyncio.Future[object]:
        """Send a request; the future has the result of its response, or None without one."""
        ...

    def probe(self) -> None: ...

    def session_closed(self) -> None:
        """The client has ended its session: refuse further requests, and send nothing else."""
        ...


class Session:
    """A client's processes, and the connection that receives their events."""

    def __init__(self, make_table: Callable[[Emit], ProcessTable]) -> None:
        self._make_table = make_table
        self._captures: ProcessTable | None = None
        self.id = SessionId(str(uuid.uuid4()))
        self.connection: AttachedConnection | None = None
        self.stream_id: str | None = None  # of its last connection, if that came through a relay
        self.retention: float | None = None  # what its client was granted, if it has asked
        self.processes = make_table(self.notify)
        self.attachments: dict[ProcessId, Attachment] = {}  # detached processes that it uses
        self._is_paused = False  # the send buffer of the connection is full

    def notify(self, notice: Notice[msgspec.Struct], params: msgspec.Struct) -> None:
        # Nothing is queued while detached: the client reads missed output after it has resumed.
        if self.connection is not None:
            self.connection.notify(notice, params)

    async def ask(self, call: Call[Any, Any], params: msgspec.Struct) -> object:
        """The result of a request to the client; None for an error, or without a connection."""
        if self.connection is None:
            return None
        return await self.connection.ask(call, params)

    def make_captures(self, emit: Emit) -> ProcessTable:
        """The table of shells that capture their state, which end with the session."""
        self._captures = self._make_table(emit)
        return self._captures

    def _tables(self) -> list[ProcessTable]:
        return [self.processes] if self._captures is None else [self.processes, self._captures]

    def terminate_all(self) -> None:
        """Kill all processes, and each later one as soon as it has started."""
        for table in self._tables():
            table.terminate_all()

    async def end(self) -> None:
        """Kill and forget all processes."""
        for table in self._tables():
            await table.end()

    def check_unused(self, process_id: ProcessId) -> None:
        """Raise InvalidRequest if the id names a process, also one that is starting."""
        if self.process(process_id) is not None or self.is_starting(process_id):
            raise InvalidRequest(f"process {process_id} already exists")

    def process(self, process_id: ProcessId) -> Process | None:
        """A process of this session, or a detached one to which it is attached."""
        attachment = self.attachments.get(process_id)
        if attachment is not None:
            return attachment.broadcast.process
        return self.processes.get(process_id)

    def is_starting(self, process_id: ProcessId) -> bool:
        attachment = self.attachments.get(process_id)
        if attachment is not None:
            return attachment.broadcast.process is None
        return self.processes.is_starting(process_id)

    def attach(self, process_id: ProcessId, broadcast: Broadcast) -> Attachment:
        """Attach to a detached process under an unused id; raises InvalidRequest."""
        self.check_unused(process_id)
        attachment = broadcast.attach(process_id, self)
        self.attachments[process_id] = attachment
        return attachment

    def attachment_ended(self, process_id: ProcessId) -> None:
        del self.attachments[process_id]

    def close_attachments(self) -> None:
        """Leave the detached processes: the session ends."""
        for attachment in self.attachments.values():
            attachment.close()
        self.attachments.clear()

    @property
    def is_writable(self) -> bool:
        """Whether there is a connection, and its send buffer is not full."""
        return self.connection is not None and not self._is_paused

    def pause_writing(self) -> None:
        """Send no more output: the client does not read. Detached processes are not paused."""
        self._is_paused = True
        self.processes.pause_reading()

    def resume_writing(self) -> None:
        self._is_paused = False
        self.processes.resume_reading()
        for attachment in tuple(self.attachments.values()):
            attachment.push()

    def connection_opened(self, connection: AttachedConnection) -> None:
        self.connection = connection
        for table in self._tables():
            table.connection_opened()
        self.processes.resume_reading()
        for attachment in self.attachments.values():
            attachment.skip_to_end()

    def connection_lost(self) -> None:
        """Let the processes run on; the client may resume.

        A client that has asked for a retention finds those that have ended when it comes back.
        """
        self.connection = None
        self._is_paused = False
        for table in self._tables():
            table.connection_lost(keeps_closed=self.retention is not None)
        self.processes.resume_reading()


class Retentions(NamedTuple):
    """How many seconds sessions are kept without a connection."""

    default: float  # if their clients ask for nothing
    most: float  # that clients get


class SessionRegistry:
    """Creates, resumes and ends sessions."""

    def __init__(
        self,
        make_table: Callable[[Emit], ProcessTable],
        tasks: GuardedTasks,
        retentions: Retentions,
        clock: Callable[[], float] = boot_time,
    ) -> None:
        self._make_table = make_table
        self._tasks = tasks
        self._retention = retentions.default
        self._max_retention = max(retentions)
        self._clock = clock
        self._sessions: dict[SessionId, Session] = {}
        self._long: set[SessionId] = set()  # those with a retention above that of the server
        # Of the detached sessions: a timer, and the time of the clock that runs during suspend.
        self._expiries: dict[SessionId, tuple[asyncio.TimerHandle, float]] = {}
        # They had no process, only finished ones, or running ones when they were detached; in each
        # group in the order of detaching. A detached session starts no process.
        self._groups: tuple[dict[SessionId, None], ...] = ({}, {}, {})
        self._next_search = 0.0
        self.has_had_clients = False

    def create(self, connection: AttachedConnection) -> Session:
        if len(self._sessions) >= MAX_SESSIONS:
            self._evict()
        session = Session(self._make_table)
        session.connection = connection
        self._sessions[session.id] = session
        self.has_had_clients = True
        return session

    def resume(self, session_id: str, connection: AttachedConnection) -> Session:
        """Attach a detached session.

        If it is attached to another connection, that connection is probed: a client that resumes
        has lost it, but the server may not have noticed yet.
        """
        session = self._sessions.get(SessionId(session_id))
        if session is not None and self._is_overdue(session.id):
            self._expire(session)
            session = None
        if session is None:
            raise InvalidRequest(f"unknown session id {session_id}")
        if session.connection is not None:
            session.connection.probe()
            raise SessionAttached(f"session {session_id} is already attached to another connection")
        self._leave_detached(session)
        session.connection_opened(connection)
        return session

    def detach(self, session: Session) -> None:
        """Keep a session whose connection has ended; its processes run on until it is resumed."""
        if session.id not in self._sessions:
            return  # ended with the server
        session.connection_lost()
        retention = self._retention if session.retention is None else session.retention
        if retention <= 0:
            self._end(session)
            return
        timer = asyncio.get_running_loop().call_later(retention, self._expire, session)
        self._expiries[session.id] = (timer, self._clock() + retention)
        processes = session.processes
        group = 2 if processes.live_count else 0 if processes.is_empty else 1
        self._groups[group][session.id] = None

    def grant_retention(self, session: Session, seconds: int | None) -> int | None:
        """Grant what a client asks for, as far as possible; returns the seconds, None for None."""
        if seconds is None:
            return None
        granted = min(seconds, self._max_retention)
        self._long.discard(session.id)
        if granted > self._retention and len(self._long) >= MAX_LONG_SESSIONS:
            granted = self._retention
        if granted > self._retention:
            self._long.add(session.id)
        session.retention = granted
        return math.ceil(granted)

    def expire_overdue(self) -> None:
        """End the sessions that have expired while this machine was suspended."""
        for session_id in [each for each in self._expiries if self._is_overdue(each)]:
            self._expire(self._sessions[session_id])

    def _is_overdue(self, session_id: SessionId) -> bool:
        expiry = self._expiries.get(session_id)
        return expiry is not None and self._clock() >= expiry[1]

    def _leave_detached(self, session: Session) -> None:
        self._expiries.pop(session.id)[0].cancel()
        for group in self._groups:
            group.pop(session.id, None)

    def close(self, session: Session) -> asyncio.Task[None]:
        """End an attached session for its client; done when its processes are dead, or given up."""
        assert session.connection is not None
        session.connection.session_closed()
        session.connection = None
        return self._end(session)

    def end_of_stream(self, stream_id: str) -> None:
        """End the session whose last connection came by this relayed stream, attached or not."""
        for session in [each for each in self._sessions.values() if each.stream_id == stream_id]:
            log.warning("session %s ends: the token of its client is revoked", session.id)
            session.connection = None
            if session.id in self._expiries:
                self._leave_detached(session)
            self._end(session)

    def _evict(self) -> None:
        """End the oldest detached session without running processes, one without any if possible.

        Clients that connect and leave at once must not lock out others. Nor must they end running
        processes of clients whose connection broke: then raises InvalidRequest.
        """
        session = self._expendable()
        if session is None:
            raise InvalidRequest(
                f"at most {MAX_SESSIONS} sessions may exist, and all have a connection or running "
                "processes"
            )
        log.info("session %s ends early: at most %d sessions may exist", session.id, MAX_SESSIONS)
        self._leave_detached(session)
        self._end(session)

    def _expendable(self) -> Session | None:
        empty, finished, running = self._groups
        first = next(iter(empty or finished), None)
        if first is not None:
            return self._sessions[first]
        now = asyncio.get_running_loop().time()
        if now < self._next_search:
            return None
        for session_id in running:
            if not self._sessions[session_id].processes.live_count:
                return self._sessions[session_id]
        self._next_search = now + SEARCH_SECONDS
        return None

    def _expire(self, session: Session) -> None:
        log.info("session %s expired", session.id)
        self._leave_detached(session)
        self._end(session)

    def _end(self, session: Session) -> asyncio.Task[None]:
        del self._sessions[session.id]
        self._long.discard(session.id)
        guarded_call(session.close_attachments)
        return self._tasks.create_task(self._end_processes(session))

    async def _end_processes(self, session: Session) -> None:
        try:
            async with asyncio.timeout(END_SECONDS):
                await session.end()
        except TimeoutError:
            log.error("session %s: some processes could not be killed", session.id)

    async def end_all(self) -> None:
        """Kill the processes of every session."""
        for timer, _ in self._expiries.values():
            timer.cancel()
        self._expiries.clear()
        for detached in self._groups:
            detached.clear()
        async with asyncio.TaskGroup() as group:
            tasks = GuardedTasks(group)
            for session in self._sessions.values():
                session.connection = None
                guarded_call(session.close_attachments)
                tasks.create_task(self._end_processes(session))
        self._sessions.clear()
