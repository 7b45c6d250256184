"""The WebSocket frame codec (RFC 6455) without a socket: bytes in, messages out.

Peers may send a message of up to 64 MiB in one frame or in fragments, with control frames
in between. Whatever breaks the rules raises ProtocolError with the close code to end with.
Both roles are here: a client masks its frames, a server does not.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from exec_server.errors import ProtocolError
from exec_server.transports.masking import apply_mask

# The limit of the protocol. A larger message is refused as soon as its header shows it.
MESSAGE_BYTES = 64 * 1_048_576
# Peers commonly refuse frames above 16 MiB, so larger messages are sent in fragments.
SENT_FRAME_BYTES = 4 * 1_048_576

PROTOCOL_VIOLATION = 1002
INVALID_TEXT = 1007
TOO_BIG = 1009

# When so much of a frame is missing it is received where it belongs, instead of being copied.
LANDING_BYTES = 16_384
# The room for it: what has come of the frame, times this, or the bytes below if that is less. A
# peer that announces much and sends little does not make us take much memory.
LANDING_GROWTH = 8
LANDING_LEAST_BYTES = 65_536

_MASKED = 0x80
_FIN = 0x80
_RESERVED = 0x70
_CONTROL = 0x8
_WHOLE_TEXT = 0x81  # first byte of a message in one frame
_WHOLE_BINARY = 0x82
_MEDIUM = 0xFE  # second byte of a masked frame with a length of two bytes
_LONGEST_HEADER = 14
_SIZE_16 = struct.Struct(">H").unpack_from
_SIZE_64 = struct.Struct(">Q").unpack_from
_PACK_16 = struct.Struct(">BBH").pack
_PACK_64 = struct.Struct(">BBQ").pack
_PACK_MASKED = struct.Struct(">BB4s").pack
_PACK_MASKED_16 = struct.Struct(">BBH4s").pack
_PACK_MASKED_64 = struct.Struct(">BBQ4s").pack


class Opcode(IntEnum):
    CONTINUATION = 0
    TEXT = 1
    BINARY = 2
    CLOSE = 8
    PING = 9
    PONG = 10


_OPCODES = {int(opcode): opcode for opcode in Opcode}


class Event(NamedTuple):
    """A whole message (TEXT or BINARY) or a control frame."""

    opcode: Opcode
    payload: bytes


class FrameReader:
    """Turns the bytes of one peer, a client unless told otherwise, into events."""

    __slots__ = (
        "_buffer",
        "_end",
        "_masked",
        "_message",
        "_message_bytes",
        "_message_opcode",
        "_offset",
        "_short_header",
        "_wanted",
    )

    def __init__(self, *, from_client: bool = True, message_bytes: int = MESSAGE_BYTES) -> None:
        self._masked = _MASKED if from_client else 0
        self._short_header = 6 if from_client else 2
        self._message_bytes = message_bytes
        self._buffer: bytes | bytearray = b""
        self._offset = 0
        self._end = 0  # of what has come; in the buffer there may be room behind it
        self._wanted = 2  # bytes from the offset without which there is no progress
        # The fragments so far. Joined as they come: kept apart, millions of tiny ones would
        # cost many times their bytes.
        self._message = bytearray()
        self._message_opcode: Opcode | None = None

    def feed(self, data: bytes) -> None:
        buffer = self._buffer
        if self._end == self._offset:
            self._buffer = data
        elif self._offset or self._end < len(buffer) or not isinstance(buffer, bytearray):
            joined = bytearray(memoryview(buffer)[self._offset : self._end])
            joined += data
            self._buffer = joined
        else:
            buffer += data
        self._offset = 0
        self._end = len(self._buffer)

    @property
    def is_long(self) -> bool:
        """Whether so much of a frame is missing that its rest should land in its place."""
        return self._wanted - (self._end - self._offset) >= LANDING_BYTES

    def landing(self) -> memoryview:
        """Where to receive the rest of a long frame, and nothing more; `landed` says how much."""
        buffer, start, end = self._buffer, self._offset, self._end
        if end == len(buffer):
            come = end - start
            room = max(LANDING_LEAST_BYTES, come * LANDING_GROWTH)
            buffer = bytearray(min(self._wanted, room))
            buffer[:come] = memoryview(self._buffer)[start:end]
            self._buffer, self._offset, self._end = buffer, 0, come
        return memoryview(buffer)[self._end :]

    def landed(self, count: int) -> bool:
        """So many bytes were put there; whether the frame is whole now."""
        self._end += count
        return self._end == self._wanted

    def whole_message(self, data: bytes) -> bytes | None:
        """The message, if `data` is exactly one short frame with all of it: so nearly always.

        Of what a client sends; `whole_event` is for servers. None, and nothing done, if it is
        anything else: then it is to be fed.
        """
        size = len(data) - 6
        if size < 0 or data[0] != _WHOLE_TEXT or self._buffer or self._message_opcode is not None:
            return None
        mask = 2
        if data[1] != size | _MASKED or size > 125:
            size -= 2
            mask = 4
            if size < 126 or data[1] != _MEDIUM or (data[2] << 8 | data[3]) != size:
                return None
        payload = apply_mask(data[mask + 4 :], data[mask : mask + 4])
        return payload if payload.isascii() else None

    def whole_event(self, data: bytes) -> Event | None:
        """The message, if `data` is exactly one frame of a server with all of it.

        None, and nothing done, if it is anything else: then it is to be fed.
        """
        size = len(data) - 2
        if size < 0 or self._buffer or self._message_opcode is not None:
            return None
        start = 2
        if data[1] != size or size > 125:
            size -= 2
            start = 4
            if size < 126 or data[1] != 126 or (data[2] << 8 | data[3]) != size:
                return None
        if size > self._message_bytes:
            return None
        if data[0] == _WHOLE_BINARY:
            return Event(Opcode.BINARY, data[start:])
        if data[0] == _WHOLE_TEXT and (payload := data[start:]).isascii():
            return Event(Opcode.TEXT, payload)
        return None

    def announced(self) -> int:
        """How large the message under way will be; a fragmented one may become the largest."""
        if self._message_opcode is not None:
            return self._message_bytes if len(self._message) + self._wanted > 65_536 else 0
        return self._wanted

    def next_event(self) -> Event | None:
        """The next event, or None until more bytes are fed."""
        while True:
            frame = self._next_frame()
            if frame is None:
                return None
            opcode, final, payload = frame
            if opcode & _CONTROL:
                return Event(opcode, payload)
            event = self._assemble(opcode, payload, final=final)
            if event is not None:
                return event

    def _next_frame(self) -> tuple[Opcode, bool, bytes] | None:
        buffer, start = self._buffer, self._offset
        come = self._end - start
        if come < self._wanted:
            return None
        first, second = buffer[start], buffer[start + 1]
        size = second & 0x7F
        header = self._short_header
        if size >= 126:
            header += 2 if size == 126 else 8
            if come < header:
                self._wanted = header
                return None
            size = (_SIZE_16 if size == 126 else _SIZE_64)(buffer, start + 2)[0]
        opcode = self._check_header(first, second, size)
        if come < header + size:
            self._wanted = header + size
            return None
        self._wanted = 2
        self._offset = end = start + header + size
        if end == self._end:
            self._buffer, self._offset, self._end = b"", 0, 0
        start += header
        if not self._masked:
            whole = buffer if isinstance(buffer, bytes) else memoryview(buffer)
            return opcode, bool(first & _FIN), bytes(whole[start:end])
        # A slice is faster, a view saves the largest messages a copy.
        masked = (buffer if size < 65_536 else memoryview(buffer))[start:end]
        return opcode, bool(first & _FIN), apply_mask(masked, buffer[start - 4 : start])

    def _check_header(self, first: int, second: int, size: int) -> Opcode:
        opcode = _OPCODES.get(first & 0x0F)
        if first & _RESERVED:
            raise ProtocolError(PROTOCOL_VIOLATION, "reserved bits are set")
        if opcode is None:
            raise ProtocolError(PROTOCOL_VIOLATION, "unknown opcode")
        if second & _MASKED != self._masked:
            rule = "a client must" if self._masked else "a server must not"
            raise ProtocolError(PROTOCOL_VIOLATION, f"frames of {rule} be masked")
        if opcode & _CONTROL:
            if size > 125 or not first & _FIN:
                raise ProtocolError(PROTOCOL_VIOLATION, "control frame too long or fragmented")
        elif (opcode is Opcode.CONTINUATION) != (self._message_opcode is not None):
            raise ProtocolError(PROTOCOL_VIOLATION, "fragments out of order")
        elif len(self._message) + size > self._message_bytes:
            raise ProtocolError(TOO_BIG, f"message exceeds {self._message_bytes} bytes")
        return opcode

    def _assemble(self, opcode: Opcode, payload: bytes, *, final: bool) -> Event | None:
        """Put a data frame to its message; returns the message once it is whole."""
        if not final or self._message_opcode is not None:
            if opcode is not Opcode.CONTINUATION:
                self._message_opcode = opcode
            self._message += payload
            if not final:
                return None
            assert self._message_opcode is not None
            opcode = self._message_opcode
            payload = bytes(self._message)
            self._message = bytearray()
            self._message_opcode = None
        if opcode is Opcode.TEXT and not payload.isascii():
            try:
                payload.decode()
            except UnicodeDecodeError:
                raise ProtocolError(INVALID_TEXT, "text message is not UTF-8") from None
        return Event(opcode, payload)


def frame_header(opcode: Opcode, size: int, *, final: bool = True) -> bytes:
    """The header of a frame that a server sends."""
    first = opcode | (_FIN if final else 0)
    if size < 126:
        return bytes((first, size))
    if size < 65_536:
        return _PACK_16(first, 126, size)
    return _PACK_64(first, 127, size)


def text_frame(message: bytes) -> bytes:
    """A whole message in one frame, as a server sends it."""
    size = len(message)
    if size < 126:
        return b"\x81%c%b" % (size, message)
    if size < 65_536:
        return _PACK_16(_WHOLE_TEXT, 126, size) + message
    return _PACK_64(_WHOLE_TEXT, 127, size) + message


def masked_frame(opcode: int, payload: bytes, mask: bytes, *, final: bool = True) -> bytes:
    """A frame as a client sends it."""
    first = opcode | _FIN if final else opcode
    size = len(payload)
    if size < 126:
        head = _PACK_MASKED(first, size | _MASKED, mask)
    elif size < 65_536:
        head = _PACK_MASKED_16(first, _MEDIUM, size, mask)
    else:
        head = _PACK_MASKED_64(first, 0xFF, size, mask)
    return head + apply_mask(payload, mask)


def close_payload(code: int, reason: str) -> bytes:
    """Code and reason of a close frame; a reason that does not fit is cut."""
    return code.to_bytes(2, "big") + reason.encode()[:123]


def close_answer(payload: bytes) -> bytes:
    """The payload to answer a peer's close frame with: its own code, if it has a valid one."""
    if not payload:
        return b""
    code = int.from_bytes(payload[:2], "big")
    valid = 1000 <= code <= 1003 or 1007 <= code <= 1014 or 3000 <= code <= 4999
    try:
        payload[2:].decode()
    except UnicodeDecodeError:
        return INVALID_TEXT.to_bytes(2, "big")
    return payload[:2] if len(payload) >= 2 and valid else PROTOCOL_VIOLATION.to_bytes(2, "big")
