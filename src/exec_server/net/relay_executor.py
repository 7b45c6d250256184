"""The executor's link to a rendezvous: one socket, and a stream for each client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from exec_server.host.event_loop import GuardedTasks
from exec_server.net.inbox import ByteBudget
from exec_server.net.relay_stream import RECEIVING_BYTES, RelaySocket, RelayStream
from exec_server.net.stream import ReceiverFactory, StreamRevoked
from exec_server.net.websocket.client import ClientSocket
from exec_server.relay.multiplexer import (
    EncryptedMultiplexer,
    Multiplexer,
    MultiplexerLink,
    PendingHandshake,
    StreamReceiver,
    Verdict,
)
from exec_server.relay.noise import Identity
from exec_server.relay.records import Channel

# Keys made ahead: clients that connect at the same moment. Further ones wait for theirs.
KEYS_AHEAD: Final = 4
# A key is replaced after this time, when the handshake that took it is over.
REFILL_SECONDS: Final = 0.05

log = logging.getLogger(__name__)


class EphemeralKeys:
    """Keys for handshakes, each used once and made while no client waits for it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._keys: list[Identity] = []
        self._timer: asyncio.TimerHandle | None = None
        self._schedule()

    def take(self) -> Identity:
        """A key that no other handshake gets."""
        key = self._keys.pop() if self._keys else Identity.generate()
        self._schedule()
        return key

    def _schedule(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(REFILL_SECONDS, self._refill)

    def _refill(self) -> None:
        # One at a time: each takes a fifth of a millisecond.
        self._timer = None
        self._keys.append(Identity.generate())
        if len(self._keys) < KEYS_AHEAD:
            self._schedule()


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """The settings that all links of an executor share."""

    receiver: ReceiverFactory
    tasks: GuardedTasks
    stream_revoked: StreamRevoked
    budget: ByteBudget = field(default_factory=lambda: ByteBudget(RECEIVING_BYTES))


class ExecutorRelayLink(RelaySocket):
    """The user of a ClientSocket, and the carrier of all streams on it."""

    def __init__(
        self,
        socket: ClientSocket,
        settings: RelaySettings,
        make_multiplexer: Callable[[ExecutorRelayLink], Multiplexer],
        validate: Callable[[PendingHandshake], Awaitable[Verdict]],
    ) -> None:
        super().__init__(socket)
        self._settings = settings
        self._validate = validate
        self._validations: set[asyncio.Task[None]] = set()
        self._multiplexer = make_multiplexer(self)

    def message_received(self, message: bytes, *, is_text: bool) -> None:
        if is_text:
            return
        try:
            self._multiplexer.frame_received(message)
        except Exception:  # an edge: a frame of one client must not end the link of all
            log.exception("a relay frame failed unexpectedly")

    def streams_lost(self) -> None:
        for task in self._validations:
            task.cancel()
        self._multiplexer.link_lost()

    def validate(self, handshake: PendingHandshake) -> None:
        for job in (self._finish_handshake(handshake), self._prepare(handshake)):
            task = self._settings.tasks.create_task(job)
            self._validations.add(task)
            task.add_done_callback(self._validations.discard)

    async def _prepare(self, handshake: PendingHandshake) -> None:
        """Compute the response while the registry validates the key."""
        for _ in range(2):
            await asyncio.sleep(0)  # until the request to the registry is sent
        handshake.prepare()

    async def _finish_handshake(self, handshake: PendingHandshake) -> None:
        verdict = Verdict.INVALID
        try:
            verdict = await self._validate(handshake)
        except Exception:  # an edge: the client is refused
            log.exception("validation failed unexpectedly")
        self._multiplexer.finish_handshake(handshake, verdict)

    def stream_opened(self, channel: Channel) -> StreamReceiver:
        settings = self._settings
        return RelayStream(self, channel, settings.receiver, settings.budget)

    def stream_revoked(self, stream_id: str) -> None:
        self._settings.stream_revoked(stream_id)

    def end_stream(self, stream_id: str) -> None:
        self._multiplexer.end(stream_id)


def encrypted_multiplexer(
    identity: Identity, environment_id: str, registration_id: str, *, names_tokens: bool = False
) -> Callable[[MultiplexerLink], EncryptedMultiplexer]:
    """A factory of the multiplexer of a link, whose handshakes share the keys made ahead."""
    keys = EphemeralKeys()

    def make(link: MultiplexerLink) -> EncryptedMultiplexer:
        clock = asyncio.get_running_loop().time
        return EncryptedMultiplexer(
            identity,
            environment_id,
            registration_id,
            link,
            clock,
            make_ephemeral=keys.take,
            names_tokens=names_tokens,
        )

    return make
