"""The relay frame codec: protobuf message `codex.exec_server.relay.v1.RelayMessageFrame`.

Hand-written for its limits on fields and groups, and to avoid a dependency for one message: the
protobuf package takes 0.8 times as long for a short frame and 1.4 times as long for a full record
(`python -m bench.alternatives`).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Any, NamedTuple

from exec_server.errors import RelayError

VERSION = 1
# The limit of the relay for one WebSocket message. A record with its frame is far smaller.
FRAME_BYTES = 262_144
# Nesting of unknown groups. No known sender uses groups; deeper ones are an attack.
MAX_DEPTH = 32
# Fields of a frame, unknown and nested ones included. Real frames have a dozen; the 100,000 that
# would fit take half a second to decode.
MAX_FIELDS = 512

# An extension of this project, far from the numbers that the reference may come to use.
_TOKEN_ID = 1000
_VARINT, _FIXED64, _BYTES, _GROUP, _GROUP_END, _FIXED32 = range(6)
_MAX_VARINT_BYTES = 10
_UINT32 = 0xFFFF_FFFF
_UINT64 = 0xFFFF_FFFF_FFFF_FFFF


class Kind(IntEnum):
    """The kind of a frame: the number of its field in the oneof `body`."""

    DATA = 5
    ACK = 6
    RESUME = 7
    RESET = 8
    HEARTBEAT = 9
    HANDSHAKE = 10


_KINDS = {int(kind): kind for kind in Kind}


class Frame(NamedTuple):
    """A decoded frame; fields that its kind does not have keep their defaults."""

    stream_id: str
    kind: Kind
    payload: bytes = b""  # data, handshake
    seq: int = 0  # data
    segment_index: int = 0  # data
    segment_count: int = 1  # data
    next_seq: int = 0  # resume
    reason: str = ""  # reset
    ack: int = 0
    ack_bits: int = 0
    traceparent: str | None = None
    tracestate: str | None = None
    token_id: str = ""  # of the client; added by a rendezvous of ours, see `token_field`

    @property
    def is_segment(self) -> bool:
        """Whether this is one of several parts of a message, which only the plain form sends."""
        return self.segment_index != 0 or self.segment_count != 1


# ---- encoding -------------------------------------------------------------------------


def encode(frame: Frame) -> bytes:
    """Encode a frame; fields with protobuf's default values are left out."""
    out = bytearray(stream_prefix(frame.stream_id))
    out += _uint(3, frame.ack) + _uint(4, frame.ack_bits)
    body = b""
    if frame.kind is Kind.DATA:
        body = _uint(1, frame.seq) + _uint(2, frame.segment_index)
        body += _uint(3, frame.segment_count) + _text(4, frame.payload)
    elif frame.kind is Kind.RESUME:
        body = _uint(1, frame.next_seq)
    elif frame.kind is Kind.RESET:
        body = _text(1, frame.reason.encode())
    elif frame.kind is Kind.HANDSHAKE:
        body = _text(1, frame.payload)
    out += _varint(frame.kind << 3 | _BYTES) + _varint(len(body)) + body
    for number, trace in ((11, frame.traceparent), (12, frame.tracestate)):
        if trace is not None:
            out += _varint(number << 3 | _BYTES) + _varint(len(trace.encode())) + trace.encode()
    return bytes(out)


def stream_prefix(stream_id: str) -> bytes:
    """The start of every frame of a stream: version and stream id."""
    return _uint(1, VERSION) + _text(2, stream_id.encode())


def token_field(token_id: str) -> bytes:
    """The field that names a client's token, at the end of its handshake frame.

    The last of several equal fields is valid, so a client cannot name another token.
    """
    value = token_id.encode()
    return _varint(_TOKEN_ID << 3 | _BYTES) + _varint(len(value)) + value


def data_frame(prefix: bytes, seq: int, payload: bytes) -> bytes:
    """Encode a data frame after the result of `stream_prefix`; faster than `encode`."""
    body = b"\x18\x01\x22" + _varint(len(payload))  # segment_count 1, payload
    if seq:
        body = b"\x08" + _varint(seq) + body
    return b"%b\x2a%b%b%b" % (prefix, _varint(len(body) + len(payload)), body, payload)


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _uint(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(value) if value else b""


def _text(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value if value else b""


# ---- decoding -------------------------------------------------------------------------


def decode(data: bytes) -> Frame:
    """Decode a frame; raises RelayError unless it is complete and valid."""
    return _decode_usual(data) or _decode_any(data)


def _decode_usual(data: bytes) -> Frame | None:
    """Fast path: a data frame as all known senders encode it; None for any other frame."""
    try:
        id_end = 4 + data[3]
        if not data.startswith(b"\x08\x01\x12") or id_end > 4 + 0x7F:
            return None
        stream_id = data[4:id_end].decode()
    except (IndexError, UnicodeDecodeError):
        return None
    found = usual_data(data, id_end)
    if found is None or not stream_id or stream_id.isspace():
        return None
    seq, payload = found
    return Frame(stream_id, Kind.DATA, payload, seq)


def usual_data(data: bytes, offset: int) -> tuple[int, bytes] | None:
    """Number and payload of a usual data frame, None for any other; `offset` follows the prefix."""
    try:
        if data[offset] != 0x2A:
            return None
        size, offset = _read_varint(data, offset + 1)
        if size != len(data) - offset:
            return None
        seq = 0
        if data[offset] == 0x08:
            seq, offset = _read_varint(data, offset + 1)
        if not data.startswith(b"\x18\x01\x22", offset):
            return None
        size, offset = _read_varint(data, offset + 3)
    except (IndexError, RelayError):
        return None
    if size != len(data) - offset or not size or seq > _UINT32:
        return None
    return seq, data[offset:]


def _decode_any(data: bytes) -> Frame:
    fields: dict[str, Any] = {}
    kind: Kind | None = None
    version = 0
    stream_id = ""
    offset, end = 0, len(data)
    budget = iter(range(MAX_FIELDS))
    while offset < end:
        number, wire, offset = _tag(data, offset, budget)
        if number == 1 and wire == _VARINT:
            version, offset = _read_varint(data, offset)
        elif number == 2 and wire == _BYTES:
            stream_id, offset = _read_text(data, offset)
        elif number in _KINDS and wire == _BYTES:
            if kind is not _KINDS[number]:
                fields = {name: fields[name] for name in fields.keys() & _ENVELOPE_NAMES}
            kind = _KINDS[number]
            start, offset = _read_span(data, offset)
            fields.update(_decode_body(kind, data, start, offset, budget))
        elif number in _ENVELOPE:
            name, expected = _ENVELOPE[number]
            if wire != expected:
                raise RelayError("field of a wrong type")
            if wire == _VARINT:
                value, offset = _read_varint(data, offset)
                fields[name] = value & _UINT32
            else:
                fields[name], offset = _read_text(data, offset)
        elif number <= 2 or number in _KINDS:
            raise RelayError("field of a wrong type")
        else:
            offset = _skip(data, offset, number, wire, budget)
    if version & _UINT32 != VERSION:
        raise RelayError("unknown version of relay frames")
    if kind is None or not stream_id.strip():
        raise RelayError("frame without a stream or a body")
    return _checked(Frame(stream_id, kind, **_with_default_count(kind, fields)))


# Fields outside of the body, beside version and stream id.
_ENVELOPE = {
    3: ("ack", _VARINT),
    4: ("ack_bits", _VARINT),
    11: ("traceparent", _BYTES),
    12: ("tracestate", _BYTES),
    _TOKEN_ID: ("token_id", _BYTES),
}
_ENVELOPE_NAMES = {name for name, _ in _ENVELOPE.values()}

# Names and wire types of the fields of each body.
_BODIES: dict[Kind, dict[int, tuple[str, int]]] = {
    Kind.DATA: {
        1: ("seq", _VARINT),
        2: ("segment_index", _VARINT),
        3: ("segment_count", _VARINT),
        4: ("payload", _BYTES),
    },
    Kind.ACK: {},
    Kind.RESUME: {1: ("next_seq", _VARINT)},
    Kind.RESET: {1: ("reason", _BYTES)},
    Kind.HEARTBEAT: {},
    Kind.HANDSHAKE: {1: ("payload", _BYTES)},
}


def _with_default_count(kind: Kind, fields: dict[str, Any]) -> dict[str, Any]:
    # An absent field is 0 on the wire; the default of Frame is that of senders.
    return {"segment_count": 0, **fields} if kind is Kind.DATA else fields


def _checked(frame: Frame) -> Frame:
    if frame.kind in (Kind.DATA, Kind.HANDSHAKE) and not frame.payload:
        raise RelayError("frame without a payload")
    if frame.kind is Kind.RESET and not frame.reason:
        raise RelayError("reset without a reason")
    return frame


def _decode_body(
    kind: Kind, data: bytes, offset: int, end: int, budget: Iterator[int]
) -> dict[str, Any]:
    known = _BODIES[kind]
    fields: dict[str, Any] = {}
    while offset < end:
        number, wire, offset = _tag(data, offset, budget)
        if number not in known:
            offset = _skip(data, offset, number, wire, budget)
        else:
            name, expected = known[number]
            if wire != expected:
                raise RelayError("field of a wrong type")
            if wire == _VARINT:
                value, offset = _read_varint(data, offset)
                fields[name] = value & _UINT32
            elif name == "payload":
                start, offset = _read_span(data, offset)
                fields[name] = data[start:offset]
            else:
                fields[name], offset = _read_text(data, offset)
        if offset > end:
            raise RelayError("field outside of its message")
    return fields


def _tag(data: bytes, offset: int, budget: Iterator[int]) -> tuple[int, int, int]:
    if next(budget, None) is None:
        raise RelayError("too many fields")
    tag, offset = _read_varint(data, offset)
    number = tag >> 3
    if not 0 < number < 1 << 29:
        raise RelayError("invalid field number")
    return number, tag & 7, offset


def _read_varint(data: bytes, offset: int) -> tuple[int, int]:
    """The number at `offset`, and the offset after it."""
    try:
        # Fast path: lengths and sequence numbers nearly always have at most three bytes.
        first = data[offset]
        if first < 0x80:
            return first, offset + 1
        second = data[offset + 1]
        if second < 0x80:
            return first & 0x7F | second << 7, offset + 2
        third = data[offset + 2]
        if third < 0x80:
            return first & 0x7F | (second & 0x7F) << 7 | third << 14, offset + 3
    except IndexError:
        raise RelayError("invalid number") from None
    return _read_long_varint(data, offset)


def _read_long_varint(data: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    for position in range(offset, min(offset + _MAX_VARINT_BYTES, len(data))):
        byte = data[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80 and value <= _UINT64:
            return value, position + 1
        shift += 7
    raise RelayError("invalid number")


def _read_span(data: bytes, offset: int) -> tuple[int, int]:
    """Start and end of a length-prefixed field."""
    size, start = _read_varint(data, offset)
    if size > len(data) - start:
        raise RelayError("field is cut off")
    return start, start + size


def _read_text(data: bytes, offset: int) -> tuple[str, int]:
    start, end = _read_span(data, offset)
    try:
        return data[start:end].decode(), end
    except UnicodeDecodeError:
        raise RelayError("text is not UTF-8") from None


def _skip(
    data: bytes, offset: int, number: int, wire: int, budget: Iterator[int], *, depth: int = 0
) -> int:
    if wire == _VARINT:
        return _read_varint(data, offset)[1]
    if wire == _BYTES:
        return _read_span(data, offset)[1]
    if wire in (_FIXED32, _FIXED64):
        offset += 4 if wire == _FIXED32 else 8
        if offset > len(data):
            raise RelayError("field is cut off")
        return offset
    if wire != _GROUP or depth == MAX_DEPTH:
        raise RelayError("unknown wire type")
    while True:
        inner, wire, offset = _tag(data, offset, budget)
        if wire == _GROUP_END:
            if inner != number:
                raise RelayError("group end does not match")
            return offset
        offset = _skip(data, offset, inner, wire, budget, depth=depth + 1)
