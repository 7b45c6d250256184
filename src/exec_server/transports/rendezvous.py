"""The executor's link to a rendezvous: one socket, a stream for each client that comes by it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from exec_server.relay.active import Receiver
from exec_server.relay.noise import Identity
from exec_server.relay.streams import Attempt, Owner, Streams
from exec_server.rpc.stream import MessageReceiver, MessageStream
from exec_server.transports.client_socket import ClientSocket
from exec_server.transports.relay_socket import RelaySocket
from exec_server.transports.relay_stream import RECEIVING_BYTES, AnyChannel, RelayStream
from exec_server.transports.room import Room

log = logging.getLogger(__name__)


class AnyStreams(Protocol):
    """The streams of a link, encrypted or, for older peers, not."""

    def frame_received(self, data: bytes) -> None: ...

    def settle(self, attempt: Attempt, *, is_valid: bool) -> None: ...

    def end(self, stream_id: str) -> None: ...

    def lose_all(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Settings:
    """What all links of an executor have in common."""

    receiver: Callable[[MessageStream], MessageReceiver]
    tasks: asyncio.TaskGroup
    room: Room = field(default_factory=lambda: Room(RECEIVING_BYTES))


class RendezvousLink(RelaySocket):
    """One connection to the rendezvous, from its upgrade to its end."""

    def __init__(
        self,
        socket: ClientSocket,
        settings: Settings,
        make_streams: Callable[[RendezvousLink], AnyStreams],
        validate: Callable[[Attempt], Awaitable[bool]],
    ) -> None:
        super().__init__(socket)
        self._settings = settings
        self._validate = validate
        self._validations: set[asyncio.Task[None]] = set()
        self._streams = make_streams(self)

    # ---- from the socket --------------------------------------------------------------

    def message_received(self, message: bytes, *, is_text: bool) -> None:
        if not is_text:
            self._streams.frame_received(message)

    def streams_lost(self) -> None:
        for task in self._validations:
            task.cancel()
        self._streams.lose_all()

    # ---- from the streams -------------------------------------------------------------

    def validate(self, attempt: Attempt) -> None:
        for job in (self._settle(attempt), self._prepare(attempt)):
            task = self._settings.tasks.create_task(job)
            self._validations.add(task)
            task.add_done_callback(self._validations.discard)

    async def _prepare(self, attempt: Attempt) -> None:
        """Work on the answer while the registry works on its own."""
        for _ in range(2):
            await asyncio.sleep(0)  # until the request to the registry is on its way
        attempt.prepare()

    async def _settle(self, attempt: Attempt) -> None:
        is_valid = False
        try:
            is_valid = await self._validate(attempt)
        except Exception:
            # It must not get out of this task: it would end the server with all its clients.
            log.exception("validation failed unexpectedly")
        self._streams.settle(attempt, is_valid=is_valid)

    def stream_opened(self, channel: AnyChannel) -> Receiver:
        settings = self._settings
        return RelayStream(self, channel, settings.receiver, settings.room)

    def end_stream(self, stream_id: str) -> None:
        self._streams.end(stream_id)


def noise_streams(
    identity: Identity, environment_id: str, registration_id: str
) -> Callable[[Owner], Streams]:
    """Makes the encrypted streams of a link."""

    def make(owner: Owner) -> Streams:
        clock = asyncio.get_running_loop().time
        return Streams(identity, environment_id, registration_id, owner, clock)

    return make
