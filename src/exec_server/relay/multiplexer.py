"""The streams on an executor's link, without the socket: handshakes, limits, resets.

    (none) --handshake--> pending --finish(valid)--> open --reset, error, close--> (none)
                                  \\-finish(invalid), data, a second handshake-> reset, (none)
                                  \\-finish(rejected)--> response with REJECTION, (none)

Any client of the relay can send frames, so a frame is trusted only after its handshake, and an
error of one stream ends that stream alone. A handshake costs about a millisecond of processor
time, so the failures of each source are limited (`HandshakeFailures`). Open streams go on.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple, Protocol

from exec_server.errors import RelayError, printable
from exec_server.relay.frames import Frame, Kind, decode, encode, usual_data
from exec_server.relay.noise import (
    FIRST_BYTES,
    MESSAGE_BYTES,
    REJECTION,
    Identity,
    PublicKey,
    Responder,
    prologue,
)
from exec_server.relay.records import Channel, PlainChannel, RelayChannel

log = logging.getLogger(__name__)

# The limit of the reference for one link. A further stream gets a reset.
MAX_STREAMS = 128
# Without detail on purpose: the relay, and not only the peer, can read it.
RESET_REASON = "noise_relay_protocol_error"
# The reason of a registry of ours for a stream whose token is revoked with its commands. Other
# executors take it for an ordinary reset.
REVOKED_REASON = "token_revoked"

# Failures of one source at once, and then in each second. A handshake that fails costs about a
# millisecond of processor time, so one source uses a few percent of a processor.
BURST_FAILURES = 64
FAILURES_A_SECOND = 32.0
# Sources whose failures are remembered; the one whose last failure is the oldest is forgotten.
MAX_SOURCES = 1024
# A source is reported at most so often, since a flood uses up its allowance many times a second.
REPORT_SECONDS = 10.0

# Pending handshakes, as in the reference. A further one gets a reset.
MAX_PENDING = 32
# Pending handshakes of one token, if the registry names it. The others are left to other tokens.
MAX_PENDING_OF_TOKEN = 24
# The client's authorization from the registry. A longer one fails the handshake.
AUTHORIZATION_BYTES = 4096


class StreamReceiver(Protocol):
    """The receiver of one stream's messages."""

    def messages_received(self, messages: list[bytes]) -> None:
        """A frame has arrived, with its complete messages, if any. RelayError ends the stream."""

    def stream_lost(self) -> None:
        """The stream has ended; called once, but not after `StreamTable.end` for this stream."""


class StreamTable:
    """Streams by their ids; `send_frame` sends the resets."""

    def __init__(self, send_frame: Callable[[bytes], None]) -> None:
        self._send_frame = send_frame
        self._streams: dict[str, tuple[Channel, StreamReceiver]] = {}
        self._by_prefix: dict[bytes, tuple[Channel, StreamReceiver]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, stream_id: str) -> bool:
        return stream_id in self._streams

    @property
    def is_full(self) -> bool:
        return len(self._streams) >= MAX_STREAMS

    def add(self, channel: Channel, receiver: StreamReceiver) -> None:
        entry = (channel, receiver)
        self._streams[channel.stream_id] = self._by_prefix[channel.prefix] = entry

    def frame_received(self, data: bytes) -> Frame | None:
        """Deliver a frame; returns it decoded if it is left to handle. A reset ends its stream."""
        if self._deliver_usual(data):
            return None
        try:
            frame = decode(data)
        except RelayError as error:
            log.debug("dropped a relay frame: %s", error)
            return None
        if frame.kind is Kind.RESET:
            self.drop(frame.stream_id)
        return None if frame.kind is Kind.DATA and self.deliver(frame) else frame

    def _deliver_usual(self, data: bytes) -> bool:
        """Fast path: pass an encoded data frame to its stream; False if it has to be decoded."""
        end = 4 + data[3] if len(data) > 3 else 0
        entry = self._by_prefix.get(data[:end])
        record = None if entry is None else usual_data(data, end)
        if entry is None or record is None:
            return False
        channel, receiver = entry
        try:
            receiver.messages_received(channel.receive_record(*record))
        except Exception as error:
            self._fail(channel.stream_id, receiver, error)
        return True

    def deliver(self, frame: Frame) -> bool:
        """Pass a data frame to its stream; returns False if there is no such stream."""
        entry = self._streams.get(frame.stream_id)
        if entry is None:
            return False
        channel, receiver = entry
        try:
            receiver.messages_received(channel.receive(frame))
        except Exception as error:
            self._fail(frame.stream_id, receiver, error)
        return True

    def _fail(self, stream_id: str, receiver: StreamReceiver, error: Exception) -> None:
        """End one stream, whatever its error: the other streams of the link go on."""
        if isinstance(error, RelayError):
            log.info("relay stream %s ends: %s", stream_id, error)
        else:
            log.error("relay stream %s failed unexpectedly", stream_id, exc_info=error)
        self.end(stream_id)
        _tell_lost(receiver)

    def drop(self, stream_id: str) -> None:
        """Remove a stream that the peer has reset."""
        receiver = self._remove(stream_id)
        if receiver is not None:
            _tell_lost(receiver)

    def end(self, stream_id: str) -> None:
        """Remove a stream and send its peer a reset."""
        if self._remove(stream_id) is not None:
            self.send_reset(stream_id)

    def _remove(self, stream_id: str) -> StreamReceiver | None:
        entry = self._streams.pop(stream_id, None)
        if entry is None:
            return None
        channel, receiver = entry
        del self._by_prefix[channel.prefix]
        return receiver

    def send_reset(self, stream_id: str) -> None:
        """Send a reset: there is no such stream."""
        self._send_frame(encode(Frame(stream_id, Kind.RESET, reason=RESET_REASON)))

    def link_lost(self) -> None:
        """Tell all streams that the link is lost."""
        streams, self._streams = self._streams, {}
        self._by_prefix.clear()
        for _, receiver in streams.values():
            _tell_lost(receiver)


def _tell_lost(receiver: StreamReceiver) -> None:
    try:
        receiver.stream_lost()
    except Exception:  # an edge: the other streams are told too
        log.exception("the end of a relay stream failed unexpectedly")


# A source is the token whose client sent the handshake, or without one all clients of a link. Only
# failures that cost a private key operation count. The allowance grows back, so that no source is
# locked out for long.
class _Used(NamedTuple):
    until: float  # the time at which the whole allowance is there again
    reported_at: float


class HandshakeFailures:
    """The failures of all sources; each call is given the time."""

    def __init__(self) -> None:
        # By source, the one with the latest failure at the end.
        self._used: dict[str, _Used] = {}

    def is_exhausted(self, source: str, now: float) -> bool:
        """Whether the next handshake of this source has to be refused."""
        used = self._used.get(source)
        missing = 0.0 if used is None else used.until - now
        return missing * FAILURES_A_SECOND > BURST_FAILURES - 1

    def record(self, source: str, now: float) -> bool:
        """Take one failure from the allowance; True if it is used up and that is to be reported."""
        until, reported_at = self._used.pop(source, _Used(now, now - REPORT_SECONDS))
        until = max(until, now) + 1 / FAILURES_A_SECOND
        self._used[source] = _Used(until, reported_at)
        if len(self._used) > MAX_SOURCES:
            del self._used[next(iter(self._used))]
        if not self.is_exhausted(source, now) or now - reported_at < REPORT_SECONDS:
            return False
        self._used[source] = _Used(until, now)
        return True


class Verdict(Enum):
    """The registry's answer about a handshake."""

    VALID = "the client may connect"
    INVALID = "the client may not connect, or the registry gave no answer"
    REJECTED = "the executor's own credential is rejected"


class MultiplexerLink(Protocol):
    """The operations of a link that the multiplexer needs."""

    def send_frame(self, frame: bytes) -> None: ...

    def validate(self, handshake: PendingHandshake) -> None:
        """Let the registry validate the key, then call `finish_handshake`."""

    def stream_opened(self, channel: Channel) -> StreamReceiver: ...

    def stream_revoked(self, stream_id: str) -> None:
        """End what a client has begun on a stream, which may have ended before."""


class PendingHandshake:
    """A handshake whose key is being validated; compared by identity, because ids are reused."""

    __slots__ = ("authorization", "is_cancelled", "key", "responder", "source", "stream_id")

    def __init__(
        self,
        stream_id: str,
        key: PublicKey,
        authorization: str,
        responder: Responder,
        source: str = "",
    ) -> None:
        self.stream_id = stream_id
        self.key = key
        self.authorization = authorization  # a secret, good for one connection
        self.responder = responder
        self.source = source  # the token of the client, if the registry names it
        self.is_cancelled = False

    def prepare(self) -> None:
        """Compute the response while the registry validates the key; it is not sent yet."""
        if not self.is_cancelled:
            try:
                self.responder.prepare_second()
            except RelayError:
                pass  # `finish_handshake` gets the same error


class EncryptedMultiplexer:
    """The executor's streams on one link."""

    def __init__(
        self,
        identity: Identity,
        environment_id: str,
        registration_id: str,
        link: MultiplexerLink,
        clock: Callable[[], float],
        *,
        make_ephemeral: Callable[[], Identity] = Identity.generate,
        names_tokens: bool = False,
    ) -> None:
        """`names_tokens`: our registry's relay, and no client, sets and revokes tokens."""
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

    def finish_handshake(self, handshake: PendingHandshake, verdict: Verdict) -> None:
        """Open or refuse a stream. Must be called once for every handshake passed to `validate`."""
        source = handshake.source
        self._validations[source] -= 1
        if not self._validations[source]:
            del self._validations[source]
        if handshake.is_cancelled:
            return
        del self._pending[handshake.stream_id]
        if verdict is Verdict.VALID and self._streams.is_full:
            self._streams.send_reset(handshake.stream_id)  # too late, but no failure of the client
            return
        try:
            if verdict is Verdict.INVALID:
                raise RelayError("key is not valid")
            is_rejected = verdict is Verdict.REJECTED
            response, ciphers = handshake.responder.write_second(REJECTION if is_rejected else b"")
        except RelayError as error:
            self._record_failure(str(error), source)
            self._streams.send_reset(handshake.stream_id)
            return
        self._link.send_frame(encode(Frame(handshake.stream_id, Kind.HANDSHAKE, response)))
        if is_rejected:
            # The handshake is complete and the stream is not open: no reset follows.
            self._record_failure("the registry has rejected this executor's credential", source)
            return
        channel = RelayChannel(handshake.stream_id, ciphers)
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


class PlainMultiplexer:
    """An executor's `--relay-security plain` streams; each begins with its first data frame."""

    def __init__(self, link: MultiplexerLink) -> None:
        self._link = link
        self._streams = StreamTable(link.send_frame)

    def frame_received(self, data: bytes) -> None:
        frame = self._streams.frame_received(data)
        if frame is not None and frame.kind is Kind.DATA:
            self._open(frame)

    def _open(self, frame: Frame) -> None:
        if self._streams.is_full:
            self._streams.send_reset(frame.stream_id)
            return
        channel = PlainChannel(frame.stream_id)
        self._streams.add(channel, self._link.stream_opened(channel))
        self._streams.deliver(frame)

    def finish_handshake(self, handshake: PendingHandshake, verdict: Verdict) -> None:
        """Do nothing: streams have no handshake."""

    def end(self, stream_id: str) -> None:
        """Remove a stream and send its peer a reset."""
        self._streams.end(stream_id)

    def link_lost(self) -> None:
        """Tell all streams that the link is lost."""
        self._streams.link_lost()


Multiplexer = EncryptedMultiplexer | PlainMultiplexer
