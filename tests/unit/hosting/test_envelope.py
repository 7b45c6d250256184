"""Version, stream and kind of a frame; a frame cannot mean two streams."""

from __future__ import annotations

import pytest

from exec_server.hosting import envelope
from exec_server.relay.frames import Frame, Kind, decode, encode, stream_prefix

STREAM = "2b1c3f0e-0000-4000-8000-000000000001"
PREFIX = stream_prefix(STREAM)


@pytest.mark.parametrize("size", [1, 100, 127, 128, 16_000, 16_384, 61_440, 200_000])
@pytest.mark.parametrize("seq", [0, 1, 300, 70_000])
def test_data_frames_take_the_fast_path(size: int, seq: int) -> None:
    frame = encode(Frame(STREAM, Kind.DATA, b"x" * size, seq))
    assert envelope.is_data(frame, len(PREFIX))
    assert envelope.read(frame) == (PREFIX, Kind.DATA)
    assert not envelope.is_data(frame + b"x", len(PREFIX))
    assert not envelope.is_data(frame[:-1], len(PREFIX))


@pytest.mark.parametrize(
    "frame",
    [
        Frame(STREAM, Kind.HANDSHAKE, b"x"),
        Frame(STREAM, Kind.RESUME),
        Frame(STREAM, Kind.RESET, reason="r"),
        Frame(STREAM, Kind.DATA, b"x", traceparent="00-1"),
        Frame(STREAM, Kind.DATA, b"x", ack=3),
    ],
)
def test_all_other_frames_are_decoded(frame: Frame) -> None:
    assert envelope.read(encode(frame)) == (PREFIX, frame.kind)


def test_a_frame_that_names_two_streams_belongs_to_the_last_as_for_the_executor() -> None:
    first = encode(Frame("mine", Kind.DATA, b"x"))
    frame = first + stream_prefix("another")[2:]
    found = envelope.read(frame)
    assert found is not None
    assert found.prefix == stream_prefix(decode(frame).stream_id) == stream_prefix("another")


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"x",
        b"\x08\x01\x12\x00\x2a\x01x",
        b"\x08\x02\x12\x01a\x2a\x01x",
        b"\x08\x01\x12\x05abc",
        b"\x08\x01\x12\x03abc\x2a",
        b"\x08\x01\x12\x03abc\x2a\xff\xff\xff\xff",
        encode(Frame("x" * 128, Kind.RESUME)),
        encode(Frame(" ", Kind.RESUME)),
    ],
)
def test_unreadable_frames(frame: bytes) -> None:
    assert envelope.read(frame) is None


def test_a_reset_names_the_stream() -> None:
    reset = decode(envelope.reset(PREFIX, "gone"))
    assert (reset.stream_id, reset.kind, reset.reason) == (STREAM, Kind.RESET, "gone")
    odd = b"\x08\x01\x12\x01\xff"
    assert decode(envelope.reset(odd, "gone")).kind is Kind.RESET
