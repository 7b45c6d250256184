"""The executor's end of a rendezvous link without the link: many streams, their handshakes, limits.

Theory of operation. `frame_received` takes each frame; what follows from it happens through the
`Owner`: frames to send, a key to be validated, a stream to be opened.

    (none) --handshake--> pending --settle(valid)--> active --reset, error, close--> (none)
                                  \\-settle(refused), data, a second handshake-> reset, (none)

Frames come from anybody who can reach the relay, so nothing that they say is believed before
the handshake has proved it, and a stream's mistakes end that stream alone. A handshake costs
about a millisecond; whoever fails too many of them makes the executor refuse all for a while,
which leaves the active streams alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from exec_server.errors import RelayError
from exec_server.relay.active import ActiveStreams, Receiver
from exec_server.relay.channel import Channel
from exec_server.relay.frames import Frame, Kind, decode, encode
from exec_server.relay.noise import Ciphers, Identity, PublicKey, Responder, prologue

log = logging.getLogger(__name__)

# Pending handshakes, as many as the reference bears; one more is answered by a reset.
MAX_PENDING = 32
# After so many failed handshakes on one link all further ones are refused for a while.
MAX_FAILURES = 8
PAUSE_SECONDS = 10.0
# The harness's proof from the registry. A longer one fails the handshake.
AUTHORIZATION_BYTES = 4096


class Owner(Protocol):
    """The link, seen from here."""

    def send_frame(self, frame: bytes) -> None: ...

    def validate(self, attempt: Attempt) -> None:
        """Ask the registry; then call `settle`."""
        ...

    def stream_opened(self, channel: Channel) -> Receiver: ...


@dataclass(eq=False, slots=True)
class Attempt:
    """A handshake whose key is being validated. Compared by identity: ids may be used again."""

    stream_id: str
    key: PublicKey
    authorization: str = field(repr=False)  # good for one connection, so not for the log
    responder: Responder
    is_cancelled: bool = False
    _answer: tuple[bytes, Ciphers] | None = field(default=None, repr=False)

    def prepare(self) -> None:
        """Work on the answer while the registry is asked; it is not sent before `settle`."""
        if not self.is_cancelled:
            try:
                self.answer()
            except RelayError:
                pass  # `settle` will find the same

    def answer(self) -> tuple[bytes, Ciphers]:
        """The second message, and the ciphers of the stream that it opens."""
        if self._answer is None:
            self._answer = self.responder.second()
        return self._answer


class Streams:
    """The streams of one rendezvous connection."""

    def __init__(
        self,
        identity: Identity,
        environment_id: str,
        registration_id: str,
        owner: Owner,
        clock: Callable[[], float],
    ) -> None:
        self._identity = identity
        self._environment_id = environment_id
        self._registration_id = registration_id
        self._owner = owner
        self._clock = clock
        self._pending: dict[str, Attempt] = {}
        # Questions to the registry under way. A cancelled attempt leaves its own behind, which
        # must count too: otherwise resets would make room for any number of them.
        self._asked = 0
        self._active = ActiveStreams(owner.send_frame)
        self._failures = 0
        self._paused_until = 0.0

    def __len__(self) -> int:
        return len(self._active)

    def frame_received(self, data: bytes) -> None:
        try:
            frame = decode(data)
        except RelayError as error:
            log.debug("dropped a frame: %s", error)
            return
        if frame.kind is Kind.DATA:
            self._data_received(frame)
        elif frame.kind is Kind.HANDSHAKE:
            self._handshake_received(frame)
        elif frame.kind is Kind.RESET:
            self._cancel(frame.stream_id)
            self._active.drop(frame.stream_id)

    # ---- active streams ---------------------------------------------------------------

    def _data_received(self, frame: Frame) -> None:
        # Segments are dropped as on active streams, whatever stream they are for.
        if self._active.deliver(frame) or frame.is_segment:
            return
        if frame.stream_id in self._pending:
            self._charge("data before the end of a handshake")
            self._cancel(frame.stream_id)
        self._active.refuse(frame.stream_id)

    def end(self, stream_id: str) -> None:
        """Forget a stream and tell its peer."""
        self._active.end(stream_id)

    def lose_all(self) -> None:
        """The link is gone, and all streams with it."""
        for attempt in self._pending.values():
            attempt.is_cancelled = True
        self._pending.clear()
        self._active.lose_all()

    # ---- handshakes -------------------------------------------------------------------

    def _handshake_received(self, frame: Frame) -> None:
        stream_id = frame.stream_id
        if stream_id in self._pending:
            self._charge("second handshake")
            self._cancel(stream_id)
            self._active.refuse(stream_id)
        elif (
            stream_id in self._active
            or self._active.is_full
            or self._asked >= MAX_PENDING
            or self._is_paused()
        ):
            self._active.refuse(stream_id)
        else:
            try:
                attempt = self._read_handshake(frame)
            except RelayError as error:
                self._charge(str(error))
                self._active.refuse(stream_id)
                return
            self._pending[stream_id] = attempt
            self._asked += 1
            self._owner.validate(attempt)

    def _read_handshake(self, frame: Frame) -> Attempt:
        context = prologue(self._environment_id, self._registration_id, frame.stream_id)
        responder = Responder(self._identity, context)
        key, payload = responder.first(frame.payload)
        if len(payload) > AUTHORIZATION_BYTES:
            raise RelayError("authorization is too long")
        try:
            authorization = payload.decode()
        except UnicodeDecodeError:
            raise RelayError("authorization is not UTF-8") from None
        return Attempt(frame.stream_id, key, authorization, responder)

    def settle(self, attempt: Attempt, *, is_valid: bool) -> None:
        """The registry has answered, or has not in time; to be called for every attempt."""
        self._asked -= 1
        if attempt.is_cancelled:
            return
        del self._pending[attempt.stream_id]
        if is_valid and self._active.is_full:
            self._active.refuse(attempt.stream_id)  # it came too late, but it made no mistake
            return
        try:
            if not is_valid:
                raise RelayError("key is not valid")
            answer, ciphers = attempt.answer()
        except RelayError as error:
            self._charge(str(error))
            self._active.refuse(attempt.stream_id)
            return
        self._owner.send_frame(encode(Frame(attempt.stream_id, Kind.HANDSHAKE, answer)))
        channel = Channel(attempt.stream_id, ciphers)
        self._active.add(channel, self._owner.stream_opened(channel))

    def _cancel(self, stream_id: str) -> None:
        attempt = self._pending.pop(stream_id, None)
        if attempt is not None:
            attempt.is_cancelled = True

    def _charge(self, why: str) -> None:
        log.info("handshake failed: %s", why)
        if self._is_paused():
            return  # it began before the pause; the next count begins after it
        self._failures += 1
        if self._failures == MAX_FAILURES:
            self._failures = 0
            self._paused_until = self._clock() + PAUSE_SECONDS
            log.warning("too many failed handshakes: none accepted for %g s", PAUSE_SECONDS)

    def _is_paused(self) -> bool:
        return self._clock() < self._paused_until
