"""MessageStream and MessageReceiver: the interface between transports and their users."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol, runtime_checkable


class MessageStream(Protocol):
    """One link that carries whole messages; the transports implement it."""

    @property
    def origin(self) -> str:
        """The source of messages, as error texts name it."""

    @property
    def is_strict(self) -> bool:
        """Whether a message that is no JSON-RPC ends the link, instead of being answered."""

    def send(self, message: bytes) -> None:
        """Send a message after those sent before. Never waits; watch `unsent`."""

    async def send_parts(self, parts: AsyncIterator[bytes], size: int) -> None:
        """Send one message of `size` bytes in parts, holding at most a few of them."""

    def unsent(self) -> int:
        """Bytes that the peer has not taken yet."""

    def pause_reading(self) -> None:
        """Deliver no more messages until `resume_reading`; calling it twice changes nothing."""

    def resume_reading(self) -> None:
        """Deliver messages again, after the caller has returned."""

    def probe(self) -> None:
        """End the link soon unless the peer shows that it is alive."""

    def close(self, code: int, reason: str) -> None:
        """End the link, telling the peer why."""


@runtime_checkable
class GatheringStream(Protocol):
    """A message stream that also sends messages in three pieces, without joining them."""

    def send_pieces(self, head: bytes, body: bytes, tail: bytes) -> None:
        """Send one message after those sent before, like `send`."""


@runtime_checkable
class BinaryStream(Protocol):
    """A message stream that also carries binary messages, in both directions."""

    def send_binary(self, head: bytes, data: bytes) -> None:
        """Send one message after those sent before, like `send`."""


@runtime_checkable
class RelayedStream(Protocol):
    """A message stream through a relay, which knows it by an id."""

    @property
    def stream_id(self) -> str: ...


class MessageReceiver(Protocol):
    """The user of a link: gets its messages and is told when to stop sending."""

    def message_received(self, message: bytes) -> None: ...

    def pause_writing(self) -> None:
        """The send buffer is full: stop producing output."""

    def resume_writing(self) -> None:
        """The send buffer has drained."""

    def connection_lost(self) -> None:
        """The link is gone; called exactly once, whatever ended it."""


@runtime_checkable
class JudgingReceiver(Protocol):
    """A message receiver that gives up a peer which keeps it busy with useless frames."""

    def useless_received(self) -> None:
        """Something was received that is no message and no part of one."""


# Makes the user of a new link.
ReceiverFactory = Callable[[MessageStream], MessageReceiver]
# Ends what the client of a relayed stream has begun; the stream may have ended before.
StreamRevoked = Callable[[str], None]
