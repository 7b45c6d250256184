"""The part of a relay frame that the rendezvous reads: version, stream id and kind.

A frame that names its stream twice could mean one stream here and another one at the executor, so
the fast path takes only usual frames, and all others are decoded as the executor decodes them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from exec_server.errors import RelayError
from exec_server.relay.frames import Frame, Kind, decode, encode, stream_prefix

# Clients name their streams by a UUID of 36 characters.
STREAM_ID_BYTES: Final = 127

_DATA_TAG: Final = Kind.DATA << 3 | 2


class RelayEnvelope(NamedTuple):
    """The start of every frame of a stream, which stands for its id, and the kind of this one."""

    prefix: bytes
    kind: Kind


def read(frame: bytes) -> RelayEnvelope | None:
    """The envelope of a frame; None if it is not readable."""
    if frame.startswith(b"\x08\x01\x12") and len(frame) > 4:
        end = 4 + frame[3]
        if is_data(frame, end) and frame[3]:
            return RelayEnvelope(frame[:end], Kind.DATA)
    try:
        decoded = decode(frame)
    except RelayError:
        return None
    if len(decoded.stream_id.encode()) > STREAM_ID_BYTES:
        return None
    return RelayEnvelope(stream_prefix(decoded.stream_id), decoded.kind)


def is_data(frame: bytes, end: int) -> bool:
    """Whether all bytes after `end`, the length of the prefix, are one data field."""
    try:
        if end > 4 + STREAM_ID_BYTES or frame[end] != _DATA_TAG:
            return False
        size = frame[end + 1]
        if size < 0x80:
            return end + 2 + size == len(frame)
        second = frame[end + 2]
        if second < 0x80:
            return end + 3 + (size & 0x7F | second << 7) == len(frame)
        third = frame[end + 3]
        size = size & 0x7F | (second & 0x7F) << 7 | third << 14
        return third < 0x80 and end + 4 + size == len(frame)
    except IndexError:
        return False


def reset(prefix: bytes, reason: str) -> bytes:
    """A frame that ends the stream of this prefix."""
    return encode(Frame(_stream_id(prefix), Kind.RESET, reason=reason))


def _stream_id(prefix: bytes) -> str:
    # The fast path does not look at the characters; the peer drops frames with others than UTF-8.
    return prefix[4:].decode(errors="replace")
