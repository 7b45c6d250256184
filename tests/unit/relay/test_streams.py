"""The executor's streams: every event of their lives, every limit, and the pause.

The link and the registry are fakes that keep what they are told; the harnesses are real ones.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exec_server.errors import RelayError
from exec_server.relay.active import MAX_STREAMS, RESET_REASON
from exec_server.relay.channel import Channel
from exec_server.relay.frames import Frame, Kind, decode, encode
from exec_server.relay.noise import (
    FIRST_BYTES,
    Identity,
    Initiator,
    Responder,
    prologue,
)
from exec_server.relay.streams import (
    AUTHORIZATION_BYTES,
    MAX_FAILURES,
    MAX_PENDING,
    PAUSE_SECONDS,
    Attempt,
    Streams,
)

_FILE = json.loads((Path(__file__).parents[2] / "vectors" / "relay_frames.json").read_text())
_EXECUTOR = Identity.generate()
_HARNESS = Identity.generate()


class _Receiver:
    """Keeps what arrives; refuses what says so."""

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


class _Link:
    """The owner of the streams: keeps what is sent, asked and opened; time stands still."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.sent: list[Frame] = []
        self.asked: list[Attempt] = []
        self.opened: list[_Receiver] = []
        self.streams = Streams(_EXECUTOR, "env-1", "reg-1", self, lambda: self.now)

    def send_frame(self, frame: bytes) -> None:
        self.sent.append(decode(frame))

    def validate(self, attempt: Attempt) -> None:
        self.asked.append(attempt)

    def stream_opened(self, channel: Channel) -> _Receiver:
        self.opened.append(_Receiver(channel))
        return self.opened[-1]

    def deliver(self, frame: Frame) -> list[Frame]:
        """What is sent because of this frame."""
        before = len(self.sent)
        self.streams.frame_received(encode(frame))
        return self.sent[before:]

    def settle(self, attempt: Attempt, *, is_valid: bool) -> list[Frame]:
        """What is sent because of this answer of the registry."""
        before = len(self.sent)
        self.streams.settle(attempt, is_valid=is_valid)
        return self.sent[before:]

    def begin(self, stream_id: str) -> tuple[Initiator, Attempt]:
        """A handshake up to the question to the registry."""
        initiator = _initiator(stream_id)
        assert self.deliver(_handshake(stream_id, initiator.first(b"authorization"))) == []
        return initiator, self.asked[-1]

    def open(self, stream_id: str) -> Channel:
        """A stream with all that belongs to it; the harness's end."""
        initiator, attempt = self.begin(stream_id)
        (answer,) = self.settle(attempt, is_valid=True)
        assert (answer.stream_id, answer.kind) == (stream_id, Kind.HANDSHAKE)
        return Channel(stream_id, initiator.second(answer.payload))

    def fail(self, count: int) -> None:
        """Handshakes that are charged."""
        for _ in range(count):
            assert self.deliver(_handshake("bad", b"x")) == [_reset("bad")]

    def is_paused(self) -> bool:
        """Whether a good handshake is refused; one that is not is taken back."""
        asked = len(self.asked)
        answers = self.deliver(_handshake("probe", _initiator("probe").first(b"")))
        assert self.deliver(_reset("probe")) == []
        assert answers == ([_reset("probe")] if len(self.asked) == asked else [])
        return len(self.asked) == asked

    def failures(self) -> int:
        """How many failures were charged, found out by adding some until all is refused."""
        for missing in range(1, MAX_FAILURES + 1):
            self.fail(1)
            if self.is_paused():
                return MAX_FAILURES - missing
        raise AssertionError("never paused")


@pytest.fixture
def link() -> _Link:
    return _Link()


def _initiator(stream_id: str, registration_id: str = "reg-1") -> Initiator:
    return Initiator(_HARNESS, _EXECUTOR.public, prologue("env-1", registration_id, stream_id))


def _handshake(stream_id: str, payload: bytes) -> Frame:
    return Frame(stream_id, Kind.HANDSHAKE, payload)


def _reset(stream_id: str) -> Frame:
    return Frame(stream_id, Kind.RESET, reason=RESET_REASON)


def _data(harness: Channel, message: bytes) -> Frame:
    (piece,) = harness.pieces(message)
    return decode(harness.seal(piece))


def _check_alive(link: _Link, harness: Channel, receiver: _Receiver) -> None:
    assert link.deliver(_data(harness, b"alive?")) == []
    assert receiver.batches[-1] == [b"alive?"]
    assert harness.receive(
        decode(receiver.channel.seal(next(receiver.channel.pieces(b"yes"))))
    ) == [b"yes"]
    assert receiver.losses == 0


# ---- from nothing to a stream ---------------------------------------------------------


def test_handshake_asks_the_registry_and_opens_a_stream(link: _Link) -> None:
    initiator, attempt = link.begin("stream-1")
    assert attempt.stream_id == "stream-1"
    assert attempt.key == _HARNESS.public
    assert attempt.authorization == "authorization"
    assert (link.asked, link.opened, len(link.streams)) == ([attempt], [], 0)
    (answer,) = link.settle(attempt, is_valid=True)
    assert answer == _handshake("stream-1", answer.payload)
    assert len(link.streams) == 1
    (receiver,) = link.opened
    assert receiver.channel.stream_id == "stream-1"
    _check_alive(link, Channel("stream-1", initiator.second(answer.payload)), receiver)
    assert link.failures() == 0


def test_answer_is_sent_before_the_stream_can_say_anything() -> None:
    class Talker(_Link):
        def stream_opened(self, channel: Channel) -> _Receiver:
            self.send_frame(channel.seal(b"hello"))
            return super().stream_opened(channel)

    link = Talker()
    _, attempt = link.begin("stream-1")
    link.settle(attempt, is_valid=True)
    assert [frame.kind for frame in link.sent] == [Kind.HANDSHAKE, Kind.DATA]


def test_empty_authorization_is_for_the_registry_to_judge(link: _Link) -> None:
    assert link.deliver(_handshake("s", _initiator("s").first(b""))) == []
    assert link.asked[0].authorization == ""
    assert link.failures() == 0


def test_longest_authorization(link: _Link) -> None:
    text = "ü" * (AUTHORIZATION_BYTES // 2)
    assert link.deliver(_handshake("s", _initiator("s").first(text.encode()))) == []
    assert link.asked[0].authorization == text


@pytest.mark.parametrize("kind", [Kind.RESUME, Kind.ACK, Kind.HEARTBEAT])
def test_frames_that_mean_nothing_change_nothing(link: _Link, kind: Kind) -> None:
    harness = link.open("active")
    _, attempt = link.begin("pending")
    for stream_id in ("unknown", "pending", "active"):
        assert link.deliver(Frame(stream_id, kind)) == []
    _check_alive(link, harness, link.opened[0])
    assert not attempt.is_cancelled
    assert link.failures() == 0


@pytest.mark.parametrize("case", _FILE["invalid"], ids=lambda case: case["name"])
def test_recorded_verdicts(link: _Link, case: dict[str, Any]) -> None:
    link.streams.frame_received(bytes.fromhex(case["encoded"]))
    sent = [encode(frame).hex() for frame in link.sent]
    if case["executor_verdict"] == "dropped":
        assert sent == []
    else:
        named = {entry["name"]: entry for entry in _FILE["from_reference_binary_0_166_0"]}
        assert sent == [named["reset_frame_from_reference"]["encoded"]]
    assert (link.asked, link.opened) == ([], [])
    assert link.failures() == 0


# ---- handshakes that fail -------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        b"short",
        bytes(FIRST_BYTES - 1),
        bytes(65_536),
        bytes(FIRST_BYTES),
        _initiator("s", "another registration").first(b""),
        _initiator("another stream").first(b""),
        _initiator("s").first(b"x" * (AUTHORIZATION_BYTES + 1)),
        _initiator("s").first(b"\xff"),
    ],
    ids=[
        "short",
        "nearly long enough",
        "too long",
        "zeros",
        "other registration",
        "other stream",
        "long authorization",
        "authorization not UTF-8",
    ],
)
def test_unreadable_handshake_is_reset_and_charged(link: _Link, message: bytes) -> None:
    assert link.deliver(_handshake("s", message)) == [_reset("s")]
    assert link.asked == []
    assert link.failures() == 1


def test_refused_key_is_reset_and_charged(link: _Link) -> None:
    _, attempt = link.begin("s")
    assert link.settle(attempt, is_valid=False) == [_reset("s")]
    assert (link.opened, len(link.streams)) == ([], 0)
    assert link.failures() == 1


def test_key_that_cannot_be_used_is_reset_and_charged(link: _Link) -> None:
    """It is authentic, and the registry may even like it, but nothing can be sent to it."""
    odd = Identity.generate()
    odd.public = odd.public._replace(mlkem768=b"\xff" * 1184)
    initiator = Initiator(odd, _EXECUTOR.public, prologue("env-1", "reg-1", "s"))
    assert link.deliver(_handshake("s", initiator.first(b""))) == []
    assert link.settle(link.asked[0], is_valid=True) == [_reset("s")]
    assert (link.opened, len(link.streams)) == ([], 0)
    assert link.failures() == 1


def test_second_handshake_of_a_pending_stream_cancels_it(link: _Link) -> None:
    initiator, attempt = link.begin("s")
    assert link.deliver(_handshake("s", initiator.first(b""))) == [_reset("s")]
    assert attempt.is_cancelled
    assert link.settle(attempt, is_valid=True) == []
    assert (link.opened, len(link.asked)) == ([], 1)
    assert link.failures() == 1


def test_handshake_on_an_active_stream_leaves_it_alone(link: _Link) -> None:
    harness = link.open("s")
    assert link.deliver(_handshake("s", _initiator("s").first(b""))) == [_reset("s")]
    assert len(link.asked) == 1
    _check_alive(link, harness, link.opened[0])
    assert link.failures() == 0


def test_data_of_a_pending_stream_cancels_it(link: _Link) -> None:
    _, attempt = link.begin("s")
    assert link.deliver(Frame("s", Kind.DATA, b"early")) == [_reset("s")]
    assert attempt.is_cancelled
    assert link.settle(attempt, is_valid=True) == []
    assert link.opened == []
    assert link.failures() == 1


def test_segments_are_dropped_whatever_the_state(link: _Link) -> None:
    harness = link.open("active")
    _, attempt = link.begin("pending")
    for stream_id in ("unknown", "pending", "active"):
        for odd in ({"segment_count": 0}, {"segment_count": 2}, {"segment_index": 1}):
            assert link.deliver(Frame(stream_id, Kind.DATA, b"part", **odd)) == []
    assert not attempt.is_cancelled
    _check_alive(link, harness, link.opened[0])
    assert link.failures() == 0


def test_reset_of_a_pending_stream_cancels_it_without_a_charge(link: _Link) -> None:
    _, attempt = link.begin("s")
    assert link.deliver(_reset("s")) == []
    assert attempt.is_cancelled
    assert link.settle(attempt, is_valid=True) == []
    assert link.settle(attempt, is_valid=False) == []
    assert link.opened == []
    assert link.failures() == 0


def test_stream_id_used_again_while_the_old_attempt_is_judged(link: _Link) -> None:
    _, old = link.begin("s")
    link.deliver(_reset("s"))
    initiator, new = link.begin("s")
    assert old is not new
    # The late answer to the old question says nothing about the new one.
    assert link.settle(old, is_valid=True) == []
    assert link.settle(old, is_valid=False) == []
    assert (link.opened, new.is_cancelled) == ([], False)
    (answer,) = link.settle(new, is_valid=True)
    harness = Channel("s", initiator.second(answer.payload))
    assert link.settle(old, is_valid=False) == []
    _check_alive(link, harness, link.opened[0])


def test_failed_stream_id_can_be_used_again(link: _Link) -> None:
    _, attempt = link.begin("s")
    link.settle(attempt, is_valid=False)
    _check_alive(link, link.open("s"), link.opened[0])


# ---- active streams -------------------------------------------------------------------


def test_data_of_an_unknown_stream_is_answered_by_a_reset(link: _Link) -> None:
    for _ in range(MAX_FAILURES + 1):
        assert link.deliver(Frame("nobody", Kind.DATA, b"x")) == [_reset("nobody")]
    assert link.failures() == 0


def test_streams_do_not_mix(link: _Link) -> None:
    first, second = link.open("one"), link.open("two")
    link.deliver(_data(first, b"for one"))
    link.deliver(_data(second, b"for two"))
    assert [receiver.batches for receiver in link.opened] == [[[b"for one"]], [[b"for two"]]]
    stolen = _data(first, b"for one again")._replace(stream_id="two")
    assert link.deliver(stolen) == [_reset("two")]
    assert [receiver.losses for receiver in link.opened] == [0, 1]


def test_receiver_hears_of_data_that_complete_no_message(link: _Link) -> None:
    harness = link.open("s")
    pieces = list(harness.pieces(bytes(70_000)))
    for piece in pieces:
        assert link.deliver(decode(harness.seal(piece))) == []
    assert link.opened[0].batches == [[], [bytes(70_000)]]


def _broken_data(harness: Channel) -> Iterator[Frame]:
    """One frame for each way to break the rules of an active stream."""
    yield Frame(harness.stream_id, Kind.DATA, b"forged", seq=0)
    yield Frame(harness.stream_id, Kind.DATA, b"far", seq=65)
    yield decode(harness.seal(bytes(4)))  # a message of no bytes
    yield decode(harness.seal(b"\xff" * 4))  # and one of too many
    yield decode(harness.seal(bytes(61_441)))


@pytest.mark.parametrize("which", range(5))
def test_broken_data_end_their_stream_alone(link: _Link, which: int) -> None:
    bystander = link.open("bystander")
    harness = link.open("s")
    victim = link.opened[1]
    frames = _broken_data(harness)
    for _ in range(which):
        next(frames)
    harness._seq = 0
    harness._sending._counter = 0
    assert link.deliver(next(frames)) == [_reset("s")]
    assert (victim.losses, victim.batches, len(link.streams)) == (1, [], 1)
    # It is unknown from now on, and may be opened again.
    assert link.deliver(Frame("s", Kind.DATA, b"x")) == [_reset("s")]
    _check_alive(link, link.open("s"), link.opened[2])
    _check_alive(link, bystander, link.opened[0])
    assert victim.losses == 1
    assert link.failures() == 0


def test_receiver_may_end_its_stream_by_an_error(link: _Link) -> None:
    harness = link.open("s")
    assert link.deliver(_data(harness, b"refuse")) == [_reset("s")]
    assert (link.opened[0].losses, len(link.streams)) == (1, 0)


def test_reset_of_the_peer_ends_a_stream_silently(link: _Link) -> None:
    harness = link.open("s")
    assert link.deliver(Frame("s", Kind.RESET, reason="whatever")) == []
    assert (link.opened[0].losses, len(link.streams)) == (1, 0)
    assert link.deliver(_reset("s")) == []
    assert link.opened[0].losses == 1
    assert link.deliver(_data(harness, b"late")) == [_reset("s")]


def test_reset_of_an_unknown_stream_is_nothing(link: _Link) -> None:
    assert link.deliver(_reset("nobody")) == []


def test_our_own_end_is_told_to_the_peer_alone(link: _Link) -> None:
    link.open("s")
    link.streams.end("s")
    link.streams.end("s")
    link.streams.end("nobody")
    assert link.sent[1:] == [_reset("s")]
    assert (link.opened[0].losses, len(link.streams)) == (0, 0)


def test_all_are_lost_with_the_link(link: _Link) -> None:
    link.open("one")
    link.open("two")
    _, attempt = link.begin("pending")
    sent = list(link.sent)
    link.streams.lose_all()
    link.streams.lose_all()
    assert [receiver.losses for receiver in link.opened] == [1, 1]
    assert len(link.streams) == 0
    assert attempt.is_cancelled
    link.streams.settle(attempt, is_valid=True)
    link.streams.end("one")
    assert (link.sent, len(link.opened)) == (sent, 2)


def test_receivers_may_end_their_streams_when_all_are_lost(link: _Link) -> None:
    link.open("one")
    link.open("two")
    sent = list(link.sent)
    for receiver in link.opened:
        receiver.stream_lost = lambda: link.streams.end("two")  # type: ignore[method-assign]
    link.streams.lose_all()
    assert link.sent == sent


# ---- limits ---------------------------------------------------------------------------


def test_streams_are_limited(link: _Link) -> None:
    harnesses = [link.open(f"s{number}") for number in range(MAX_STREAMS)]
    assert len(link.streams) == 128
    assert link.deliver(_handshake("more", _initiator("more").first(b""))) == [_reset("more")]
    assert len(link.asked) == 128
    _check_alive(link, harnesses[0], link.opened[0])
    link.deliver(_reset("s1"))
    _check_alive(link, link.open("more"), link.opened[128])
    link.deliver(_reset("s2"))
    assert link.failures() == 0


def test_stream_that_was_validated_too_late_is_not_charged(link: _Link) -> None:
    for number in range(MAX_STREAMS - 1):
        link.open(f"s{number}")
    attempts = [link.begin(f"late{number}")[1] for number in range(MAX_FAILURES + 2)]
    (answer,) = link.settle(attempts[0], is_valid=True)
    assert answer.kind is Kind.HANDSHAKE
    for attempt in attempts[1:-1]:
        assert link.settle(attempt, is_valid=True) == [_reset(attempt.stream_id)]
    assert link.settle(attempts[-1], is_valid=False) == [_reset(attempts[-1].stream_id)]
    assert len(link.streams) == len(link.opened) == MAX_STREAMS
    link.deliver(_reset("s0"))
    assert link.failures() == 1  # the one whose key was not valid


def test_pending_handshakes_are_limited(link: _Link) -> None:
    attempts = [link.begin(f"p{number}")[1] for number in range(MAX_PENDING)]
    assert len(attempts) == 32
    assert link.deliver(_handshake("more", _initiator("more").first(b""))) == [_reset("more")]
    assert len(link.asked) == 32
    # Only an answer makes room for another. A reset or a mistake does not: the registry goes on
    # thinking, and whoever resets could make it think about any number of keys.
    link.deliver(_reset("p0"))
    link.deliver(Frame("p1", Kind.DATA, b"early"))
    assert link.deliver(_handshake("more", _initiator("more").first(b""))) == [_reset("more")]
    for number, attempt in enumerate(attempts[:3]):
        link.settle(attempt, is_valid=True)
        link.begin(f"more {number}")
    assert link.deliver(_handshake("last", _initiator("last").first(b""))) == [_reset("last")]
    for attempt in link.asked[3:]:
        link.streams.settle(attempt, is_valid=True)
    assert len(link.streams) == 33


def test_limits_are_judged_before_any_cryptography(
    link: _Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(MAX_PENDING):
        link.begin(f"p{number}")

    def never(_: Responder, message: bytes) -> None:
        raise AssertionError("read a handshake beyond the limit")

    monkeypatch.setattr(Responder, "first", never)
    assert link.deliver(_handshake("more", bytes(FIRST_BYTES))) == [_reset("more")]


# ---- the pause ------------------------------------------------------------------------


def test_failures_pause_handshakes_for_exactly_ten_seconds(link: _Link) -> None:
    harness = link.open("active")
    _, pending = link.begin("pending")
    link.fail(MAX_FAILURES - 1)
    assert not link.is_paused()
    link.fail(1)
    assert MAX_FAILURES == 8
    assert link.is_paused()
    link.now += PAUSE_SECONDS - 0.001
    assert link.is_paused()
    # What was there before goes on.
    _check_alive(link, harness, link.opened[0])
    (answer,) = link.settle(pending, is_valid=True)
    assert answer.kind is Kind.HANDSHAKE
    link.now += 0.001
    assert link.now == 1010.0
    assert not link.is_paused()
    assert link.failures() == 0


def test_refusals_of_the_pause_are_not_charged(link: _Link) -> None:
    link.fail(MAX_FAILURES)
    link.fail(MAX_FAILURES - 1)  # nobody reads them
    link.now += PAUSE_SECONDS
    assert link.failures() == 0


def test_failures_of_the_pause_neither_count_nor_extend_it(link: _Link) -> None:
    attempts = [link.begin(f"p{number}")[1] for number in range(3 * MAX_FAILURES)]
    for attempt in attempts[:MAX_FAILURES]:
        link.settle(attempt, is_valid=False)
    assert link.is_paused()
    link.now += PAUSE_SECONDS / 2
    for attempt in attempts[MAX_FAILURES : 2 * MAX_FAILURES + 1]:
        assert link.settle(attempt, is_valid=False) == [_reset(attempt.stream_id)]
    link.deliver(Frame(attempts[-1].stream_id, Kind.DATA, b"early"))
    link.deliver(_handshake(attempts[-2].stream_id, b"second"))
    link.now += PAUSE_SECONDS / 2
    assert not link.is_paused()
    # From here on they count again.
    link.settle(attempts[-3], is_valid=False)
    assert link.failures() == 1


def test_neither_time_nor_success_lowers_the_count(link: _Link) -> None:
    link.fail(MAX_FAILURES - 1)
    link.now += 1_000_000
    link.open("good")
    link.fail(1)
    assert link.is_paused()


def test_pause_can_come_again(link: _Link) -> None:
    for _ in range(3):
        link.fail(MAX_FAILURES)
        assert link.is_paused()
        link.now += PAUSE_SECONDS
        assert not link.is_paused()


def test_all_kinds_of_failures_count_together(link: _Link) -> None:
    _, first = link.begin("a")
    _, second = link.begin("b")
    link.begin("c")
    link.settle(first, is_valid=False)
    link.deliver(_handshake("b", b"again"))
    link.deliver(Frame("c", Kind.DATA, b"early"))
    assert second.is_cancelled
    assert link.failures() == 3


# ---- the log --------------------------------------------------------------------------


def test_log_tells_no_secrets(link: _Link, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = b"secret authorization"
    link.deliver(_handshake("a", _initiator("a").first(secret)))
    link.settle(link.asked[0], is_valid=False)
    link.deliver(_handshake("a", _initiator("a").first(secret + b"\xff")))
    harness = link.open("b")
    link.deliver(_data(harness, b"refuse"))
    link.streams.frame_received(b"garbage")
    link.fail(MAX_FAILURES)
    texts = [record.getMessage() for record in caplog.records]
    assert texts[:4] == [
        "handshake failed: key is not valid",
        "handshake failed: authorization is not UTF-8",
        "stream b ends: refused",
        "dropped a frame: field of a wrong type",
    ]
    assert texts[-2:] == [
        "handshake failed: handshake has a wrong length",
        "too many failed handshakes: none accepted for 10 s",
    ]
    assert "secret" not in caplog.text
    assert "secret" not in repr(link.asked)
