"""One encrypted stream: frames in any order become messages, messages become frames."""

from __future__ import annotations

from typing import Any

import pytest

from exec_server.errors import RelayError
from exec_server.relay import records
from exec_server.relay.frames import Frame, Kind, decode
from exec_server.relay.noise import Cipher, Ciphers
from exec_server.relay.records import (
    MESSAGE_BYTES,
    RECORD_BYTES,
    RelayChannel,
    length_prefix,
    with_length_prefix,
)

_THERE, _BACK = b"t" * 32, b"b" * 32

_SEGMENTS: list[dict[str, Any]] = [{"segment_count": 0}, {"segment_count": 2}, {"segment_index": 1}]


def _pair() -> tuple[RelayChannel, RelayChannel]:
    """Both ends of one stream."""
    ours = RelayChannel("stream-1", Ciphers(Cipher(_THERE), Cipher(_BACK)))
    theirs = RelayChannel("stream-1", Ciphers(Cipher(_BACK), Cipher(_THERE)))
    return ours, theirs


def _frames(sender: RelayChannel, message: bytes) -> list[Frame]:
    return [decode(sender.seal(piece)) for piece in sender.records(message)]


def _refusal(receiver: RelayChannel, frame: Frame) -> str:
    with pytest.raises(RelayError) as refused:
        receiver.receive(frame)
    return str(refused.value)


def test_messages_arrive_in_both_directions() -> None:
    ours, theirs = _pair()
    for number in range(3):
        for sender, receiver in ((ours, theirs), (theirs, ours)):
            message = b"message %d" % number
            (frame,) = _frames(sender, message)
            assert frame == Frame("stream-1", Kind.DATA, frame.payload, seq=number)
            assert message not in frame.payload
            assert receiver.receive(frame) == [message]


def test_a_short_message_is_one_record() -> None:
    ours, _ = _pair()
    assert [ours.one_record(b"message")] == list(ours.records(b"message"))
    with pytest.raises(RelayError, match="message of 0 bytes"):
        ours.one_record(b"")


def test_long_message_takes_several_frames() -> None:
    ours, theirs = _pair()
    message = bytes(range(256)) * 1000
    frames = _frames(ours, message)
    assert [frame.seq for frame in frames] == [0, 1, 2, 3, 4]
    assert [len(frame.payload) for frame in frames[:-1]] == [RECORD_BYTES + 16] * 4
    for frame in frames[:-1]:
        assert theirs.receive(frame) == []
        assert theirs.incoming_size == len(message)
    assert theirs.receive(frames[-1]) == [message]
    assert theirs.incoming_size == 0


def test_incomplete_messages_can_be_dropped() -> None:
    ours, theirs = _pair()
    frames = _frames(ours, bytes(300_000))
    theirs.receive(frames[0])
    theirs.receive(frames[2])
    theirs.drop_incoming()
    assert theirs.incoming_size == 0
    assert theirs.receive(frames[3]) == []


def test_message_in_parts_takes_the_same_records() -> None:
    ours, theirs = _pair()
    message = bytes(range(256)) * 1000
    splitter = ours.splitter(len(message))
    records = [record for half in (message[:99], message[99:]) for record in splitter.feed(half)]
    last = splitter.finish()
    assert last
    found = [theirs.receive(decode(ours.seal(record))) for record in [*records, last]]
    assert found == [[], [], [], [], [message]]


@pytest.mark.parametrize("size", [0, MESSAGE_BYTES + 1])
def test_messages_beyond_the_limits_are_not_sent(size: int) -> None:
    ours, theirs = _pair()
    with pytest.raises(RelayError, match=f"message of {size} bytes"):
        ours.splitter(size)
    if not size:
        with pytest.raises(RelayError, match="message of 0 bytes"):
            ours.records(b"")
    (frame,) = _frames(ours, b"next")  # no number was lost
    assert theirs.receive(frame) == [b"next"]
    assert ours.message_bytes == MESSAGE_BYTES


def test_frames_may_arrive_in_any_order_and_twice() -> None:
    ours, theirs = _pair()
    first, second, third = (_frames(ours, text)[0] for text in (b"one", b"two", b"three"))
    assert theirs.receive(third) == []
    assert theirs.receive(second) == []
    assert theirs.receive(third._replace(payload=b"forged copy")) == []
    assert theirs.receive(first) == [b"one", b"two", b"three"]
    for late in (first, second, third):
        assert theirs.receive(late) == []
    assert theirs.receive(_frames(ours, b"four")[0]) == [b"four"]


def test_segments_are_dropped_and_waited_for() -> None:
    ours, theirs = _pair()
    (frame,) = _frames(ours, b"whole")
    for odd in _SEGMENTS:
        assert theirs.receive(frame._replace(**odd)) == []
    assert theirs.receive(frame) == [b"whole"]


@pytest.mark.parametrize("payload", [b"x", bytes(16), bytes(100)])
def test_forged_records_are_refused(payload: bytes) -> None:
    ours, theirs = _pair()
    assert _refusal(theirs, Frame("stream-1", Kind.DATA, payload)) == "decryption failed"
    # The true one comes too late: its number was used.
    (frame,) = _frames(ours, b"true")
    assert theirs.receive(frame) == []


def test_records_cannot_change_places() -> None:
    ours, theirs = _pair()
    first, second = _frames(ours, b"one")[0], _frames(ours, b"two")[0]
    assert _refusal(theirs, second._replace(seq=first.seq)) == "decryption failed"


def test_records_cannot_be_sent_back() -> None:
    ours, _ = _pair()
    assert _refusal(ours, _frames(ours, b"mine")[0]) == "decryption failed"


def test_rules_of_the_parts_hold() -> None:
    ours, theirs = _pair()
    frame = decode(ours.seal(b""))
    assert theirs.receive(frame) == []  # an empty record
    frame = decode(ours.seal(with_length_prefix(b"one") + with_length_prefix(b"two")))
    assert theirs.receive(frame) == [b"one", b"two"]
    assert _refusal(theirs, frame._replace(seq=2 + 65)) == "record exceeds reorder window"
    assert _refusal(theirs, decode(ours.seal(bytes(4)))) == "message of 0 bytes"
    ours, theirs = _pair()
    record = length_prefix(RECORD_BYTES) + bytes(RECORD_BYTES - 3)
    assert _refusal(theirs, decode(ours.seal(record))) == "record is too long"


def test_last_number_is_used_once() -> None:
    ours, _ = _pair()
    ours._seq = records._LAST_SEQ
    assert decode(ours.seal(memoryview(b"last"))).seq == 2**32 - 1
    for _ in range(2):
        with pytest.raises(RelayError, match="stream is exhausted"):
            ours.seal(b"one more")
