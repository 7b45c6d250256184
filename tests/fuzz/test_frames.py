"""Frames: byte by byte equals at once, any bytes are judged, and frames survive the round trip."""

from __future__ import annotations

import contextlib
import itertools
import struct

from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tests.support.examples import examples
from tests.support.raw_links import frame_bytes

from exec_server.errors import ProtocolError
from exec_server.net.websocket.frames import Event, FrameReader, Opcode, frame_header, masked_frame

_DATA = st.sampled_from([Opcode.TEXT, Opcode.BINARY])
_CONTROL = st.sampled_from([Opcode.PING, Opcode.PONG, Opcode.CLOSE])


@st.composite
def _frame(draw: st.DrawFn) -> bytes:
    """A frame that may break any rule."""
    return frame_bytes(
        draw(st.integers(0, 15)),
        draw(st.binary(max_size=200)),
        fin=draw(st.booleans()),
        mask=draw(st.sampled_from([True, True, True, False])),
        rsv=draw(st.sampled_from([0, 0, 0, 0, 1, 4])),
    )


@st.composite
def _huge_head(draw: st.DrawFn) -> bytes:
    size = draw(st.integers(0, 2**64 - 1))
    return bytes((draw(st.integers(0, 255)), 0xFF)) + struct.pack(">Q", size) + b"mask"


_HOSTILE = st.lists(st.one_of(st.binary(max_size=40), _frame(), _huge_head()), max_size=8).map(
    b"".join
)


@st.composite
def _message(draw: st.DrawFn) -> tuple[bytes, list[Event]]:
    """A message in fragments with control frames in between, and the events it must give."""
    opcode = draw(_DATA)
    parts = draw(st.lists(st.binary(max_size=150), min_size=1, max_size=5))
    if opcode is Opcode.TEXT:
        parts = [part.hex().encode() for part in parts]
    data, events = b"", []
    for index, part in enumerate(parts):
        for control, payload in draw(
            st.lists(st.tuples(_CONTROL, st.binary(max_size=125)), max_size=2)
        ):
            data += frame_bytes(control, payload)
            events.append(Event(control, payload))
        final = index == len(parts) - 1
        data += frame_bytes(opcode if index == 0 else Opcode.CONTINUATION, part, fin=final)
    return data, [*events, Event(opcode, b"".join(parts))]


def _judge(pieces: list[bytes], *, from_client: bool = True) -> list[object]:
    """The events of a peer's bytes, and the refusal that ends them."""
    reader = FrameReader(from_client=from_client)
    seen: list[object] = []
    for piece in pieces:
        reader.feed(piece)
        try:
            while (event := reader.next_event()) is not None:
                seen.append(event)
        except ProtocolError as error:
            return [*seen, (error.close_code, error.reason)]
    return seen


def _cut(data: bytes, places: list[int]) -> list[bytes]:
    places = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[start:end] for start, end in itertools.pairwise(places)]


@settings(max_examples=examples(300))
@given(_HOSTILE, st.booleans())
@example(frame_bytes(Opcode.TEXT, b"x" * 126, mask=False), True)
@example(b"\x81\xff" + b"\xff" * 12, True)
@example(b"\x81\x7f" + b"\xff" * 12, False)
def test_byte_by_byte_equals_at_once(data: bytes, from_client: bool) -> None:
    pieces = [bytes([byte]) for byte in data]
    assert _judge(pieces, from_client=from_client) == _judge([data], from_client=from_client)


@settings(max_examples=examples(300))
@given(_HOSTILE, st.lists(st.integers(0, 2000), max_size=6), st.booleans())
def test_any_cut_equals_at_once(data: bytes, places: list[int], from_client: bool) -> None:
    cut = _judge(_cut(data, places), from_client=from_client)
    assert cut == _judge([data], from_client=from_client)


@settings(max_examples=examples(300))
@given(
    st.lists(st.binary(max_size=300), max_size=8),
    st.lists(st.integers(0, 2500), max_size=8),
    st.lists(st.booleans(), max_size=9),
    st.booleans(),
)
def test_frames_may_be_fed_faster_than_taken(
    payloads: list[bytes], places: list[int], taking: list[bool], from_client: bool
) -> None:
    """Events are asked for after some pieces only, as a user does who holds the link."""
    data = b"".join(frame_bytes(Opcode.BINARY, each, mask=from_client) for each in payloads)
    reader = FrameReader(from_client=from_client)
    found: list[bytes] = []
    for piece, takes in itertools.zip_longest(_cut(data, places), taking):
        reader.feed(piece or b"")
        while takes and (event := reader.next_event()) is not None:
            found.append(event.payload)
    while (event := reader.next_event()) is not None:
        found.append(event.payload)
    assert found == payloads


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.integers(0, 200_000), max_size=5),
    st.lists(st.integers(1, 300_000), min_size=1, max_size=12),
    st.booleans(),
)
@example([20_000, 200_000], [1, 17_000, 3], True)
def test_a_socket_may_receive_frames_in_their_place(
    sizes: list[int], reads: list[int], from_client: bool
) -> None:
    """As FramedSocket does it: into the place of a long frame where there is one."""
    # A megabyte in single bytes takes a minute and shows nothing that a kilobyte does not.
    assume(sum(sizes) * len(reads) <= 10_000 * sum(reads))
    payloads = [bytes([number]) * size for number, size in enumerate(sizes)]
    data = b"".join(frame_bytes(Opcode.BINARY, each, mask=from_client) for each in payloads)
    reader = FrameReader(from_client=from_client)
    found: list[bytes] = []
    lands = False
    for most in itertools.cycle(reads):
        place = reader.writable_tail() if lands else None
        piece = data[: most if place is None else min(most, len(place))]
        data = data[len(piece) :]
        if place is None:
            reader.feed(piece)
        else:
            place[: len(piece)] = piece
            lands = not reader.bytes_written(len(piece))
        while (event := reader.next_event()) is not None:
            found.append(event.payload)
        lands = lands or reader.wants_direct_receive
        if not data:
            break
    assert found == payloads


@settings(max_examples=examples(300))
@given(_HOSTILE)
def test_any_bytes_give_events_or_a_close_code(data: bytes) -> None:
    for outcome in _judge([data]):
        if isinstance(outcome, Event):
            assert outcome.opcode is not Opcode.CONTINUATION
            if outcome.opcode is Opcode.TEXT:
                outcome.payload.decode()
        else:
            assert isinstance(outcome, tuple)
            assert outcome[0] in (1002, 1007, 1009)


@settings(max_examples=examples(200))
@given(st.lists(_message(), max_size=4), st.lists(st.integers(0, 5000), max_size=8))
def test_messages_survive_any_fragmentation(
    messages: list[tuple[bytes, list[Event]]], places: list[int]
) -> None:
    data = b"".join(frames for frames, _ in messages)
    expected: list[object] = [event for _, events in messages for event in events]
    assert _judge(_cut(data, places)) == expected


@settings(max_examples=examples(300))
@given(_HOSTILE)
@example(frame_bytes(Opcode.TEXT, b"hello"))
@example(frame_bytes(Opcode.TEXT, b"h" * 126))
def test_the_short_way_agrees_with_the_long_one(data: bytes) -> None:
    message = FrameReader().whole_message(data)
    if message is not None:
        assert _judge([data]) == [Event(Opcode.TEXT, message)]


@settings(max_examples=examples(300))
@given(_HOSTILE)
@example(frame_bytes(Opcode.BINARY, b"hello", mask=False))
@example(frame_bytes(Opcode.TEXT, b"h" * 126, mask=False))
def test_the_short_way_of_clients_agrees_with_the_long_one(data: bytes) -> None:
    event = FrameReader(from_client=False).whole_event(data)
    if event is not None:
        assert _judge([data], from_client=False) == [event]


@given(_DATA, st.binary(max_size=300), st.binary(min_size=4, max_size=4))
def test_masked_frames_survive_the_round_trip(opcode: Opcode, data: bytes, mask: bytes) -> None:
    payload = data.hex().encode()
    assert _judge([masked_frame(opcode, payload, mask)]) == [Event(opcode, payload)]


@given(st.sampled_from(list(Opcode)), st.integers(0, 2**40), st.booleans())
def test_sent_heads_say_what_they_mean(opcode: Opcode, size: int, final: bool) -> None:
    head = frame_header(opcode, size, final=final)
    assert head[0] == opcode | (0x80 if final else 0)
    assert not head[1] & 0x80
    length, rest = head[1] & 0x7F, head[2:]
    with contextlib.suppress(KeyError):
        length = struct.unpack({126: ">H", 127: ">Q"}[length], rest)[0]
    assert length == size
