"""Which sessions have an executor: the API says what is needed, webhooks only say when to ask.

Each session has one task at most. A webhook wakes the task, or starts it; so the same event twice,
two events at once and an old event have no more effect than one question to the API.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import openai
from executors import Connection, Executor, Launcher, Place, Unusable
from openai.types.beta.agent_session import AgentSession
from openai.types.beta.environment import EnvironmentResourceSelfHosted
from questions import Deleted, Questions

log = logging.getLogger("cloud-agents")

# Sessions that have files on this machine. Events of further ones are answered with 503, and the
# API sends them again.
MAX_SESSIONS = 500
# How often the API is asked about a session with an executor, and about the others, without an
# event: no webhook announces a deletion.
CHECK_SECONDS = 60.0
SWEEP_SECONDS = 600.0
# An idle session keeps its executor that long, and its files until it has ended.
IDLE_SECONDS = 600.0
# Starts in a row that fail, before the next event is waited for.
ATTEMPTS = 5
# The pause after the first of them; each further one is twice as long.
PAUSE_SECONDS = 1.0
# An executor that lasted longer had started well.
STABLE_SECONDS = 60.0


class Need(Enum):
    """What a session needs, as the API says."""

    EXECUTOR = "its environment is waited for or in use"
    NOTHING = "it waits for input, or for something else than its environment"
    REMOVAL = "it has failed or was deleted, or its environment has expired"


@dataclass
class Session:
    """A session with files on this machine; its task sleeps until `woken` is set."""

    place: Place
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    connection: Connection | None = None
    may_have_expired: bool = False  # the API has announced something about its environment
    is_active: bool = False  # it has a task


class Sessions:
    """All sessions of this machine. `run` owns their tasks and executors, and ends them."""

    def __init__(
        self,
        questions: Questions,
        launcher: Launcher,
        root: Path,
        *,
        executors: int,
        idle: float = IDLE_SECONDS,
        check: float = CHECK_SECONDS,
    ) -> None:
        self._questions = questions
        self._launcher = launcher
        self._root = root
        self._idle, self._check = idle, check
        self._slots = asyncio.Semaphore(executors)
        self._known = {place.session_id: Session(place) for place in Place.recorded(root)}
        self._tasks = asyncio.TaskGroup()
        self.is_running = asyncio.Event()

    async def run(self) -> None:
        """Attend the sessions until this is cancelled."""
        async with self._tasks:
            self.is_running.set()
            try:
                await self._sweep()
            finally:
                self.is_running.clear()  # no further tasks

    async def _sweep(self) -> None:
        while True:
            # At first those of an earlier run: their executors have ended with it.
            for session_id in [key for key, each in self._known.items() if not each.is_active]:
                self.check(session_id)
            await asyncio.sleep(SWEEP_SECONDS)

    # ---- from webhooks --------------------------------------------------------------------

    def connect(self, session_id: str) -> bool:
        """Attend a session that waits for its environment; false if there is no room for it."""
        if session_id not in self._known:
            if len(self._known) >= MAX_SESSIONS:
                return False
            try:
                place = Place.create(self._root, session_id)
            except OSError as error:
                log.error("%s: no files: %s", session_id, error)
                return False
            self._known[session_id] = Session(place)
        self.check(session_id)
        return self.is_running.is_set()

    def check(self, session_id: str) -> None:
        """Ask the API about a session, if it is one of this machine."""
        session = self._known.get(session_id)
        if session is None or not self.is_running.is_set():
            return
        session.woken.set()
        if not session.is_active:
            session.is_active = True
            self._tasks.create_task(self._attend(session))

    def check_environment(self, environment_id: str) -> None:
        """Ask the API about an environment, if it is one of this machine."""
        for session in self._known.values():
            connection = session.connection
            if connection is not None and connection.environment_id == environment_id:
                session.may_have_expired = True
                self.check(session.place.session_id)

    # ---- the task of a session ------------------------------------------------------------

    async def _attend(self, session: Session) -> None:
        """Give a session what it needs, until it needs nothing."""
        failures = 0
        try:
            # No await between the last look at `woken` and the end of the task.
            while session.woken.is_set():
                if await self._step(session):
                    failures = 0
                else:
                    failures += 1
                    if failures == ATTEMPTS:
                        log.error("%s: given up until its next event", session.place.session_id)
                        return
                    await asyncio.sleep(PAUSE_SECONDS * 2 ** (failures - 1))
                    session.woken.set()
        finally:
            session.is_active = False

    async def _step(self, session: Session) -> bool:
        """Find out what a session needs, and do it; false if that failed."""
        try:
            need = await self._ask(session)
            if need is Need.REMOVAL:
                await self._forget(session)
            return need is not None and (need is not Need.EXECUTOR or await self._serve(session))
        except (Unusable, OSError) as error:  # such as a full disk
            log.error("%s: failed: %s", session.place.session_id, error)
            return False

    async def _serve(self, session: Session) -> bool:
        """Run an executor while it is needed; false if it failed."""
        async with self._slots:
            # The session may have ended while it waited for others.
            if await self._ask(session) is not Need.EXECUTOR:
                session.woken.set()
                return True
            assert session.connection is not None
            session.place = Place.create(self._root, session.place.session_id)
            executor = await self._launcher.start(session.place, session.connection)
            log.info("%s: executor started", session.place.session_id)
            watcher = self._tasks.create_task(_wake_at_end(session, executor))
            try:
                return await self._watch(session, executor)
            finally:
                await executor.stop()
                await watcher
                log.info("%s: executor ended, %s", session.place.session_id, executor.reason())

    async def _watch(self, session: Session, executor: Executor) -> bool:
        """Wait until an executor is not needed any more; false if it has ended before."""
        clock = asyncio.get_running_loop()
        started, idle_since = clock.time(), None
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause(idle_since)):
                    await session.woken.wait()
            if executor.has_ended:
                session.woken.set()
                return clock.time() - started > STABLE_SECONDS
            need = await self._ask(session)
            if need is Need.REMOVAL:
                session.woken.set()
                return True
            if need is not Need.NOTHING:  # also if the API is away
                idle_since = None
            elif idle_since is None:
                idle_since = clock.time()
            elif clock.time() - idle_since >= self._idle:
                return True

    def _pause(self, idle_since: float | None) -> float:
        if idle_since is None:
            return self._check
        left = idle_since + self._idle - asyncio.get_running_loop().time()
        return max(0.0, min(self._check, left))

    async def _ask(self, session: Session) -> Need | None:
        """Ask the API what a session needs; None if it does not say."""
        session.woken.clear()
        try:
            if session.may_have_expired and await self._has_expired(session):
                return Need.REMOVAL
            now = await self._questions.session(session.place.session_id)
        except Deleted:
            return Need.REMOVAL
        except (openai.OpenAIError, ValueError) as error:  # the latter for an answer without JSON
            log.warning("%s: the API does not answer: %s", session.place.session_id, error)
            return None
        try:
            return _need(session, now)
        except (AttributeError, TypeError):  # the package does not check the members of an answer
            log.warning("%s: the API's answer is no session", session.place.session_id)
            return None

    async def _has_expired(self, session: Session) -> bool:
        """Ask the API about an environment; the next question repeats that, unless it lives."""
        assert session.connection is not None
        session.may_have_expired = False  # another event may come meanwhile
        has_expired = True
        try:
            has_expired = await self._questions.has_expired(session.connection.environment_id)
        finally:
            session.may_have_expired |= has_expired
        return has_expired

    async def _forget(self, session: Session) -> None:
        """Remove the files of a session that has ended."""
        await session.place.remove()
        log.info("%s: removed", session.place.session_id)
        session.may_have_expired = False
        if not session.woken.is_set():  # no event has come meanwhile
            del self._known[session.place.session_id]


def _need(session: Session, now: AgentSession) -> Need | None:
    environment = now.environment
    if now.status == "failed" or environment.type in ("none", "openai_hosted"):
        return Need.REMOVAL
    if not isinstance(environment, EnvironmentResourceSelfHosted):
        return None
    session.connection = Connection(
        environment.id, environment.remote_url, environment.workspace_directory
    )
    actions = {action.type for action in now.required_actions}
    is_used = now.status == "in_progress" or "environment_connection" in actions
    return Need.EXECUTOR if is_used else Need.NOTHING


async def _wake_at_end(session: Session, executor: Executor) -> None:
    await executor.wait()
    session.woken.set()
