"""The frame codec: what clients may send, what they may not, and what we send."""

from __future__ import annotations

import struct

import pytest
from tests.support.raw_links import frame_bytes

from exec_server.errors import ProtocolError
from exec_server.net.websocket.frames import (
    DIRECT_RECEIVE_BYTES,
    DIRECT_RECEIVE_GROWTH,
    DIRECT_RECEIVE_LEAST_BYTES,
    FRAGMENTS_IN_A_ROW,
    MESSAGE_BYTES,
    UNFINISHED,
    Event,
    FrameReader,
    Opcode,
    close_answer,
    close_payload,
    frame_header,
    masked_frame,
    text_header,
)


def _events(data: bytes) -> list[Event]:
    reader = FrameReader()
    reader.feed(data)
    return _drain(reader)


def _drain(reader: FrameReader) -> list[Event]:
    found = []
    while (event := reader.next_event()) is not None:
        found.append(event)
    return found


def _head(first: int, size: int) -> bytes:
    """The head of a masked frame that announces this many bytes."""
    return bytes((first, 0xFF)) + struct.pack(">Q", size) + b"mask"


def _refusal(*pieces: bytes) -> tuple[int, str]:
    reader = FrameReader()
    for piece in pieces:
        reader.feed(piece)
    with pytest.raises(ProtocolError) as refused:
        _drain(reader)
    return refused.value.close_code, refused.value.reason


@pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 65_535, 65_536, 70_001])
@pytest.mark.parametrize("opcode", [Opcode.TEXT, Opcode.BINARY])
def test_message_in_one_frame(opcode: Opcode, size: int) -> None:
    payload = bytes(index % 127 for index in range(size))
    assert _events(frame_bytes(opcode, payload)) == [Event(opcode, payload)]


@pytest.mark.parametrize("size", [0, 1, 125, 126, 500, 65_535])
def test_whole_message_is_the_short_way(size: int) -> None:
    payload = b"x" * size
    reader = FrameReader()
    assert reader.whole_message(frame_bytes(Opcode.TEXT, payload)) == payload
    assert reader.next_event() is None


def test_whole_message_leaves_everything_else_to_the_long_way() -> None:
    whole = frame_bytes(Opcode.TEXT, b"payload")
    others = [
        b"",
        whole[:1],
        whole[:-1],
        whole + b"\x81",
        whole + whole,
        frame_bytes(Opcode.TEXT, b"x" * 200)[:-1],
        frame_bytes(Opcode.TEXT, b"x" * 200) + b"y",
        frame_bytes(Opcode.TEXT, b"x" * 70_000),
        frame_bytes(Opcode.BINARY, b"payload"),
        frame_bytes(Opcode.PING, b"payload"),
        frame_bytes(Opcode.TEXT, b"payload", fin=False),
        frame_bytes(Opcode.TEXT, b"payload", rsv=4),
        frame_bytes(Opcode.TEXT, b"payload", mask=False),
        frame_bytes(Opcode.TEXT, b"\xff"),
        # A length of two bytes where one would do is odd, but no offence.
        bytes((0x81, 0xFE, 0, 3)) + bytes(4) + b"abc",
    ]
    for data in others:
        assert FrameReader().whole_message(data) is None


def test_whole_message_does_not_overtake_what_came_before() -> None:
    whole = frame_bytes(Opcode.TEXT, b"late")
    reader = FrameReader()
    reader.feed(frame_bytes(Opcode.TEXT, b"first", fin=False))
    assert reader.next_event() is None
    assert reader.whole_message(whole) is None
    reader = FrameReader()
    reader.feed(whole[:3])
    assert reader.next_event() is None
    assert reader.whole_message(whole) is None
    reader.feed(whole[3:])
    assert _drain(reader) == [Event(Opcode.TEXT, b"late")]


def test_long_form_of_a_short_length_is_accepted() -> None:
    data = _head(0x82, 3)[:-4] + bytes(4) + b"abc"
    assert _events(data) == [Event(Opcode.BINARY, b"abc")]


def test_fragments_become_one_message() -> None:
    data = frame_bytes(Opcode.BINARY, b"one ", fin=False)
    data += frame_bytes(Opcode.CONTINUATION, b"", fin=False)
    data += frame_bytes(Opcode.PING, b"between")
    data += frame_bytes(Opcode.CONTINUATION, b"two")
    data += frame_bytes(Opcode.TEXT, b"next")
    assert _events(data) == [
        Event(Opcode.PING, b"between"),
        Event(Opcode.BINARY, b"one two"),
        Event(Opcode.TEXT, b"next"),
    ]


def test_utf_8_is_judged_when_the_message_is_whole() -> None:
    text = "naïve 😀".encode()
    data = frame_bytes(Opcode.TEXT, text[:3], fin=False)
    data += frame_bytes(Opcode.CONTINUATION, text[3:])
    assert _events(data) == [Event(Opcode.TEXT, text)]


@pytest.mark.parametrize("text", [b"\xff", b"a\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80"])
def test_text_that_is_not_utf_8_is_refused(text: bytes) -> None:
    refused = (1007, "text message is not UTF-8")
    assert _refusal(frame_bytes(Opcode.TEXT, text)) == refused
    assert (
        _refusal(frame_bytes(Opcode.TEXT, text, fin=False), frame_bytes(Opcode.CONTINUATION, b""))
        == refused
    )
    assert _events(frame_bytes(Opcode.BINARY, text)) == [Event(Opcode.BINARY, text)]


@pytest.mark.parametrize("rsv", [1, 2, 4, 7])
def test_reserved_bits_are_refused(rsv: int) -> None:
    assert _refusal(frame_bytes(Opcode.TEXT, b"x", rsv=rsv)) == (1002, "reserved bits are set")


@pytest.mark.parametrize("opcode", [3, 4, 5, 6, 7, 11, 12, 13, 14, 15])
def test_unknown_opcodes_are_refused(opcode: int) -> None:
    assert _refusal(frame_bytes(opcode, b"x")) == (1002, "unknown opcode")


def test_unmasked_frames_are_refused() -> None:
    expected = (1002, "frames of a client must be masked")
    assert _refusal(frame_bytes(Opcode.TEXT, b"x", mask=False)) == expected
    assert _refusal(frame_bytes(Opcode.PING, b"", mask=False)) == expected


@pytest.mark.parametrize("opcode", [Opcode.CLOSE, Opcode.PING, Opcode.PONG])
def test_control_frames_are_short_and_whole(opcode: Opcode) -> None:
    assert _events(frame_bytes(opcode, b"p" * 125)) == [Event(opcode, b"p" * 125)]
    expected = (1002, "control frame too long or fragmented")
    assert _refusal(frame_bytes(opcode, b"p" * 126)) == expected
    assert _refusal(frame_bytes(opcode, b"p", fin=False)) == expected


def test_fragments_out_of_order_are_refused() -> None:
    expected = (1002, "fragments out of order")
    assert _refusal(frame_bytes(Opcode.CONTINUATION, b"x")) == expected
    first = frame_bytes(Opcode.TEXT, b"x", fin=False)
    assert _refusal(first, frame_bytes(Opcode.TEXT, b"y")) == expected
    assert _refusal(first, frame_bytes(Opcode.BINARY, b"y", fin=False)) == expected
    whole = first + frame_bytes(Opcode.CONTINUATION, b"y")
    assert _refusal(whole, frame_bytes(Opcode.CONTINUATION, b"z")) == expected


def test_size_is_judged_by_the_head_alone() -> None:
    too_big = (1009, "message exceeds 67108864 bytes")
    assert _refusal(_head(0x81, MESSAGE_BYTES + 1)) == too_big
    assert _refusal(_head(0x82, 2**63)) == too_big
    first = frame_bytes(Opcode.BINARY, b"12", fin=False)
    assert _refusal(first, _head(0x80, MESSAGE_BYTES - 1)) == too_big
    assert _events(_head(0x81, MESSAGE_BYTES)) == []
    assert _events(first + _head(0x80, MESSAGE_BYTES - 2)) == []


def test_size_limit_is_of_the_message_not_of_the_stream() -> None:
    parts = frame_bytes(Opcode.BINARY, b"12345", fin=False)
    parts += frame_bytes(Opcode.CONTINUATION, b"67890")
    reader = FrameReader(message_bytes=10)
    reader.feed(parts * 3)
    assert _drain(reader) == [Event(Opcode.BINARY, b"1234567890")] * 3
    reader.feed(frame_bytes(Opcode.BINARY, b"x" * 11))
    with pytest.raises(ProtocolError, match="message exceeds 10 bytes"):
        reader.next_event()


def test_announced_is_what_the_message_will_take() -> None:
    reader = FrameReader()
    assert reader.announced() == 2
    reader.feed(_head(0x81, 5_000_000))
    assert reader.next_event() is None
    assert reader.announced() == 5_000_014
    reader = FrameReader()
    reader.feed(frame_bytes(Opcode.BINARY, b"x" * 1000, fin=False))
    assert reader.next_event() is None
    assert reader.announced() == 0
    reader.feed(frame_bytes(Opcode.CONTINUATION, b"x" * 65_000, fin=False))
    assert reader.next_event() is None
    assert reader.announced() == MESSAGE_BYTES


def test_first_fragment_announces_the_largest_message() -> None:
    reader = FrameReader()
    reader.feed(_head(0x01, 1_000_000))
    assert reader.next_event() is None
    assert reader.announced() == MESSAGE_BYTES


def test_a_cleared_reader_holds_no_bytes_and_still_has_a_tail() -> None:
    reader = FrameReader()
    reader.feed(frame_bytes(Opcode.TEXT, b"a" * 1000, fin=False))
    assert reader.next_event() is None
    reader.feed(frame_bytes(Opcode.CONTINUATION, b"a" * 100_000)[:50_000])
    assert reader.next_event() is None
    assert len(reader.writable_tail()) > 50_000
    reader.clear()
    assert len(reader._buffer) + len(reader._message) == 0
    for _ in range(2):
        assert len(reader.writable_tail()) == DIRECT_RECEIVE_LEAST_BYTES


def test_the_caller_gets_a_turn_between_many_fragments() -> None:
    reader = FrameReader()
    reader.feed(frame_bytes(Opcode.TEXT, b"a", fin=False))
    reader.feed(frame_bytes(Opcode.CONTINUATION, b"", fin=False) * (2 * FRAGMENTS_IN_A_ROW - 2))
    reader.feed(frame_bytes(Opcode.PING, b"p") + frame_bytes(Opcode.CONTINUATION, b"b"))
    assert reader.next_event() is UNFINISHED
    assert reader.next_event() == Event(Opcode.PING, b"p")
    assert reader.next_event() == Event(Opcode.TEXT, b"ab")
    assert reader.next_event() is None


def test_many_tiny_fragments_cost_no_more_than_their_bytes() -> None:
    import tracemalloc

    piece = frame_bytes(Opcode.CONTINUATION, b"ab", fin=False) * 1000
    reader = FrameReader()
    reader.feed(frame_bytes(Opcode.BINARY, b"", fin=False))
    assert reader.next_event() is None
    tracemalloc.start()
    try:
        for _ in range(50):
            reader.feed(piece)
            while (event := reader.next_event()) is not None:
                assert event is UNFINISHED
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 2 * 100_000 + 20_000
    reader.feed(frame_bytes(Opcode.CONTINUATION, b""))
    assert reader.next_event() == Event(Opcode.BINARY, b"ab" * 50_000)


@pytest.mark.parametrize(
    ("size", "head"),
    [
        (0, "81 00"),
        (125, "81 7d"),
        (126, "81 7e 00 7e"),
        (65_535, "81 7e ff ff"),
        (65_536, "81 7f 00 00 00 00 00 01 00 00"),
    ],
)
def test_heads_of_sent_frames(size: int, head: str) -> None:
    assert frame_header(Opcode.TEXT, size) == text_header(size) == bytes.fromhex(head)


def test_head_of_a_sent_fragment() -> None:
    assert frame_header(Opcode.TEXT, 5, final=False) == b"\x01\x05"
    assert frame_header(Opcode.CONTINUATION, 5) == b"\x80\x05"


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65_535, 65_536, 70_001])
@pytest.mark.parametrize("opcode", [Opcode.TEXT, Opcode.BINARY])
def test_frames_of_a_client_come_back(opcode: Opcode, size: int) -> None:
    payload = b"x" * size
    frame = masked_frame(opcode, payload, b"\x01\x02\x03\x04")
    assert b"x" * 4 not in frame
    assert _events(frame) == [Event(opcode, payload)]


def test_fragment_of_a_client() -> None:
    assert masked_frame(Opcode.TEXT, b"ab", bytes(4), final=False) == b"\x01\x82\0\0\0\0ab"
    assert masked_frame(Opcode.CONTINUATION, b"", b"mask") == b"\x80\x80mask"


# ---- what a server sends --------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 65_535, 65_536, 200_000])
@pytest.mark.parametrize("opcode", [Opcode.TEXT, Opcode.BINARY])
def test_message_of_a_server(opcode: Opcode, size: int) -> None:
    payload = bytes(index % 127 for index in range(size))
    data = frame_bytes(opcode, payload, mask=False)
    reader = FrameReader(from_client=False)
    reader.feed(data)
    assert _drain(reader) == [Event(opcode, payload)]
    assert reader.whole_event(data) == (Event(opcode, payload) if size < 65_536 else None)
    assert reader.next_event() is None


def test_whole_event_leaves_everything_else_to_the_long_way() -> None:
    whole = frame_bytes(Opcode.BINARY, b"payload", mask=False)
    others = [
        b"",
        whole[:1],
        whole[:-1],
        whole + b"\x82",
        whole + whole,
        frame_bytes(Opcode.BINARY, b"x" * 200, mask=False)[:-1],
        frame_bytes(Opcode.BINARY, b"x" * 200, mask=False) + b"y",
        frame_bytes(Opcode.BINARY, b"x" * 1_001, mask=False),
        frame_bytes(Opcode.PING, b"payload", mask=False),
        frame_bytes(Opcode.CONTINUATION, b"payload", mask=False),
        frame_bytes(Opcode.BINARY, b"payload", mask=False, fin=False),
        frame_bytes(Opcode.BINARY, b"payload", mask=False, rsv=4),
        frame_bytes(Opcode.BINARY, b"payload"),
        frame_bytes(Opcode.TEXT, "naïve".encode(), mask=False),
        b"\x82\x7e\0\x03abc",
    ]
    for data in others:
        assert FrameReader(from_client=False, message_bytes=1_000).whole_event(data) is None


def test_whole_event_does_not_overtake_what_came_before() -> None:
    whole = frame_bytes(Opcode.TEXT, b"late", mask=False)
    reader = FrameReader(from_client=False)
    reader.feed(frame_bytes(Opcode.TEXT, b"first", fin=False, mask=False))
    assert reader.next_event() is None
    assert reader.whole_event(whole) is None
    reader = FrameReader(from_client=False)
    reader.feed(whole[:1])
    assert reader.next_event() is None
    assert reader.whole_event(whole) is None


def test_masked_frames_of_a_server_are_refused() -> None:
    reader = FrameReader(from_client=False)
    reader.feed(frame_bytes(Opcode.TEXT, b"x"))
    with pytest.raises(ProtocolError, match=r"^frames of a server must not be masked$") as refused:
        reader.next_event()
    assert refused.value.close_code == 1002


@pytest.mark.parametrize("from_client", [True, False])
def test_frames_that_come_in_pieces_are_joined(from_client: bool) -> None:
    """Large frames cut anywhere, more of them with each piece, and fed faster than taken."""
    payloads = [bytes([number]) * 60_000 for number in range(12)]
    data = b"".join(frame_bytes(Opcode.BINARY, each, mask=from_client) for each in payloads)
    for step in (5_003, 59_999, 60_008, 100_000, 262_144):
        for taken_every in (1, 3):
            reader = FrameReader(from_client=from_client)
            found: list[Event] = []
            for count, start in enumerate(range(0, len(data), step)):
                reader.feed(data[start : start + step])
                if count % taken_every == 0:
                    found += _drain(reader)
            found += _drain(reader)
            assert found == [Event(Opcode.BINARY, each) for each in payloads]


# ---- long frames, received where they belong ------------------------------------------


def _land(reader: FrameReader, data: bytes, most: int) -> bool:
    """Receive as a socket does, at most so much at a time; whether the frame is whole."""
    is_whole = False
    while data:
        assert not is_whole
        place = reader.writable_tail()
        count = min(len(place), len(data), most)
        place[:count] = data[:count]
        is_whole = reader.bytes_written(count)
        data = data[count:]
    return is_whole


@pytest.mark.parametrize("from_client", [True, False])
@pytest.mark.parametrize("most", [1_000, 100_000, 10_000_000])
def test_rest_of_a_long_frame_is_received_in_its_place(from_client: bool, most: int) -> None:
    payload = bytes(range(256)) * 8192
    data = frame_bytes(Opcode.BINARY, payload, mask=from_client)
    reader = FrameReader(from_client=from_client)
    reader.feed(data[:5_000])
    assert reader.next_event() is None
    assert reader.wants_direct_receive
    assert not _land(reader, data[5_000:-1], most)
    assert reader.next_event() is None
    assert _land(reader, data[-1:], most)
    assert not reader.wants_direct_receive
    reader.feed(frame_bytes(Opcode.TEXT, b"next", mask=from_client))
    assert _drain(reader) == [Event(Opcode.BINARY, payload), Event(Opcode.TEXT, b"next")]


def test_place_of_a_frame_ends_with_the_frame() -> None:
    data = frame_bytes(Opcode.BINARY, b"x" * 100_000)
    reader = FrameReader()
    reader.feed(data[:50_000])
    assert reader.next_event() is None
    assert len(reader.writable_tail()) == len(data) - 50_000


def test_only_long_frames_are_received_in_their_place() -> None:
    reader = FrameReader()
    assert not reader.wants_direct_receive
    data = frame_bytes(Opcode.BINARY, b"x" * 100_000)
    reader.feed(data[:1])
    assert reader.next_event() is None
    assert not reader.wants_direct_receive  # its size is not known yet
    reader.feed(data[1 : 1 - DIRECT_RECEIVE_BYTES])
    assert reader.next_event() is None
    assert not reader.wants_direct_receive  # copying the rest takes less than a call for it alone
    reader.feed(data[1 - DIRECT_RECEIVE_BYTES :])
    assert _drain(reader) == [Event(Opcode.BINARY, b"x" * 100_000)]


def test_announcing_much_and_sending_little_takes_little_memory() -> None:
    reader = FrameReader()
    reader.feed(_head(0x82, MESSAGE_BYTES))
    assert reader.next_event() is None
    room = len(reader.writable_tail())
    assert room < DIRECT_RECEIVE_LEAST_BYTES
    assert not reader.bytes_written(room)
    assert len(reader.writable_tail()) < DIRECT_RECEIVE_GROWTH * DIRECT_RECEIVE_LEAST_BYTES


# ---- closing --------------------------------------------------------------------------


def test_close_payload_fits_a_control_frame() -> None:
    assert close_payload(1001, "bye") == b"\x03\xe9bye"
    assert close_payload(1008, "x" * 200) == b"\x03\xf0" + b"x" * 123


@pytest.mark.parametrize(
    ("payload", "answer"),
    [
        (b"", b""),
        (struct.pack(">H", 1000), struct.pack(">H", 1000)),
        (struct.pack(">H", 1000) + b"done", struct.pack(">H", 1000)),
        (struct.pack(">H", 4999), struct.pack(">H", 4999)),
        (struct.pack(">H", 1011), struct.pack(">H", 1011)),
        (b"\x03", struct.pack(">H", 1002)),
        (struct.pack(">H", 999), struct.pack(">H", 1002)),
        (struct.pack(">H", 1005), struct.pack(">H", 1002)),
        (struct.pack(">H", 1006), struct.pack(">H", 1002)),
        (struct.pack(">H", 2999), struct.pack(">H", 1002)),
        (struct.pack(">H", 5000), struct.pack(">H", 1002)),
        (struct.pack(">H", 1000) + b"\xff", struct.pack(">H", 1007)),
    ],
)
def test_answer_to_a_close_frame(payload: bytes, answer: bytes) -> None:
    assert close_answer(payload) == answer


def test_an_incomplete_frame_can_be_taken_over() -> None:
    reader = FrameReader()
    frame = masked_frame(Opcode.BINARY, b"payload", b"mask")
    reader.feed(masked_frame(Opcode.PING, b"", b"mask") + frame[:5])
    assert reader.next_event() == (Opcode.PING, b"")
    assert reader.next_event() is None
    assert reader.take_incomplete() == frame[:5]
    assert reader.take_incomplete() == b""
    reader.feed(frame)  # it reads on from the start of a frame
    assert reader.next_event() == (Opcode.BINARY, b"payload")
    part = masked_frame(Opcode.BINARY, b"part", b"mask", final=False)
    reader.feed(part[:4])
    assert reader.next_event() is None
    assert reader.take_incomplete() is None
    reader.feed(part[4:])
    assert reader.next_event() is None
    assert reader.take_incomplete() is None


def test_only_empty_fragments_are_counted_as_such() -> None:
    """A large message in small fragments may be slow, and is no flood."""
    reader = FrameReader()
    for payload in (b"", b"a", b"", b"b"):
        opcode = Opcode.TEXT if not payload and not reader.empty_fragments else Opcode.CONTINUATION
        reader.feed(masked_frame(opcode, payload, b"mask", final=False))
        assert reader.next_event() is None
    assert reader.empty_fragments == 2
    reader.feed(masked_frame(Opcode.CONTINUATION, b"", b"mask"))
    assert reader.next_event() == (Opcode.TEXT, b"ab")
    assert reader.empty_fragments == 2
