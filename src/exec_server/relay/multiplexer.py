"""The encrypted streams on an executor's link, without the socket: handshakes, limits, resets.

Theory of operation. The link passes each frame to `frame_received`; the multiplexer calls the
link back to send frames, to validate a key and to open a stream.

    (none) --handshake--> pending --finish(valid)--> open --reset, error, close--> (none)
                                  \\-finish(invalid), data, a second handshake-> reset, (none)

Any client of the relay can send frames, so a frame is trusted only after its handshake, and an
error of one stream ends that stream alone. A handshake costs about a millisecond of processor
time, so the failures of each source are limited (`handshake_failures`). Open streams go on.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from exec_server.errors import RelayError
from exec_server.printable import printable
from exec_server.relay.channel import Channel
from exec_server.relay.frames import Frame, Kind, encode
from exec_server.relay.handshake_failures import HandshakeFailures
from exec_server.relay.noise import (
    FIRST_BYTES,
    MESSAGE_BYTES,
    Ciphers,
    Identity,
    PublicKey,
    Responder,
    prologue,
)
from exec_server.relay.stream_table import REVOKED_REASON, StreamReceiver, StreamTable

log = logging.getLogger(__name__)

# Pending handshakes, as in the reference. A further one gets a reset.
MAX_PENDING = 32
# Pending handshakes of one token, if the registry names it. The others are left to other tokens.
MAX_PENDING_OF_TOKEN = 24
# The client's authorization from the registry. A longer one fails the handshake.
AUTHORIZATION_BYTES = 4096


class RelayLink(Protocol):
    """The operations of a link that the multiplexer needs."""

    def send_frame(self, frame: bytes) -> None: ...

    def validate(self, handshake: PendingHandshake) -> None:
        """Let the registry validate the key, then call `finish_handshake`."""
        ...

    def stream_opened(self, channel: Channel) -> StreamReceiver: ...

    def stream_revoked(self, stream_id: str) -> None:
        """End what a client has begun on a stream, which may have ended before."""
        ...


@dataclass(eq=False, slots=True)
class PendingHandshake:
    """A handshake whose key is being validated; compared by identity, because ids are reused."""

    stream_id: str
    key: PublicKey
    authorization: str = field(repr=False)  # a secret, good for one connection
    responder: Responder
    source: str = ""  # the token of the client, if the registry names it
    is_cancelled: bool = False
    _response: tuple[bytes, Ciphers] | None = field(default=None, repr=False)

    def prepare(self) -> None:
        """Compute the response while the registry validates the key; it is not sent yet."""
        if not self.is_cancelled:
            try:
                self.response()
            except RelayError:
                pass  # `finish_handshake` gets the same error

    def response(self) -> tuple[bytes, Ciphers]:
        """The second message, and the ciphers of the stream that it opens."""
        if self._response is None:
            self._response = self.responder.write_second()
        return self._response


class EncryptedMultiplexer:
    """The executor's streams on one link."""

    def __init__(
        self,
        identity: Identity,
        environment_id: str,
        registration_id: str,
        link: RelayLink,
        clock: Callable[[], float],
        *,
        make_ephemeral: Callable[[], Identity] = Identity.generate,
        names_tokens: bool = False,
    ) -> None:
        """With `names_tokens` the relay is that of a registry of ours.

        It sets the token of each handshake and says when one is revoked, and no client can.
        """
        self._make_ephemeral = make_ephemeral
        self._names_tokens = names_tokens
        self._identity = identity
        self._environment_id = environment_id
        self._registration_id = registration_id
        self._link = link
        self._clock = clock
        self._pending: dict[str, PendingHandshake] = {}
        # Validations in progress, by source. That of a cancelled handshake goes on and counts as
        # well: otherwise a client that resets its streams could have any number of them.
        self._validations: Counter[str] = Counter()
        self._streams = StreamTable(link.send_frame)
        self._failures = HandshakeFailures()

    def __len__(self) -> int:
        return len(self._streams)

    def frame_received(self, data: bytes) -> None:
        frame = self._streams.frame_received(data)
        if frame is None:
            return
        if frame.kind is Kind.DATA:
            self._data_received(frame)
        elif frame.kind is Kind.HANDSHAKE:
            self._handshake_received(frame)
        elif frame.kind is Kind.RESET:
            self._cancel(frame.stream_id)
            # Another relay may forward this reason from any client.
            if self._names_tokens and frame.reason == REVOKED_REASON:
                self._link.stream_revoked(frame.stream_id)

    # ---- open streams -----------------------------------------------------------------

    def _data_received(self, frame: Frame) -> None:
        if frame.is_segment:
            return  # dropped, on open streams too
        if (pending := self._pending.get(frame.stream_id)) is not None:
            self._record_failure("data before the end of a handshake", pending.source)
            self._cancel(frame.stream_id)
        self._streams.send_reset(frame.stream_id)

    def end(self, stream_id: str) -> None:
        """Remove a stream and send its peer a reset."""
        self._streams.end(stream_id)

    def link_lost(self) -> None:
        """Cancel the handshakes, and tell all streams that the link is lost."""
        for handshake in self._pending.values():
            handshake.is_cancelled = True
        self._pending.clear()
        self._streams.link_lost()

    # ---- handshakes -------------------------------------------------------------------

    def _handshake_received(self, frame: Frame) -> None:
        stream_id = frame.stream_id
        source = frame.token_id if self._names_tokens else ""
        if (pending := self._pending.get(stream_id)) is not None:
            self._record_failure("second handshake", pending.source)
            self._cancel(stream_id)
            self._streams.send_reset(stream_id)
        elif not FIRST_BYTES <= len(frame.payload) <= MESSAGE_BYTES:
            log.info("handshake failed: handshake has a wrong length")  # which cost nothing
            self._streams.send_reset(stream_id)
        elif not self._has_room(stream_id, source):
            self._streams.send_reset(stream_id)
        else:
            try:
                handshake = self._read_handshake(frame, source)
            except RelayError as error:
                self._record_failure(str(error), source)
                self._streams.send_reset(stream_id)
                return
            self._pending[stream_id] = handshake
            self._validations[source] += 1
            self._link.validate(handshake)

    def _has_room(self, stream_id: str, source: str) -> bool:
        """Whether a handshake of this source may be read; judged before any cryptography."""
        if stream_id in self._streams or self._streams.is_full:
            return False
        limit = MAX_PENDING_OF_TOKEN if source else MAX_PENDING
        if self._validations[source] >= limit or self._validations.total() >= MAX_PENDING:
            return False
        return not self._failures.is_exhausted(source, self._clock())

    def _read_handshake(self, frame: Frame, source: str) -> PendingHandshake:
        context = prologue(self._environment_id, self._registration_id, frame.stream_id)
        responder = Responder(self._identity, context, make_ephemeral=self._make_ephemeral)
        key, payload = responder.read_first(frame.payload)
        if len(payload) > AUTHORIZATION_BYTES:
            raise RelayError("authorization is too long")
        try:
            authorization = payload.decode()
        except UnicodeDecodeError:
            raise RelayError("authorization is not UTF-8") from None
        return PendingHandshake(frame.stream_id, key, authorization, responder, source)

    def finish_handshake(self, handshake: PendingHandshake, *, is_valid: bool) -> None:
        """Open or refuse a stream. Must be called once for every handshake passed to `validate`."""
        source = handshake.source
        self._validations[source] -= 1
        if not self._validations[source]:
            del self._validations[source]
        if handshake.is_cancelled:
            return
        del self._pending[handshake.stream_id]
        if is_valid and self._streams.is_full:
            self._streams.send_reset(handshake.stream_id)  # too late, but no failure of the client
            return
        try:
            if not is_valid:
                raise RelayError("key is not valid")
            response, ciphers = handshake.response()
        except RelayError as error:
            self._record_failure(str(error), source)
            self._streams.send_reset(handshake.stream_id)
            return
        self._link.send_frame(encode(Frame(handshake.stream_id, Kind.HANDSHAKE, response)))
        channel = Channel(handshake.stream_id, ciphers)
        try:
            receiver = self._link.stream_opened(channel)
        except Exception:  # an edge: the client must not wait for an answer that cannot come
            log.exception("a relay stream could not be opened")
            self._streams.send_reset(handshake.stream_id)
            return
        self._streams.add(channel, receiver)

    def _cancel(self, stream_id: str) -> None:
        handshake = self._pending.pop(stream_id, None)
        if handshake is not None:
            handshake.is_cancelled = True

    def _record_failure(self, reason: str, source: str) -> None:
        log.info("handshake failed: %s", reason)
        if self._failures.record(source, self._clock()):
            whose = f"of token {printable(source)}" if source else "on this link"
            log.warning("too many failed handshakes %s: some are refused", whose)
