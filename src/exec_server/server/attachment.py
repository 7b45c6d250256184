"""Attachment: a session's view of a detached process, with a position of its own in its events.

Theory of operation. An event is sent at once to an attachment that has all earlier ones. An
attachment whose connection does not take more falls behind; when the connection is writable again,
`push` continues from its position with the retained output. Output that was dropped meanwhile
leaves a gap in the numbers, by which the client learns that it has to ask process/read how much is
lost. So a slow client neither delays the process nor other clients.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Protocol

import msgspec

from exec_server.errors import InvalidRequest
from exec_server.host.event_loop import guarded_call
from exec_server.process.process import Process
from exec_server.protocol.decoding import Notice
from exec_server.protocol.process import (
    CLOSED,
    EXITED,
    OUTPUT,
    ClosedParams,
    ExitedParams,
    Flow,
    OutputParams,
    ProcessId,
)

# Attachments of one process. Each event is sent to all of them on the event loop, so this many
# bound the time that a chunk takes. A further one is refused.
MAX_ATTACHMENTS = 32
# Chunks that are taken from the log at a time.
BATCH_CHUNKS = 32
# An attachment that has fallen behind sends for this long before others do; `server.connection` has
# the same limit for requests.
BURST_SECONDS = 0.002

Event = OutputParams | ExitedParams | ClosedParams
_NOTICES: dict[type[Event], Notice[msgspec.Struct]] = {
    OutputParams: OUTPUT,
    ExitedParams: EXITED,
    ClosedParams: CLOSED,
}


class Channel(Protocol):
    """The session of an attachment, as far as an attachment needs it."""

    @property
    def is_writable(self) -> bool:
        """Whether there is a connection, and it takes notifications."""
        ...

    def notify(self, notice: Notice[msgspec.Struct], params: msgspec.Struct) -> None: ...

    def attachment_ended(self, process_id: ProcessId) -> None:
        """The process was not started, or is forgotten."""
        ...


class Broadcast:
    """The events of one detached process, and the attachments that receive them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process: Process | None = None  # None while it starts
        self.attachments: dict[Attachment, None] = {}
        self.last_activity = 0.0  # output, or an attachment that came or went
        self._ends: list[ExitedParams | ClosedParams] = []  # two at most, in order
        self._serials = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self.touch()

    def touch(self) -> None:
        """Count from now how long the process is idle."""
        self.last_activity = self._loop.time()

    def attach(self, process_id: ProcessId, channel: Channel) -> Attachment:
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
        if not isinstance(event, OutputParams):
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
            OutputParams(self.process.id, chunk.seq, chunk.stream, chunk.chunk) for chunk in chunks
        ]
        is_complete = len(chunks) < BATCH_CHUNKS
        for end in self._ends:
            if end.seq > seq and (is_complete or end.seq < chunks[-1].seq):
                events.append(end)
        events.sort(key=lambda event: event.seq)
        return events


class Attachment:
    """One session's subscription to the events of a detached process, under an id of its own."""

    def __init__(
        self, process_id: ProcessId, broadcast: Broadcast, channel: Channel, serial: int
    ) -> None:
        self.process_id = process_id
        self.broadcast = broadcast
        self.channel = channel
        self.after_seq = 0  # where the client asked to begin
        self._serial = serial
        self._position = 0  # the last event that was sent, or left out by the flow `retain`
        self._flow: Flow = "send"
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

    def set_flow(self, flow: Flow) -> None:
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
        self._position = event.seq
        if self._flow == "retain" and isinstance(event, OutputParams):
            return
        labelled = msgspec.structs.replace(event, process_id=self.process_id)
        self.channel.notify(_NOTICES[type(event)], labelled)
