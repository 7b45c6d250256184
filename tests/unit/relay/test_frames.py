"""The frame codec: recorded frames both ways, what is skipped, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.examples import examples

from exec_server.errors import RelayError
from exec_server.relay import frames
from exec_server.relay.frames import MAX_DEPTH, Frame, Kind, data_frame, decode, encode

_FILE = json.loads((Path(__file__).parents[2] / "vectors" / "relay_frames.json").read_text())
_KINDS = {
    "data": Kind.DATA,
    "ack_frame": Kind.ACK,
    "resume": Kind.RESUME,
    "reset": Kind.RESET,
    "heartbeat": Kind.HEARTBEAT,
    "handshake": Kind.HANDSHAKE,
}
_ID = frames.stream_prefix("stream")
_HEARTBEAT = b"\x4a\x00"
_DATA = b"\x2a\x08\x08\x07\x18\x01\x22\x02hi"
_DATA_FRAME = Frame("stream", Kind.DATA, b"hi", seq=7)
_UINT32 = st.integers(0, 2**32 - 1)


def _frame(values: dict[str, Any]) -> Frame:
    """The frame that a vector describes."""
    (name,) = values.keys() & _KINDS
    members = {key: values[key] for key in values.keys() - {name, "version"}} | values[name]
    if "payload" in members:
        members["payload"] = bytes.fromhex(members["payload"])
    return Frame(kind=_KINDS[name], **members)


def _refusal(data: bytes) -> str:
    assert frames._decode_usual(data) is None
    with pytest.raises(RelayError) as refused:
        decode(data)
    return str(refused.value)


def _field(number: int, wire: int, value: bytes = b"") -> bytes:
    return frames._varint(number << 3 | wire) + value


# ---- recorded frames ------------------------------------------------------------------


@pytest.mark.parametrize("case", _FILE["valid"], ids=lambda case: case["name"])
def test_recorded_frames_both_ways(case: dict[str, Any]) -> None:
    frame, data = _frame(case["frame"]), bytes.fromhex(case["encoded"])
    assert frame.kind is _KINDS[case["kind"]]
    assert encode(frame) == data
    assert decode(data) == frame
    assert frames._decode_any(data) == frame


@pytest.mark.parametrize(
    "case", _FILE["from_reference_binary_0_166_0"], ids=lambda case: case["name"]
)
def test_frames_of_the_reference_both_ways(case: dict[str, Any]) -> None:
    frame, data = _frame(case["frame"]), bytes.fromhex(case["encoded"])
    assert decode(data) == frame
    assert encode(frame) == data


@pytest.mark.parametrize("case", _FILE["invalid"], ids=lambda case: case["name"])
def test_recorded_frames_that_are_dropped(case: dict[str, Any]) -> None:
    """Segments are frames, and whoever has no use for them drops them; so are stray data."""
    data = bytes.fromhex(case["encoded"])
    if case["executor_verdict"] != "dropped":
        frame = decode(data)
        assert (frame.kind, frame.is_segment) == (Kind.DATA, False)
    elif "segment" in case["name"]:
        assert decode(data) == _frame(case["frame"])
        assert decode(data).is_segment
    else:
        assert _refusal(data)


def test_schema_has_no_field_that_we_do_not_know() -> None:
    schema = _FILE["schema"]["RelayMessageFrame"]
    known = {"version": 1, "stream_id": 2} | {name: int(kind) for name, kind in _KINDS.items()}
    known |= {name: number for number, (name, _) in frames._ENVELOPE.items()}
    assert known.pop("token_id") == 1000  # our own, which other executors skip
    assert {name: number for name, (number, _) in schema.items()} == known


# ---- encoding -------------------------------------------------------------------------


def test_short_way_of_encoding_is_the_long_one() -> None:
    prefix = frames.stream_prefix("stream-1")
    for seq in (0, 1, 127, 128, 16_383, 16_384, 2**32 - 1):
        for size in (1, 100, 127, 128, 16_384, 61_456):
            payload = bytes(size)
            expected = encode(Frame("stream-1", Kind.DATA, payload, seq=seq))
            assert data_frame(prefix, seq, payload) == expected


def test_empty_trace_is_present() -> None:
    frame = Frame("s", Kind.HEARTBEAT, traceparent="", tracestate="")
    assert encode(frame).endswith(b"\x5a\x00\x62\x00")
    assert decode(encode(frame)) == frame


_BODIES: dict[Kind, dict[str, st.SearchStrategy[Any]]] = {
    Kind.DATA: {
        "payload": st.binary(min_size=1, max_size=300),
        "seq": _UINT32,
        "segment_index": _UINT32,
        "segment_count": _UINT32,
    },
    Kind.ACK: {},
    Kind.RESUME: {"next_seq": _UINT32},
    Kind.RESET: {"reason": st.text(min_size=1, max_size=20)},
    Kind.HEARTBEAT: {},
    Kind.HANDSHAKE: {"payload": st.binary(min_size=1, max_size=300)},
}


@st.composite
def _any_frame(draw: st.DrawFn) -> Frame:
    kind = draw(st.sampled_from(Kind))
    return Frame(
        draw(st.text(min_size=1, max_size=20).filter(str.strip)),
        kind,
        ack=draw(_UINT32),
        ack_bits=draw(_UINT32),
        traceparent=draw(st.none() | st.text(max_size=20)),
        tracestate=draw(st.none() | st.text(max_size=20)),
        **{name: draw(values) for name, values in _BODIES[kind].items()},
    )


@given(_any_frame())
def test_frames_survive_the_round_trip(frame: Frame) -> None:
    assert decode(encode(frame)) == frame


def test_segments_are_all_but_whole_messages() -> None:
    assert not _DATA_FRAME.is_segment
    assert _DATA_FRAME._replace(segment_count=0).is_segment
    assert _DATA_FRAME._replace(segment_count=2).is_segment
    assert _DATA_FRAME._replace(segment_index=1).is_segment


# ---- the quick way --------------------------------------------------------------------


@st.composite
def _nearly_usual(draw: st.DrawFn) -> bytes:
    """A data frame as senders spell it, with one thing changed or nothing."""
    prefix = frames.stream_prefix(draw(st.text(max_size=70)))
    data = bytearray(data_frame(prefix, draw(_UINT32), draw(st.binary(max_size=300))))
    place = draw(st.integers(0, 1000)) % len(data)
    change = draw(st.sampled_from(["none", "byte", "head", "cut", "insert", "append"]))
    if change == "byte":
        data[place] = draw(st.integers(0, 255))
    elif change == "head":
        data[place % 16] = draw(st.integers(0, 255))
    elif change == "cut":
        del data[place:]
    elif change == "insert":
        data[place:place] = draw(st.binary(max_size=4))
    elif change == "append":
        data += draw(st.binary(max_size=4))
    return bytes(data)


@settings(max_examples=examples(500))
@given(_nearly_usual())
@example(_ID + _DATA)
@example(frames.stream_prefix("i" * 127) + _DATA)
@example(frames.stream_prefix("i" * 128) + _DATA)
def test_quick_way_agrees_with_the_long_one(data: bytes) -> None:
    frame = frames._decode_usual(data)
    if frame is not None:
        assert frames._decode_any(data) == frame


def test_quick_way_takes_what_senders_send() -> None:
    for seq in (0, 1, 127, 128, 2**32 - 1):
        for size in (1, 127, 128, 61_456):
            expected = Frame("stream", Kind.DATA, bytes(size), seq=seq)
            assert frames._decode_usual(data_frame(_ID, seq, bytes(size))) == expected
    longest = frames.stream_prefix("i" * 127)
    assert frames._decode_usual(data_frame(longest, 0, b"x")) is not None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        _ID,
        _ID[:-1],
        _ID + _HEARTBEAT,
        _ID + b"\x18\x01" + _DATA,  # with an ack
        _ID + _DATA + b"\x5a\x00",  # with a trace
        _ID + _DATA + _DATA,
        frames.stream_prefix("i" * 128) + _DATA,
        b"\x08\x01\x12\x01\xff" + _DATA,
        b"\x08\x01\x12\x00" + _DATA,
        frames.stream_prefix(" \t") + _DATA,
        _ID + b"\x2a\x05\x22\x01x\x18\x01",  # another order
        _ID + b"\x2a\x07\x10\x00\x18\x01\x22\x01x",  # a default spelled out
        _ID + b"\x2a\x05\x18\x02\x22\x01x",  # a segment
        _ID + b"\x2a\x04\x18\x01\x22\x00",
        _ID + b"\x2a\x05\x18\x01\x22\x02x",
        _ID + b"\x2a\x06\x18\x01\x22\x01xy",
        _ID + b"\x2a\x0b\x08\x80\x80\x80\x80\x10\x18\x01\x22\x01x",  # a number of 33 bits
        _ID + b"\x2a" + b"\xff" * 10,
    ],
)
def test_quick_way_leaves_everything_else(data: bytes) -> None:
    assert frames._decode_usual(data) is None


# ---- what is skipped ------------------------------------------------------------------

_UNKNOWN = {
    "varint": _field(13, 0, b"\xac\x02"),
    "longest varint": _field(13, 0, b"\xff" * 9 + b"\x01"),
    "fixed64": _field(14, 1, bytes(8)),
    "bytes": _field(15, 2, b"\x03abc"),
    "no bytes": _field(16, 2, b"\x00"),
    "fixed32": _field(2047, 5, bytes(4)),
    "last number": _field(2**29 - 1, 0, b"\x00"),
    "empty group": _field(13, 3) + _field(13, 4),
    "group": _field(13, 3)
    + _field(1, 0, b"\x05")
    + _field(2, 3)
    + _field(3, 2, b"\x01x")
    + _field(2, 4)
    + _field(9, 5, bytes(4))
    + _field(13, 4),
    "deepest group": _field(13, 3) * MAX_DEPTH + _field(13, 4) * MAX_DEPTH,
}


@pytest.mark.parametrize("unknown", _UNKNOWN.values(), ids=_UNKNOWN.keys())
def test_unknown_fields_are_skipped_everywhere(unknown: bytes) -> None:
    body = unknown + b"\x08\x07" + unknown + b"\x18\x01\x22\x02hi" + unknown
    data = unknown + _ID + unknown + b"\x2a" + frames._varint(len(body)) + body + unknown
    assert decode(data) == _DATA_FRAME
    empty = b"\x4a" + frames._varint(len(unknown)) + unknown
    assert decode(_ID + empty) == Frame("stream", Kind.HEARTBEAT)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("varint", "invalid number"),
        ("longest varint", "invalid number"),
        ("fixed64", "field is cut off"),
        ("bytes", "field is cut off"),
        ("fixed32", "field is cut off"),
        ("empty group", "invalid number"),
        ("deepest group", "invalid number"),
    ],
)
def test_unknown_fields_must_be_whole(name: str, error: str) -> None:
    unknown = _UNKNOWN[name]
    assert _refusal(_ID + _HEARTBEAT + unknown[:-1]) == error
    # Within a body they end where it does, even when the rest of them follows.
    data = _ID + b"\x4a" + frames._varint(len(unknown) - 1) + unknown
    assert _refusal(data) == "field outside of its message"


def test_unknown_fields_that_nobody_can_skip() -> None:
    good = _ID + _HEARTBEAT
    too_deep = MAX_DEPTH + 1
    assert _refusal(good + _field(13, 3) * too_deep + _field(13, 4) * too_deep) == (
        "unknown wire type"
    )
    assert _refusal(good + _field(13, 4)) == "unknown wire type"
    assert _refusal(good + _field(13, 6)) == "unknown wire type"
    assert _refusal(good + _field(13, 7)) == "unknown wire type"
    assert _refusal(good + _field(13, 3) + _field(14, 4)) == "group end does not match"
    assert _refusal(good + _field(13, 3) + _field(14, 6)) == "unknown wire type"
    assert _refusal(good + _field(0, 0, b"\x00")) == "invalid field number"
    assert _refusal(good + _field(2**29, 0, b"\x00")) == "invalid field number"
    assert _refusal(good + _field(13, 3) + _field(0, 0)) == "invalid field number"


# ---- numbers --------------------------------------------------------------------------


def test_numbers_may_be_longer_than_they_must() -> None:
    version = b"\x08\x81" + b"\x80" * 8 + b"\x00"
    assert decode(version + _ID[2:] + _DATA) == _DATA_FRAME
    padded = b"\x2a\x12\x08\x87" + b"\x80" * 8 + b"\x00\x18\x81\x00\x22\x02hi"
    padded = padded.replace(b"\x12", bytes((len(padded) - 2,)), 1)
    assert decode(_ID + padded) == _DATA_FRAME


def test_numbers_lose_what_32_bits_cannot_hold() -> None:
    large = frames._varint(2**32 + 1)
    data = b"\x08" + large + _ID[2:] + b"\x18" + large + b"\x20" + large
    body = b"\x08" + large + b"\x10" + large + b"\x18" + large + b"\x22\x01x"
    data += b"\x2a" + frames._varint(len(body)) + body
    assert decode(data) == Frame("stream", Kind.DATA, b"x", 1, 1, 1, ack=1, ack_bits=1)
    largest = b"\xff" * 9 + b"\x01"
    assert decode(_ID + b"\x18" + largest + _HEARTBEAT).ack == 2**32 - 1


def test_numbers_of_more_than_64_bits_are_refused() -> None:
    assert _refusal(b"\x08\x81" + b"\x80" * 8 + b"\x02" + _ID[2:] + _DATA) == "invalid number"
    assert _refusal(b"\x08\x81" + b"\x80" * 9 + b"\x00" + _ID[2:] + _DATA) == "invalid number"
    assert _refusal(_ID + _HEARTBEAT + b"\xff" * 9 + b"\x7f") == "invalid number"
    assert _refusal(_ID + _HEARTBEAT + _field(13, 0, b"\xff" * 11)) == "invalid number"
    assert _refusal(_ID + b"\x2a" + b"\xff" * 9 + b"\x7f") == "invalid number"


# ---- the body -------------------------------------------------------------------------


def test_last_body_wins() -> None:
    handshake, reset = b"\x52\x03\x0a\x01h", b"\x42\x03\x0a\x01r"
    assert decode(_ID + _DATA + _HEARTBEAT) == Frame("stream", Kind.HEARTBEAT)
    assert decode(_ID + _HEARTBEAT + _DATA) == _DATA_FRAME
    assert decode(_ID + _DATA + handshake) == Frame("stream", Kind.HANDSHAKE, b"h")
    assert decode(_ID + handshake + reset) == Frame("stream", Kind.RESET, reason="r")
    # Nothing of a body comes back after another one.
    assert _refusal(_ID + _DATA + _HEARTBEAT + b"\x2a\x00") == "frame without a payload"
    assert _refusal(_ID + handshake + b"\x2a\x02\x18\x01") == "frame without a payload"
    # What is outside of the body stays.
    ahead = b"\x18\x09\x20\x05\x5a\x01p\x62\x01s"
    trace: dict[str, Any] = {"ack": 9, "ack_bits": 5, "traceparent": "p", "tracestate": "s"}
    assert decode(_ID + ahead + handshake + _DATA) == _DATA_FRAME._replace(**trace)


def test_repeated_body_is_merged() -> None:
    parts = b"\x2a\x02\x18\x01" + b"\x2a\x04\x22\x02hi" + b"\x2a\x02\x08\x07"
    assert decode(_ID + parts) == _DATA_FRAME
    assert decode(_ID + _DATA + b"\x2a\x03\x22\x01x") == _DATA_FRAME._replace(payload=b"x")


def test_repeated_fields_outside_of_the_body_are_replaced() -> None:
    assert decode(b"\x08\x02" + _ID + b"\x12\x03two" + _DATA).stream_id == "two"
    assert _refusal(_ID + _DATA + b"\x08\x02") == "unknown version of relay frames"
    assert decode(_ID + b"\x18\x01\x18\x02" + _DATA).ack == 2


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", "unknown version of relay frames"),
        (_ID, "frame without a stream or a body"),
        (b"\x08\x01" + _HEARTBEAT, "frame without a stream or a body"),
        (frames.stream_prefix(" \n\xa0") + _DATA, "frame without a stream or a body"),
        (b"\x08\x01\x12\x01\xff" + _HEARTBEAT, "text is not UTF-8"),
        (_ID + b"\x42\x03\x0a\x01\xff", "text is not UTF-8"),
        (_ID + _HEARTBEAT + b"\x5a\x01\xff", "text is not UTF-8"),
        (_ID + _HEARTBEAT + b"\x62\x01\xff", "text is not UTF-8"),
        (_ID + b"\x2a\x02\x18\x01", "frame without a payload"),
        (_ID + b"\x52\x00", "frame without a payload"),
        (_ID + b"\x42\x02\x0a\x00", "reset without a reason"),
        (_ID + b"\x4a\x01", "field is cut off"),
        (_ID + b"\x2a\x03\x22\x02x", "field is cut off"),
        (_ID + b"\x2a\x02\x22\x02hi", "field outside of its message"),
        (_ID + b"\x2a\x01\x08\x01", "field outside of its message"),
        (_ID + b"\x42\x02\x0a\x02hi", "field outside of its message"),
        (_ID + b"\x12\x09stream", "field is cut off"),
    ],
)
def test_broken_frames_are_refused(data: bytes, error: str) -> None:
    assert _refusal(data) == error


@pytest.mark.parametrize("number", [*range(1, 13)])
def test_known_fields_must_have_their_type(number: int) -> None:
    right = 0 if number in (1, 3, 4) else 2
    for wire, value in (
        (0, b"\x01"),
        (1, bytes(8)),
        (2, b"\x00"),
        (5, bytes(4)),
        (3, b""),
        (4, b""),
    ):
        if wire != right:
            data = _ID + _HEARTBEAT + _field(number, wire, value)
            assert _refusal(data) == "field of a wrong type"


@pytest.mark.parametrize(
    ("body", "number", "right"),
    [(5, 1, 0), (5, 2, 0), (5, 3, 0), (5, 4, 2), (7, 1, 0), (8, 1, 2), (10, 1, 2)],
)
def test_known_fields_of_bodies_must_have_their_type(body: int, number: int, right: int) -> None:
    for wire, value in ((0, b"\x01"), (1, bytes(8)), (2, b"\x00"), (5, bytes(4)), (3, b"")):
        if wire != right:
            content = _field(number, wire, value)
            data = _ID + _field(body, 2, bytes((len(content),)) + content)
            assert _refusal(data) == "field of a wrong type"


@pytest.mark.parametrize("inside", [b"", b"\x6b"], ids=["one after the other", "in a group"])
def test_a_frame_of_very_many_fields_is_refused(inside: bytes) -> None:
    start, end = b"\x08\x01\x12\x01s\x4a\x00" + inside, inside and b"\x6c"
    unknown = b"\x68\x00"
    spare = frames.MAX_FIELDS - 3 - 2 * len(inside)
    assert frames.decode(start + unknown * spare + end).kind is Kind.HEARTBEAT
    with pytest.raises(RelayError, match="too many fields"):
        frames.decode(start + unknown * (spare + 1) + end)


def test_last_token_id_is_the_valid_one() -> None:
    handshake = encode(Frame("s", Kind.HANDSHAKE, b"h"))
    assert decode(handshake).token_id == ""
    claimed = handshake + frames.token_field("claimed")
    assert decode(claimed).token_id == "claimed"
    assert decode(claimed + frames.token_field("true")).token_id == "true"
    assert decode(claimed + frames.token_field("")).token_id == ""
    # It outlives a second body, of which only the last is valid.
    assert decode(claimed + b"\x3a\x00") == Frame("s", Kind.RESUME, token_id="claimed")
