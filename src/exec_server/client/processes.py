"""Processes: starts and ends them, and gets every event of theirs to its sink once and in order.

A process has a `Feed` from before it is started, because a server may send its first output before
the answer to the start. The feed's id is a random number that is used once, so a start whose
answer was lost can be sent again: the server refuses an id that it knows.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable
from typing import Any, Final, Protocol

import msgspec

from exec_server.client.sequence import Event, EventSequence, Gap
from exec_server.client.traffic import Traffic
from exec_server.errors import (
    ConnectionLost,
    ExecServerError,
    InternalError,
    InvalidRequest,
    ProcessLost,
    ProgramNotFound,
    RpcError,
    SessionLost,
)
from exec_server.protocol.method import Notice
from exec_server.protocol.process import (
    READ,
    START,
    TERMINATE,
    ClosedParams,
    ExitedParams,
    OutputParams,
    ProcessId,
    ReadParams,
    StartParams,
    TerminateParams,
)

# For how long after it was first sent a start is sent again. Servers know a process for 30 s after
# its end, and while they do it cannot be started twice.
RESEND_SECONDS: Final = 25.0
# How often a server is asked again whether a start that it has is through.
STARTING_SECONDS: Final = 0.02
DROPPED_SECONDS: Final = 0.25
# How long somebody waits for the end of what was killed. It takes milliseconds.
KILL_SECONDS: Final = 5.0

# What is asked for at a time after a loss, and at least after further ones: a page that is larger
# than what a connection bears would never come. And how many may be lost in a row.
PAGE_BYTES: Final = 262_144
SMALL_PAGE_BYTES: Final = 4096
MAX_LOSSES: Final = 64

_EXISTS: Final = "already exists"
_STARTING: Final = "is starting"
_MISSING: Final = "(os error 2)"
_CLOSED: Final = "the environment was closed"


class Sink(Protocol):
    """Who is told what a process does, by plain calls in order."""

    def on_output(self, event: OutputParams) -> None: ...

    def on_gap(self, size: int) -> None:
        """So many bytes of output are lost."""
        ...

    def on_exited(self, event: ExitedParams) -> None:
        """It has ended; may be told twice, and the first time too early if the feed skips."""
        ...

    def on_closed(self) -> None:
        """Nothing more will come."""
        ...

    def on_failed(self, error: ExecServerError) -> None:
        """Nothing more can be known."""
        ...


class Feed:
    """One process, from here."""

    def __init__(self, sink: Sink) -> None:
        self.id = ProcessId(uuid.uuid4().hex)
        self.sink = sink
        self.sequence = EventSequence(self.id)
        self.is_started = False  # as far as we know
        self.may_run = False  # a start was sent, and has not failed
        # Its notifications are ignored until it is recovered: there is no room for them.
        self.is_skipping = False
        self.recovery: asyncio.Future[None] | None = None


class Processes:
    """The processes of an environment; a Subscriber of its session."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._feeds: dict[ProcessId, Feed] = {}
        self._kills: set[asyncio.Future[None]] = set()
        self._is_closed = False
        self._unsubscribe = traffic.session.subscribe(self)

    def open(self, sink: Sink) -> Feed:
        """A feed for a process that is to be started; `forget` it at last."""
        if self._is_closed:
            raise SessionLost(_CLOSED)
        feed = Feed(sink)
        self._feeds[feed.id] = feed
        return feed

    async def start(self, feed: Feed, params: StartParams, name: str) -> None:
        """Start it exactly once; RpcError with its name if it cannot be.

        The id in `params` is replaced by the feed's. Cancelled, it may or may not run.
        """
        params = msgspec.structs.replace(params, process_id=feed.id)
        deadline = asyncio.get_running_loop().time() + RESEND_SECONDS
        is_sent = False
        feed.may_run = True
        while True:
            try:
                await self._traffic.call(START, params)
                feed.is_started = True
                return
            except ConnectionLost:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                is_sent = True
            except SessionLost:
                feed.may_run = False  # or will not for long
                raise
            except RpcError as error:
                if not is_sent or not error.message.endswith(_EXISTS):
                    feed.may_run = False
                    raise _refusal(error, name) from None
                if await self._join(feed):
                    return

    async def _join(self, feed: Feed) -> bool:
        """Go on with a process that the server has begun to start; False if it has not."""
        began = asyncio.get_running_loop().time()
        while True:
            try:
                await self._catch_up(feed)
                feed.is_started = True
                return True
            except InvalidRequest as error:
                if not error.message.endswith(_STARTING):
                    return False
                if asyncio.get_running_loop().time() - began > self._patience():
                    # It is not going to: this makes the id free for another attempt.
                    await self._kill(feed.id)
                    return False
                await asyncio.sleep(STARTING_SECONDS)

    def _patience(self) -> float:
        """How long a start may be under way.

        The reference drops a start with its connection, and says that it is starting ever
        after; our server carries it out, and can be told by what it offers.
        """
        is_ours = self._traffic.session.environment_info.capabilities.process_read_loss
        return RESEND_SECONDS if is_ours else DROPPED_SECONDS

    def kill(self, feed: Feed) -> asyncio.Future[None]:
        """Kill it with all its descendants, whoever is cancelled; the future is done when it is."""
        killing = self._traffic.spawn(self._kill(feed.id))
        self._kills.add(killing)
        killing.add_done_callback(self._kills.discard)
        return killing

    async def _kill(self, process_id: ProcessId) -> None:
        try:
            await self._traffic.call(TERMINATE, TerminateParams(process_id), is_retryable=True)
        except ExecServerError:
            pass  # it is gone with the session, or will be

    def forget(self, feed: Feed) -> None:
        """Tell its sink nothing more."""
        self._feeds.pop(feed.id, None)
        if feed.recovery is not None:
            feed.recovery.cancel()

    async def close(self) -> None:
        """Kill all that is left, and wait for that within reason.

        Who waits for a process hears at once that nothing more will come: that it was killed
        would look like an end of its own.
        """
        self._is_closed = True
        for feed in list(self._feeds.values()):
            self.kill(feed)
            feed.sink.on_failed(SessionLost(_CLOSED))
            self.forget(feed)
        if self._kills:
            await asyncio.wait(self._kills, timeout=KILL_SECONDS)
        self._unsubscribe()

    # ---- what the session tells -------------------------------------------------------

    def on_notice(self, notice: Notice[Any], params: Any) -> None:
        if not isinstance(params, OutputParams | ExitedParams | ClosedParams):
            return
        feed = self._feeds.get(params.process_id)
        if feed is None:
            return
        if feed.is_skipping:
            if isinstance(params, ExitedParams):
                feed.sink.on_exited(params)
            return
        self._deliver(feed, feed.sequence.take(params))
        if feed.sequence.is_torn:
            self.recover(feed)

    def on_disconnected(self) -> None:
        """Nothing to do before there is a connection again."""

    def on_resumed(self) -> None:
        for feed in tuple(self._feeds.values()):
            if feed.is_started:
                self.recover(feed)

    def on_lost(self, error: SessionLost) -> None:
        for feed in tuple(self._feeds.values()):
            feed.sink.on_failed(error)

    # ---- filling gaps -----------------------------------------------------------------

    def recover(self, feed: Feed) -> None:
        """Ask for all that was missed. A question that is on its way already covers that."""
        feed.is_skipping = False
        if feed.recovery is None or feed.recovery.done():
            feed.recovery = self._traffic.spawn(self._recover(feed))

    async def _recover(self, feed: Feed) -> None:
        try:
            await self._catch_up(feed)
        except InvalidRequest as error:
            feed.sink.on_failed(ProcessLost(f"output cannot be recovered: {error}"))
        except ExecServerError as error:
            feed.sink.on_failed(error)

    async def _catch_up(self, feed: Feed) -> None:
        """Read until nothing is missing, in pages that become smaller if they do not come."""
        page = PAGE_BYTES
        losses = 0
        while True:
            params = ReadParams(feed.id, feed.sequence.ask(), page, 0)
            try:
                answer = await self._traffic.call(READ, params)
            except ConnectionLost:
                losses += 1
                if losses > MAX_LOSSES:
                    raise
                page = max(page // 2, SMALL_PAGE_BYTES)
                continue
            losses = 0
            self._deliver(feed, feed.sequence.fill(answer))
            if not answer.chunks and not feed.sequence.is_torn:
                return

    def _deliver(self, feed: Feed, events: Iterable[Event | Gap]) -> None:
        for event in events:
            if isinstance(event, OutputParams):
                feed.sink.on_output(event)
            elif isinstance(event, Gap):
                feed.sink.on_gap(event.size)
            elif isinstance(event, ExitedParams):
                feed.sink.on_exited(event)
            else:
                feed.sink.on_closed()


def _refusal(error: RpcError, name: str) -> RpcError:
    """Why a command cannot be started, with its name."""
    text = f"cannot start {name}: {error.message}"
    if isinstance(error, InternalError) and error.message.endswith(_MISSING):
        missing = ProgramNotFound(text)
        missing.data = error.data
        return missing
    return error.explained(text)
