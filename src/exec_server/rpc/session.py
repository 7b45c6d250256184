"""Session: what one client owns across connections. SessionRegistry: all of them."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from typing import Protocol

import msgspec

from exec_server.core.processes import Emit, ProcessTable
from exec_server.errors import InvalidRequest, SessionAttached
from exec_server.protocol.method import Notice
from exec_server.protocol.session import SessionId

log = logging.getLogger(__name__)

# Sessions, attached or waiting for their client to come back. Beyond it `initialize` is refused.
MAX_SESSIONS = 4096
# Killing is immediate, but a child in an uninterruptible system call dies only after it.
END_SECONDS = 5.0


class Link(Protocol):
    """The connection a session is attached to."""

    def notify(self, notice: Notice[msgspec.Struct], params: msgspec.Struct) -> None: ...

    def probe(self) -> None: ...


class Session:
    """A client's processes, and the connection that their events go to."""

    def __init__(self, make_table: Callable[[Emit], ProcessTable]) -> None:
        self.id = SessionId(str(uuid.uuid4()))
        self.link: Link | None = None
        self.processes = make_table(self._notify)

    def _notify(self, notice: Notice[msgspec.Struct], params: msgspec.Struct) -> None:
        # While detached nothing is queued: the client reads what it missed.
        if self.link is not None:
            self.link.notify(notice, params)


class SessionRegistry:
    """Creates, resumes and ends sessions."""

    def __init__(
        self,
        make_table: Callable[[Emit], ProcessTable],
        tasks: asyncio.TaskGroup,
        retention: float,
    ) -> None:
        self._make_table = make_table
        self._tasks = tasks
        self._retention = retention
        self._sessions: dict[SessionId, Session] = {}
        self._expiries: dict[SessionId, asyncio.TimerHandle] = {}

    def create(self, link: Link) -> Session:
        if len(self._sessions) >= MAX_SESSIONS:
            raise InvalidRequest(f"at most {MAX_SESSIONS} sessions may exist")
        session = Session(self._make_table)
        session.link = link
        self._sessions[session.id] = session
        return session

    def resume(self, session_id: str, link: Link) -> Session:
        """Attach a detached session.

        If it is attached elsewhere, the other connection has to prove that it is alive: a
        client that comes back has lost it, only the server may not know yet.
        """
        session = self._sessions.get(SessionId(session_id))
        if session is None:
            raise InvalidRequest(f"unknown session id {session_id}")
        if session.link is not None:
            session.link.probe()
            raise SessionAttached(f"session {session_id} is already attached to another connection")
        self._expiries.pop(session.id).cancel()
        session.link = link
        session.processes.resume()
        return session

    def detach(self, session: Session) -> None:
        """The connection is gone: its processes go on, unread, until somebody resumes."""
        if session.id not in self._sessions:
            return  # ended with the server
        session.link = None
        session.processes.resume()
        if self._retention <= 0:
            self._end(session)
            return
        loop = asyncio.get_running_loop()
        self._expiries[session.id] = loop.call_later(self._retention, self._expire, session)

    def _expire(self, session: Session) -> None:
        log.info("session %s expired", session.id)
        del self._expiries[session.id]
        self._end(session)

    def _end(self, session: Session) -> None:
        del self._sessions[session.id]
        self._tasks.create_task(self._end_processes(session))

    async def _end_processes(self, session: Session) -> None:
        try:
            async with asyncio.timeout(END_SECONDS):
                await session.processes.end()
        except TimeoutError:
            log.error("session %s: some processes could not be killed", session.id)

    async def end_all(self) -> None:
        """Kill the processes of every session."""
        for timer in self._expiries.values():
            timer.cancel()
        self._expiries.clear()
        async with asyncio.TaskGroup() as tasks:
            for session in self._sessions.values():
                session.link = None
                tasks.create_task(self._end_processes(session))
        self._sessions.clear()
