"""A relay link in memory: keeps the frames, keys and streams that a multiplexer passes to it."""

from __future__ import annotations

from exec_server.errors import RelayError
from exec_server.relay.frames import Frame, Kind, decode, encode, token_field
from exec_server.relay.multiplexer import (
    BURST_FAILURES,
    RESET_REASON,
    EncryptedMultiplexer,
    PendingHandshake,
    Verdict,
)
from exec_server.relay.noise import FIRST_BYTES, Identity, Initiator, prologue
from exec_server.relay.records import Channel, RelayChannel

EXECUTOR = Identity.generate()
CLIENT = Identity.generate()


class FakeReceiver:
    """Keeps messages; refuses those that ask for it."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.batches: list[list[bytes]] = []
        self.losses = 0

    def messages_received(self, messages: list[bytes]) -> None:
        if b"refuse" in messages:
            raise RelayError("refused")
        self.batches.append(messages)

    def stream_lost(self) -> None:
        self.losses += 1


class FakeLink:
    """The owner of the streams: keeps frames, validations and opened streams; time stands still."""

    def __init__(self, *, names_tokens: bool = False) -> None:
        self.now = 1000.0
        self.sent: list[Frame] = []
        self.asked: list[PendingHandshake] = []
        self.opened: list[FakeReceiver] = []
        self.revoked: list[str] = []
        self.streams = EncryptedMultiplexer(
            *(EXECUTOR, "env-1", "reg-1", self, lambda: self.now), names_tokens=names_tokens
        )

    def send_frame(self, frame: bytes) -> None:
        self.sent.append(decode(frame))

    def validate(self, handshake: PendingHandshake) -> None:
        self.asked.append(handshake)

    def stream_opened(self, channel: Channel) -> FakeReceiver:
        self.opened.append(FakeReceiver(channel))
        return self.opened[-1]

    def stream_revoked(self, stream_id: str) -> None:
        self.revoked.append(stream_id)

    def deliver(self, frame: Frame) -> list[Frame]:
        """The frames sent in response to this frame."""
        before = len(self.sent)
        named = token_field(frame.token_id) if frame.token_id else b""
        self.streams.frame_received(encode(frame) + named)
        return self.sent[before:]

    def finish_handshake(self, handshake: PendingHandshake, verdict: Verdict) -> list[Frame]:
        """The frames sent in response to this answer of the registry."""
        before = len(self.sent)
        self.streams.finish_handshake(handshake, verdict)
        return self.sent[before:]

    def begin(self, stream_id: str, token: str = "") -> tuple[Initiator, PendingHandshake]:
        """A handshake up to the question to the registry."""
        initiator = initiator_of(stream_id)
        first = initiator.write_first(b"authorization")
        assert self.deliver(handshake_frame(stream_id, first, token)) == []
        return initiator, self.asked[-1]

    def open(self, stream_id: str) -> RelayChannel:
        """A stream with all that belongs to it; the harness's end."""
        initiator, handshake = self.begin(stream_id)
        (answer,) = self.finish_handshake(handshake, Verdict.VALID)
        assert (answer.stream_id, answer.kind) == (stream_id, Kind.HANDSHAKE)
        return RelayChannel(stream_id, initiator.read_second(answer.payload))

    def fail(self, count: int, token: str = "") -> None:
        """Handshakes that are charged."""
        for _ in range(count):
            garbage = handshake_frame("bad", bytes(FIRST_BYTES), token)
            assert self.deliver(garbage) == [reset_frame("bad")]

    def is_refused(self, token: str = "") -> bool:
        """Whether a good handshake is refused; one that is not is taken back."""
        asked = len(self.asked)
        first = initiator_of("probe").write_first(b"")
        answers = self.deliver(handshake_frame("probe", first, token))
        assert self.deliver(reset_frame("probe")) == []
        assert answers == ([reset_frame("probe")] if len(self.asked) == asked else [])
        if not answers:
            assert self.finish_handshake(self.asked[-1], Verdict.VALID) == []
        return bool(answers)

    def failures(self) -> int:
        """How many failures were charged, found out by adding some until all is refused."""
        for missing in range(1, BURST_FAILURES + 1):
            self.fail(1)
            if self.is_refused():
                return BURST_FAILURES - missing
        raise AssertionError("never refused")


def initiator_of(stream_id: str, registration_id: str = "reg-1") -> Initiator:
    return Initiator(CLIENT, EXECUTOR.public, prologue("env-1", registration_id, stream_id))


def handshake_frame(stream_id: str, payload: bytes, token: str = "") -> Frame:
    return Frame(stream_id, Kind.HANDSHAKE, payload, token_id=token)


def reset_frame(stream_id: str) -> Frame:
    return Frame(stream_id, Kind.RESET, reason=RESET_REASON)


def data_frame_of(harness: RelayChannel, message: bytes) -> Frame:
    (piece,) = harness.records(message)
    return decode(harness.seal(piece))


def check_alive(link: FakeLink, harness: RelayChannel, receiver: FakeReceiver) -> None:
    assert link.deliver(data_frame_of(harness, b"alive?")) == []
    assert receiver.batches[-1] == [b"alive?"]
    assert harness.receive(
        decode(receiver.channel.seal(next(receiver.channel.records(b"yes"))))
    ) == [b"yes"]
    assert receiver.losses == 0
