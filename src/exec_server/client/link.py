"""One connection to a server: numbers requests, finds whose answer came, sorts the rest.

A link knows nothing of what comes before and after it: that is the session's business.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from msgspec import UNSET, Raw

from exec_server.client.answers import Envelope, decode
from exec_server.errors import ExecServerError, MalformedMessage
from exec_server.protocol.jsonrpc import RequestId
from exec_server.rpc.stream import MessageStream

log = logging.getLogger(__name__)

NORMAL = 1000
PROTOCOL_ERROR = 1002
# What a server puts in place of the id when it could not read a message.
_NO_ID = -1


class Waiting:
    """A request that waits for its turn or for its answer; cancelling its future forgets it."""

    __slots__ = ("body", "future", "is_retryable", "times_sent")

    def __init__(self, body: bytes, *, is_retryable: bool) -> None:
        self.body = body
        self.is_retryable = is_retryable
        self.times_sent = 0
        self.future: asyncio.Future[Raw] = asyncio.get_running_loop().create_future()

    def resolve(self, result: Raw) -> None:
        if not self.future.done():
            self.future.set_result(result)

    def fail(self, error: ExecServerError) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # whoever waited may be cancelled before asking for it


class LinkOwner(Protocol):
    """Who is told what happens on a link."""

    def notified(self, link: Link, method: str, params: Raw) -> None:
        """A notification came; MalformedMessage ends the link."""
        ...

    def requested(self, link: Link, request_id: RequestId, method: str, params: Raw) -> None:
        """The server asks something."""
        ...

    def room_made(self, link: Link) -> None:
        """More can be sent: an answer came, or the server takes what we send again."""
        ...

    def link_ended(self, link: Link, unanswered: list[Waiting], reason: str) -> None:
        """Nothing more will come; called exactly once."""
        ...


class Link:
    """The receiver of a message stream."""

    def __init__(self, owner: LinkOwner, stream: MessageStream) -> None:
        self._owner = owner
        self._stream = stream
        self._last_id = 0
        # Those that nobody waits for any more stay until they are answered: the server is
        # still at work on them, so they count.
        self._asked: dict[int, Waiting] = {}
        self.ended: str | None = None  # why
        self.is_slow = False

    @property
    def unanswered(self) -> int:
        return len(self._asked)

    # ---- to the server ----------------------------------------------------------------

    def ask(self, waiting: Waiting) -> None:
        """Send a request; its future gets the answer."""
        self._last_id += 1
        self._asked[self._last_id] = waiting
        waiting.times_sent += 1
        self._stream.send(b'{"id":%d,%b' % (self._last_id, waiting.body))
        if not waiting.is_retryable:
            waiting.body = b""  # it may be large, and the answer may take long

    def send(self, message: bytes) -> None:
        """Send anything else: a notification, or an answer to the server."""
        self._stream.send(message)

    def hold(self, *, receiving: bool) -> None:
        self._stream.hold(receiving=receiving)

    def drop(self, reason: str, code: int = NORMAL) -> None:
        """End the connection; what is under way is lost."""
        if self.ended is None:
            log.info("connection ends: %s", reason)
            self._end(reason)
            self._stream.close(code, reason[:100].encode("ascii", "replace").decode())

    # ---- from the server --------------------------------------------------------------

    def message_received(self, message: bytes) -> None:
        if self.ended is not None:
            return
        try:
            envelope = decode(message)
            if envelope.method is UNSET:
                self._answered(envelope)
            elif envelope.id is UNSET:
                self._owner.notified(self, envelope.method, envelope.params)
            else:
                self._owner.requested(self, envelope.id, envelope.method, envelope.params)
        except MalformedMessage as error:
            self.drop(f"malformed message from the server: {error}", PROTOCOL_ERROR)

    def _answered(self, envelope: Envelope) -> None:
        request_id = envelope.id
        waiting = self._asked.pop(request_id, None) if type(request_id) is int else None
        if waiting is None:
            if request_id == _NO_ID and envelope.error is not UNSET:
                # Whose message it was cannot be told, and one that nobody answers would hang.
                raise MalformedMessage(f"it could not read a request: {envelope.error.message}")
            log.info("the server answered a request that was not made")
        elif envelope.result is not UNSET:
            waiting.resolve(envelope.result)
        else:
            assert envelope.error is not UNSET
            waiting.fail(envelope.error.error())
        self._owner.room_made(self)

    def sending_slow(self) -> None:
        self.is_slow = True

    def sending_ready(self) -> None:
        self.is_slow = False
        if self.ended is None:
            self._owner.room_made(self)

    def link_lost(self) -> None:
        if self.ended is None:
            self._end("connection lost")

    def _end(self, reason: str) -> None:
        self.ended = reason
        asked, self._asked = self._asked, {}
        unanswered = [waiting for waiting in asked.values() if not waiting.future.done()]
        self._owner.link_ended(self, unanswered, reason)
