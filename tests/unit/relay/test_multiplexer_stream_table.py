"""The open streams of a link: delivery, and the end of each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.relay_link import FakeLink, FakeReceiver, check_alive, data_frame_of, reset_frame

from exec_server.relay.frames import Frame, Kind, decode
from exec_server.relay.multiplexer import BURST_FAILURES, Verdict
from exec_server.relay.records import Channel, RelayChannel


@pytest.fixture
def link() -> FakeLink:
    return FakeLink()


def test_data_of_an_unknown_stream_is_answered_by_a_reset(link: FakeLink) -> None:
    for _ in range(BURST_FAILURES + 1):
        assert link.deliver(Frame("nobody", Kind.DATA, b"x")) == [reset_frame("nobody")]
    assert link.failures() == 0


def test_streams_do_not_mix(link: FakeLink) -> None:
    first, second = link.open("one"), link.open("two")
    link.deliver(data_frame_of(first, b"for one"))
    link.deliver(data_frame_of(second, b"for two"))
    assert [receiver.batches for receiver in link.opened] == [[[b"for one"]], [[b"for two"]]]
    stolen = data_frame_of(first, b"for one again")._replace(stream_id="two")
    assert link.deliver(stolen) == [reset_frame("two")]
    assert [receiver.losses for receiver in link.opened] == [0, 1]


def test_receiver_hears_of_data_that_complete_no_message(link: FakeLink) -> None:
    harness = link.open("s")
    pieces = list(harness.records(bytes(70_000)))
    for piece in pieces:
        assert link.deliver(decode(harness.seal(piece))) == []
    assert link.opened[0].batches == [[], [bytes(70_000)]]


def _broken_data(harness: RelayChannel) -> Iterator[Frame]:
    """One frame for each way to break the rules of an active stream."""
    yield Frame(harness.stream_id, Kind.DATA, b"forged", seq=0)
    yield Frame(harness.stream_id, Kind.DATA, b"far", seq=65)
    yield decode(harness.seal(bytes(4)))  # a message of no bytes
    yield decode(harness.seal(b"\xff" * 4))  # and one of too many
    yield decode(harness.seal(bytes(61_441)))


@pytest.mark.parametrize("which", range(5))
def test_broken_data_end_their_stream_alone(link: FakeLink, which: int) -> None:
    bystander = link.open("bystander")
    harness = link.open("s")
    victim = link.opened[1]
    frames = _broken_data(harness)
    for _ in range(which):
        next(frames)
    harness._seq = 0
    harness._sending._counter = 0
    assert link.deliver(next(frames)) == [reset_frame("s")]
    assert (victim.losses, victim.batches, len(link.streams)) == (1, [], 1)
    # It is unknown from now on, and may be opened again.
    assert link.deliver(Frame("s", Kind.DATA, b"x")) == [reset_frame("s")]
    check_alive(link, link.open("s"), link.opened[2])
    check_alive(link, bystander, link.opened[0])
    assert victim.losses == 1
    assert link.failures() == 0


def test_receiver_may_end_its_stream_by_an_error(link: FakeLink) -> None:
    harness = link.open("s")
    assert link.deliver(data_frame_of(harness, b"refuse")) == [reset_frame("s")]
    assert (link.opened[0].losses, len(link.streams)) == (1, 0)


def test_reset_of_the_peer_ends_a_stream_silently(link: FakeLink) -> None:
    harness = link.open("s")
    assert link.deliver(Frame("s", Kind.RESET, reason="whatever")) == []
    assert (link.opened[0].losses, len(link.streams)) == (1, 0)
    assert link.deliver(reset_frame("s")) == []
    assert link.opened[0].losses == 1
    assert link.deliver(data_frame_of(harness, b"late")) == [reset_frame("s")]


def test_reset_of_an_unknown_stream_is_nothing(link: FakeLink) -> None:
    assert link.deliver(reset_frame("nobody")) == []


def test_our_own_end_is_told_to_the_peer_alone(link: FakeLink) -> None:
    link.open("s")
    link.streams.end("s")
    link.streams.end("s")
    link.streams.end("nobody")
    assert link.sent[1:] == [reset_frame("s")]
    assert (link.opened[0].losses, len(link.streams)) == (0, 0)


def test_all_are_lost_with_the_link(link: FakeLink) -> None:
    link.open("one")
    link.open("two")
    _, handshake = link.begin("pending")
    sent = list(link.sent)
    link.streams.link_lost()
    link.streams.link_lost()
    assert [receiver.losses for receiver in link.opened] == [1, 1]
    assert len(link.streams) == 0
    assert handshake.is_cancelled
    link.streams.finish_handshake(handshake, Verdict.VALID)
    link.streams.end("one")
    assert (link.sent, len(link.opened)) == (sent, 2)


def test_receivers_may_end_their_streams_when_all_are_lost(link: FakeLink) -> None:
    link.open("one")
    link.open("two")
    sent = list(link.sent)
    for receiver in link.opened:
        receiver.stream_lost = lambda: link.streams.end("two")  # type: ignore[method-assign]
    link.streams.link_lost()
    assert link.sent == sent


# ---- the fast path --------------------------------------------------------------------


def _outcome(numbers: list[int], *, spoilt: int | None, ack: int = 0) -> tuple[object, ...]:
    """The effects of the frames with these numbers, of which one may be spoilt."""
    link = FakeLink()
    harness = link.open("s")
    frames = [decode(harness.seal(piece)) for piece in harness.records(bytes(300_000))]
    frames += [data_frame_of(harness, b"short"), data_frame_of(harness, b"last")]
    sent = []
    for number in numbers:
        frame = frames[number]._replace(ack=ack)
        if number == spoilt:
            frame = frame._replace(payload=frame.payload[:-1] + bytes([frame.payload[-1] ^ 1]))
        sent.append(link.deliver(frame))
    [receiver] = link.opened
    return receiver.batches, receiver.losses, sent


@pytest.mark.parametrize(
    "numbers",
    [
        [0, 1, 2, 3, 4, 5, 6],
        [6, 5, 4, 3, 2, 1, 0],
        [0, 2, 1, 1, 0, 3, 5, 4, 4, 6],
        [1, 0, 0, 2, 3, 4, 5],
        [0, 1],
    ],
)
@pytest.mark.parametrize("spoilt", [None, 0, 4])
def test_the_fast_path_has_the_effects_of_the_other(numbers: list[int], spoilt: int | None) -> None:
    # The fast path takes no frame with an acknowledgement.
    assert _outcome(numbers, spoilt=spoilt) == _outcome(numbers, spoilt=spoilt, ack=1)


def test_a_stream_that_has_ended_is_not_found_by_the_fast_path(link: FakeLink) -> None:
    for end in (lambda: link.streams.end("s"), lambda: link.deliver(reset_frame("s"))):
        harness = link.open("s")
        link.deliver(data_frame_of(harness, b"1"))
        end()
        assert link.deliver(data_frame_of(harness, b"2")) == [reset_frame("s")]
        assert link.opened[-1].batches == [[b"1"]]


def test_short_garbage_is_no_frame(link: FakeLink) -> None:
    link.open("s")
    for size in range(6):
        link.streams.frame_received(b"\x08\x01\x12\x01s\x2a"[:size])
    assert link.opened[0].batches == []


class _Defective(FakeReceiver):
    """A receiver with a defect."""

    def messages_received(self, messages: list[bytes]) -> None:
        raise ValueError(messages)

    def stream_lost(self) -> None:
        super().stream_lost()
        raise ValueError


class _LinkWithDefect(FakeLink):
    """Its first stream has a receiver with a defect."""

    def stream_opened(self, channel: Channel) -> FakeReceiver:
        made = FakeReceiver(channel) if self.opened else _Defective(channel)
        self.opened.append(made)
        return made


@pytest.mark.parametrize("is_usual", [True, False])
def test_a_defect_ends_its_stream_alone(is_usual: bool) -> None:
    link = _LinkWithDefect()
    harness, bystander = link.open("s"), link.open("bystander")
    frame = data_frame_of(harness, b"x")
    # A frame with an unknown field has to be decoded.
    assert link.deliver(frame if is_usual else frame._replace(token_id="t")) == [reset_frame("s")]
    assert (link.opened[0].losses, len(link.streams)) == (1, 1)
    check_alive(link, bystander, link.opened[1])


def test_all_streams_learn_of_the_end_of_their_link() -> None:
    link = _LinkWithDefect()
    link.open("s")
    link.open("bystander")
    link.streams.link_lost()
    assert [receiver.losses for receiver in link.opened] == [1, 1]
