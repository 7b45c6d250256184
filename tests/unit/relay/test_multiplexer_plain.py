"""The older form: frames that carry messages as they are."""

from __future__ import annotations

from typing import Any

import pytest

from exec_server.errors import RelayError
from exec_server.relay import records
from exec_server.relay.frames import Frame, Kind, decode, encode
from exec_server.relay.multiplexer import (
    MAX_STREAMS,
    RESET_REASON,
    PendingHandshake,
    PlainMultiplexer,
    Verdict,
)
from exec_server.relay.records import MESSAGE_BYTES, Channel, PlainChannel


class _Receiver:
    """Keeps what arrives; refuses what says so."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.losses = 0

    def messages_received(self, messages: list[bytes]) -> None:
        if b"refuse" in messages:
            raise RelayError("refused")
        self.messages += messages

    def stream_lost(self) -> None:
        self.losses += 1


class _Link:
    """The owner: keeps what is sent and who was opened."""

    def __init__(self) -> None:
        self.sent: list[Frame] = []
        self.opened: dict[str, _Receiver] = {}
        self.streams = PlainMultiplexer(self)

    def send_frame(self, frame: bytes) -> None:
        self.sent.append(decode(frame))

    def validate(self, handshake: PendingHandshake) -> None:
        raise AssertionError("streams have no handshake")

    def stream_revoked(self, stream_id: str) -> None:
        raise AssertionError("no relay may say so")

    def stream_opened(self, channel: Channel) -> _Receiver:
        self.opened[channel.stream_id] = _Receiver()
        return self.opened[channel.stream_id]

    def deliver(self, *frames: Frame) -> None:
        for frame in frames:
            self.streams.frame_received(encode(frame))


def _data(stream_id: str, payload: bytes, **members: Any) -> Frame:
    return Frame(stream_id, Kind.DATA, payload, **members)


def _reset(stream_id: str) -> Frame:
    return Frame(stream_id, Kind.RESET, reason=RESET_REASON)


# ---- one stream -----------------------------------------------------------------------


def test_messages_are_payloads_and_numbers_count() -> None:
    channel = PlainChannel("s")
    for number in range(3):
        message = b'{"id":%d}' % number
        (piece,) = channel.records(message)
        assert decode(channel.seal(piece)) == _data("s", message, seq=number)


def test_a_short_message_is_one_record() -> None:
    assert PlainChannel("s").one_record(b"message") == b"message"
    with pytest.raises(RelayError, match="message of 0 bytes"):
        PlainChannel("s").one_record(b"")


def test_numbers_begin_again_after_the_last() -> None:
    channel = PlainChannel("s")
    channel._seq = 2**32 - 1
    for seq in (2**32 - 1, 0):
        assert channel.seal(memoryview(b"x")) == encode(_data("s", b"x", seq=seq))


def test_numbers_of_the_peer_are_not_looked_at() -> None:
    channel = PlainChannel("s")
    for seq in (7, 0, 0, 2**32 - 1):
        assert channel.receive(_data("s", b"message", seq=seq)) == [b"message"]
    assert channel.receive(_data("s", b"old", segment_count=0)) == [b"old"]


def test_an_incomplete_message_can_be_dropped() -> None:
    channel = PlainChannel("s")
    channel.receive(_data("s", b"part", segment_index=0, segment_count=2))
    channel.drop_incoming()
    assert channel.incoming_size == 0


def test_segments_become_one_message() -> None:
    channel = PlainChannel("s")
    for index, (part, held) in enumerate(((b"on", 2), (b"e ", 4))):
        assert channel.receive(_data("s", part, segment_index=index, segment_count=3)) == []
        assert channel.incoming_size == held
    last = _data("s", b"message", segment_index=2, segment_count=3)
    assert channel.receive(last) == [b"one message"]
    assert channel.incoming_size == 0
    with pytest.raises(RelayError, match="segments out of order"):
        channel.receive(last)


def test_first_segment_begins_anew() -> None:
    channel = PlainChannel("s")
    assert channel.receive(_data("s", b"lost", segment_count=2)) == []
    assert channel.receive(_data("s", b"found ", segment_count=2)) == []
    last = _data("s", b"it", segment_index=1, segment_count=2)
    assert channel.receive(last) == [b"found it"]


@pytest.mark.parametrize("index", [0, 2, 3])
def test_segments_keep_their_order(index: int) -> None:
    channel = PlainChannel("s")
    channel.receive(_data("s", b"a", segment_count=4))
    wrong = _data("s", b"b", segment_index=index, segment_count=4)
    if index == 0:
        assert channel.receive(wrong) == []
    else:
        with pytest.raises(RelayError, match="segments out of order"):
            channel.receive(wrong)


def test_segments_have_the_limit_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MESSAGE_BYTES", 10)
    channel = PlainChannel("s")
    assert channel.receive(_data("s", b"12345", segment_count=2)) == []
    last = _data("s", b"67890", segment_index=1, segment_count=2)
    assert channel.receive(last) == [b"1234567890"]
    channel.receive(_data("s", b"12345", segment_count=3))
    with pytest.raises(RelayError, match="message is too long"):
        channel.receive(last._replace(payload=b"67890x"))


def test_messages_beyond_the_limits_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    channel = PlainChannel("s")
    assert channel.message_bytes == MESSAGE_BYTES
    with pytest.raises(RelayError, match="message of 0 bytes"):
        channel.records(b"")
    monkeypatch.setattr(records, "MESSAGE_BYTES", 10)
    assert list(channel.records(b"1234567890")) == [b"1234567890"]
    with pytest.raises(RelayError, match="message of 11 bytes"):
        channel.records(b"1234567890x")


def test_message_in_parts_is_collected() -> None:
    splitter = PlainChannel("s").splitter(6)
    assert list(splitter.feed(b"123")) == []
    assert list(splitter.feed(b"456")) == [b"123456"]
    assert splitter.finish() == b""


# ---- many streams ---------------------------------------------------------------------


def test_stream_begins_with_its_first_data() -> None:
    link = _Link()
    link.deliver(
        Frame("a", Kind.RESUME), Frame("a", Kind.HEARTBEAT), Frame("a", Kind.HANDSHAKE, b"x")
    )
    assert link.opened == {}
    link.deliver(_data("a", b"1"), _data("b", b"2"), _data("a", b"3"))
    assert {name: receiver.messages for name, receiver in link.opened.items()} == {
        "a": [b"1", b"3"],
        "b": [b"2"],
    }
    assert link.sent == []


def test_garbage_is_dropped() -> None:
    link = _Link()
    link.streams.frame_received(b"garbage")
    link.streams.frame_received(b"")
    assert (link.sent, link.opened) == ([], {})


def test_reset_of_the_peer_ends_a_stream() -> None:
    link = _Link()
    link.deliver(_data("a", b"1"), _data("b", b"1"))
    a, b = link.opened["a"], link.opened["b"]
    link.deliver(_reset("a"), _reset("a"), _reset("unknown"))
    assert (a.losses, b.losses, link.sent) == (1, 0, [])
    link.deliver(_data("a", b"again"))
    assert link.opened["a"] is not a
    assert link.opened["a"].messages == [b"again"]


def test_mistakes_end_one_stream() -> None:
    link = _Link()
    link.deliver(_data("a", b"1"), _data("b", b"1"))
    link.deliver(_data("a", b"x", segment_index=5, segment_count=9), _data("b", b"refuse"))
    assert link.sent == [_reset("a"), _reset("b")]
    assert [receiver.losses for receiver in link.opened.values()] == [1, 1]


def test_streams_are_limited() -> None:
    link = _Link()
    link.deliver(*(_data(f"s{number}", b"1") for number in range(MAX_STREAMS)))
    assert len(link.opened) == 128
    link.deliver(_data("more", b"1"), _data("s0", b"2"))
    assert link.sent == [_reset("more")]
    assert link.opened["s0"].messages == [b"1", b"2"]
    link.deliver(_reset("s1"), _data("more", b"1"))
    assert link.opened["more"].messages == [b"1"]


def test_our_own_end_is_told_to_the_peer_alone() -> None:
    link = _Link()
    link.deliver(_data("a", b"1"))
    link.streams.end("a")
    link.streams.end("a")
    assert link.sent == [_reset("a")]
    assert link.opened["a"].losses == 0


def test_all_are_lost_with_the_link() -> None:
    link = _Link()
    link.deliver(_data("a", b"1"), _data("b", b"1"))
    link.streams.link_lost()
    link.streams.link_lost()
    assert [receiver.losses for receiver in link.opened.values()] == [1, 1]
    assert link.sent == []


def test_there_is_nothing_to_settle() -> None:
    link = _Link()
    handshake = PendingHandshake("a", None, "", None)  # type: ignore[arg-type]
    link.streams.finish_handshake(handshake, Verdict.VALID)
    assert (link.sent, link.opened) == ([], {})
