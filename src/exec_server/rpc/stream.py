"""What connections need of a transport, and transports of a connection. Imports nothing of us."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol


class MessageStream(Protocol):
    """One link that carries whole messages; implemented by transports."""

    @property
    def origin(self) -> str:
        """Where messages come from, as error texts name it."""
        ...

    @property
    def is_strict(self) -> bool:
        """Whether a message that is no JSON-RPC ends the link, instead of being answered."""
        ...

    def send(self, message: bytes) -> None:
        """Send a message after those sent before. Never waits; watch `unsent`."""
        ...

    async def send_parts(self, parts: AsyncIterator[bytes], size: int) -> None:
        """Send one message of `size` bytes as it is made, never holding more than a few parts."""
        ...

    def unsent(self) -> int:
        """Bytes that the peer has not taken yet."""
        ...

    def hold(self, *, receiving: bool) -> None:
        """Stop or go on taking messages from the peer."""
        ...

    def probe(self) -> None:
        """End the link soon unless the peer shows that it is alive."""
        ...

    def close(self, code: int, reason: str) -> None:
        """End the link, telling the peer why."""
        ...


class MessageReceiver(Protocol):
    """Who is told what happens on a link; implemented by rpc.connection."""

    def message_received(self, message: bytes) -> None: ...

    def sending_slow(self) -> None:
        """The peer does not take what we send: stop producing."""
        ...

    def sending_ready(self) -> None:
        """It has taken nearly everything."""
        ...

    def link_lost(self) -> None:
        """The link is gone; called exactly once, whatever ended it."""
        ...
