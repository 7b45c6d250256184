"""Connection: one connection of a session, the receiver of its stream."""

from __future__ import annotations

import asyncio
from typing import Protocol

from exec_server.client.engine.calls import PendingCall
from exec_server.client.engine.messages import Envelope, decode
from exec_server.errors import MalformedMessage
from exec_server.net.stream import MessageStream
from exec_server.net.useless_messages import UselessMessages, flood_text


class ConnectionOwner(Protocol):
    """What a connection reports; `session.ClientSession` implements it."""

    def message_received(self, connection: Connection, envelope: Envelope) -> None:
        """A message was received; raises MalformedMessage if its content is wrong."""
        ...

    def message_malformed(self, connection: Connection, error: MalformedMessage) -> None:
        """A message was received that cannot be understood."""
        ...

    def give_up(self, connection: Connection, reason: str) -> None:
        """The server keeps the client busy with useless messages."""
        ...

    def send_queued(self) -> None:
        """The stream takes data again."""
        ...

    def connection_ended(self, connection: Connection, reason: str) -> None:
        """The stream has ended."""
        ...


class Connection:
    """A stream, and the calls on it that are not answered."""

    __slots__ = (
        "_owner",
        "_useless",
        "end_reason",
        "is_writing_paused",
        "last_id",
        "pending",
        "stream",
    )

    def __init__(self, owner: ConnectionOwner, stream: MessageStream) -> None:
        self._owner = owner
        self.stream = stream
        self.last_id = 0
        # A cancelled call stays until it is answered: the server is still working on it, so it
        # counts as one in flight.
        self.pending: dict[int, PendingCall] = {}
        self.end_reason: str | None = None
        self.is_writing_paused = False
        self._useless = UselessMessages()

    def message_received(self, message: bytes) -> None:
        if self.end_reason is not None:
            return
        try:
            self._owner.message_received(self, decode(message))
        except MalformedMessage as error:
            self._owner.message_malformed(self, error)

    def useless_received(self) -> None:
        if self.end_reason is None:
            self.judge(is_useful=False)

    def judge(self, *, is_useful: bool) -> None:
        """Count a message, or a frame; report a server that sends useless ones for too long."""
        if is_useful:
            self._useless.useful_received()
        elif self._useless.useless_received(asyncio.get_running_loop().time()):
            self._owner.give_up(self, flood_text())

    def pause_writing(self) -> None:
        self.is_writing_paused = True

    def resume_writing(self) -> None:
        self.is_writing_paused = False
        self._owner.send_queued()

    def connection_lost(self) -> None:
        if self.end_reason is None:
            self._owner.connection_ended(self, "connection lost")
