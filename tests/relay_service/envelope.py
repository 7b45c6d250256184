"""As much of a relay frame as a relay needs: stream id, kind of body, and where things lie.

Written apart from the product's own codec on purpose: two readings of one format find each
other's mistakes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

Buffer = bytes | memoryview

_VERSION, _STREAM_ID = 1, 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# A protobuf varint is never longer; more is an attempt to keep the reader busy.
_VARINT_BYTES = 10


class Kind(StrEnum):
    """The kinds of frames."""

    DATA = "data"
    ACK = "ack_frame"
    RESUME = "resume"
    RESET = "reset"
    HEARTBEAT = "heartbeat"
    HANDSHAKE = "handshake"


_NUMBERS = {
    Kind.DATA: 5,
    Kind.ACK: 6,
    Kind.RESUME: 7,
    Kind.RESET: 8,
    Kind.HEARTBEAT: 9,
    Kind.HANDSHAKE: 10,
}
_KINDS = {number: kind for kind, number in _NUMBERS.items()}
_KINDS_BY_TAG = {number << 3 | _BYTES: kind for number, kind in _KINDS.items()}
# The field that holds the payload inside a body that has one.
_PAYLOADS = {Kind.DATA: 4, Kind.HANDSHAKE: 1}


class Envelope(NamedTuple):
    """A frame from outside; `start` and `end` enclose its body."""

    stream_id: bytes
    kind: Kind
    start: int
    end: int


def read(frame: Buffer) -> Envelope | None:
    """Parse a frame; None if no peer could act on it."""
    try:
        return _read_usual(frame) or _read_any(frame)
    except (IndexError, ValueError):
        return None


def _read_usual(frame: Buffer) -> Envelope | None:
    # The usual frame of both ends: version 1, a short stream id, one body, nothing else.
    if frame[0] != 0x08 or frame[1] != 1 or frame[2] != 0x12 or not 0 < frame[3] < 0x80:
        return None
    end = 4 + frame[3]
    kind = _KINDS_BY_TAG.get(frame[end])
    if kind is None:
        return None
    length, start = _varint(frame, end + 1)
    stream_id = bytes(frame[4:end])
    if start + length != len(frame) or stream_id.isspace():
        return None
    return Envelope(stream_id, kind, start, len(frame))


def _read_any(frame: Buffer) -> Envelope | None:
    version, stream_id, body = 0, b"", None
    at = 0
    while at < len(frame):
        number, wire, value, start, at = _field(frame, at)
        if number == _VERSION and wire == _VARINT:
            version = value
        elif number == _STREAM_ID and wire == _BYTES:
            stream_id = bytes(frame[start:at])
        elif number in _KINDS and wire == _BYTES:
            # Of several bodies in one frame the last one counts.
            body = (_KINDS[number], start, at)
    if version != 1 or not stream_id.strip() or body is None:
        return None
    return Envelope(stream_id, *body)


def _field(frame: Buffer, at: int) -> tuple[int, int, int, int, int]:
    """One field: number, wire type, varint value, and where its content starts and ends."""
    tag, start = _varint(frame, at)
    number, wire = tag >> 3, tag & 7
    value = 0
    if wire == _VARINT:
        value, end = _varint(frame, start)
    elif wire == _BYTES:
        length, start = _varint(frame, start)
        end = start + length
    elif wire == _FIXED64:
        end = start + 8
    elif wire == _FIXED32:
        end = start + 4
    else:
        raise ValueError("unknown wire type")
    if number == 0 or end > len(frame):
        raise ValueError("field out of bounds")
    return number, wire, value, start, end


def _varint(frame: Buffer, at: int) -> tuple[int, int]:
    value = 0
    for index in range(_VARINT_BYTES):
        byte = frame[at + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    raise ValueError("endless varint")


def payload_start(frame: Buffer, envelope: Envelope) -> int:
    """Where the payload begins that the two ends exchange; the body's start if it has none."""
    wanted = _PAYLOADS.get(envelope.kind)
    at = envelope.start
    while at < envelope.end:
        number, wire, _, start, at = _field(frame, at)
        if number == wanted and wire == _BYTES:
            return start
    return envelope.start


def _sized(number: int, content: bytes) -> bytes:
    return _number(number << 3 | _BYTES) + _number(len(content)) + content


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def build(stream_id: bytes, kind: Kind, body: bytes = b"") -> bytes:
    """A frame with an encoded body."""
    return b"\x08\x01" + _sized(_STREAM_ID, stream_id) + _sized(_NUMBERS[kind], body)


def reset(stream_id: bytes, reason: str) -> bytes:
    """A frame that ends a stream."""
    return build(stream_id, Kind.RESET, _sized(1, reason.encode()))


def reset_reason(frame: Buffer) -> str | None:
    """Why a stream was reset; None for any other frame."""
    envelope = read(frame)
    if envelope is None or envelope.kind is not Kind.RESET:
        return None
    at, reason = envelope.start, b""
    while at < envelope.end:
        number, wire, _, start, at = _field(frame, at)
        if number == 1 and wire == _BYTES:
            reason = bytes(frame[start:at])
    return reason.decode(errors="replace")
