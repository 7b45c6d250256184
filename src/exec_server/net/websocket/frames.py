"""The WebSocket frame codec (RFC 6455) without a socket: bytes in, messages out.

Peers may send a message of up to 64 MiB in one frame or in fragments, with control frames
in between. Frames that break the protocol raise ProtocolError with the close code to end with.
Both roles are here: a client masks its frames, a server does not.

Hand-written for speed: one request and its response take an eighth of the time of the sans-I/O
protocol of websockets on the fast path, 40 % otherwise (`python -m bench.alternatives`). The rest
of a long frame is received into its buffer without a copy.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from typing import NamedTuple

from exec_server.errors import ProtocolError

Mask = Callable[[bytes | bytearray | memoryview, bytes | bytearray], bytes]


# The limit of the protocol. A larger message is refused as soon as its header shows it.
MESSAGE_BYTES = 64 * 1_048_576
# Peers commonly refuse frames above 16 MiB, so larger messages are sent in fragments.
SENT_FRAME_BYTES = 4 * 1_048_576

PROTOCOL_VIOLATION = 1002
INVALID_TEXT = 1007
TOO_BIG = 1009

# If at least this many bytes of a frame are missing, they are received directly into its buffer
# instead of being copied.
DIRECT_RECEIVE_BYTES = 16_384
# The size of that buffer: the received bytes of the frame times this factor, but at least the
# bytes below. A peer that announces much and sends little does not make us allocate much.
DIRECT_RECEIVE_GROWTH = 8
DIRECT_RECEIVE_LEAST_BYTES = 65_536

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


# The C routine of the websockets package that masks and unmasks frames.
#
# It is loaded without its package, whose import would take a tenth of our start-up.
def _load() -> Mask:
    package = find_spec("websockets")  # found, not imported
    assert package is not None
    spec = PathFinder.find_spec("websockets.speedups", package.submodule_search_locations)
    if spec is None or spec.loader is None:
        from websockets.utils import apply_mask  # no C routine for this machine

        return apply_mask
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    routine: Mask = module.apply_mask
    return routine


apply_mask = _load()


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


# Fragments that `next_event` takes before it lets its caller do other work. They may be empty, so
# one read can bring more than a hundred thousand.
FRAGMENTS_IN_A_ROW = 64
# The message of these fragments is not complete; more events may be buffered.
UNFINISHED = Event(Opcode.CONTINUATION, b"")


class FrameReader:
    """Decodes the bytes of one peer, by default a client, into events."""

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
        "empty_fragments",
    )

    def __init__(self, *, from_client: bool = True, message_bytes: int = MESSAGE_BYTES) -> None:
        self._masked = _MASKED if from_client else 0
        self._short_header = 6 if from_client else 2
        self._message_bytes = message_bytes
        self._buffer: bytes | bytearray = b""
        self._offset = 0
        self._end = 0  # of the received bytes; the buffer may be longer
        self._wanted = 2  # bytes from the offset that the next step needs
        # The fragments so far, joined as they arrive: as separate objects millions of tiny ones
        # would cost many times their bytes.
        self._message = bytearray()
        self._message_opcode: Opcode | None = None
        self.empty_fragments = 0  # which bring their message no further

    def clear(self) -> None:
        """Drop all received bytes; the reader is of no use any more.

        The objects of a connection refer to each other, so without this their memory is free only
        when the garbage collector has found them.
        """
        self._buffer, self._message = b"", bytearray()
        self._offset = self._end = 0
        self._wanted = DIRECT_RECEIVE_LEAST_BYTES  # the size of a writable tail

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
    def wants_direct_receive(self) -> bool:
        """Whether so much of a frame is missing that its rest should be received directly."""
        return self._wanted - (self._end - self._offset) >= DIRECT_RECEIVE_BYTES

    def writable_tail(self) -> memoryview:
        """Where to receive the rest of a long frame; call `bytes_written` after each part."""
        buffer, start, end = self._buffer, self._offset, self._end
        if end == len(buffer):
            received = end - start
            size = max(DIRECT_RECEIVE_LEAST_BYTES, received * DIRECT_RECEIVE_GROWTH)
            buffer = bytearray(min(self._wanted, size))
            buffer[:received] = memoryview(self._buffer)[start:end]
            self._buffer, self._offset, self._end = buffer, 0, received
        return memoryview(buffer)[self._end :]

    def bytes_written(self, count: int) -> bool:
        """Count bytes received into the writable tail; returns whether the frame is complete."""
        self._end += count
        return self._end == self._wanted

    def whole_message(self, data: bytes) -> bytes | None:
        """Fast path: the message, if `data` is exactly one short unfragmented frame of a client.

        Otherwise None, without any effect: then `data` has to be fed.
        """
        size = len(data) - 6
        if size < 0 or data[0] != _WHOLE_TEXT or self._buffer or self._message_opcode is not None:
            return None
        if size <= 125:
            if data[1] != size | _MASKED:
                return None
            payload = apply_mask(data[6:], data[2:6])
        else:
            size -= 2
            if size < 126 or data[1] != _MEDIUM or (data[2] << 8 | data[3]) != size:
                return None
            payload = apply_mask(data[8:], data[4:8])
        return payload if payload.isascii() else None

    def whole_event(self, data: bytes) -> Event | None:
        """Fast path: the message, if `data` is exactly one unfragmented frame of a server.

        Otherwise None, without any effect: then `data` has to be fed.
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

    def take_incomplete(self) -> bytes | None:
        """The bytes of an incomplete frame, for a reader of its own; None within a message.

        A relay reads whole frames by itself and leaves all others to this reader.
        """
        if self._message_opcode is not None or self._is_first_fragment():
            return None
        rest = bytes(memoryview(self._buffer)[self._offset : self._end])
        self._buffer, self._offset, self._end, self._wanted = b"", 0, 0, 2
        return rest

    def announced(self) -> int:
        """The size of the incomplete message, if fragmented the largest size it may reach."""
        if self._message_opcode is not None or self._is_first_fragment():
            return self._message_bytes if len(self._message) + self._wanted > 65_536 else 0
        return self._wanted

    def _is_first_fragment(self) -> bool:
        """Whether the incomplete frame is the first of several fragments."""
        return self._end > self._offset and not self._buffer[self._offset] & _FIN

    def next_event(self) -> Event | None:
        """The next event, or None until more bytes are fed; UNFINISHED after many fragments."""
        fragments = 0
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
            fragments += 1
            if fragments == FRAGMENTS_IN_A_ROW:
                return UNFINISHED

    def _next_frame(self) -> tuple[Opcode, bool, bytes] | None:
        buffer, start = self._buffer, self._offset
        received = self._end - start
        if received < self._wanted:
            return None
        first, second = buffer[start], buffer[start + 1]
        size = second & 0x7F
        header = self._short_header
        if size >= 126:
            header += 2 if size == 126 else 8
            if received < header:
                self._wanted = header
                return None
            size = (_SIZE_16 if size == 126 else _SIZE_64)(buffer, start + 2)[0]
        opcode = self._check_header(first, second, size)
        if received < header + size:
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
        # A slice is faster; for large messages a view saves a copy.
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
        """Add a data frame to its message; returns the message once it is complete."""
        if not final or self._message_opcode is not None:
            if opcode is not Opcode.CONTINUATION:
                self._message_opcode = opcode
            self._message += payload
            if not final:
                self.empty_fragments += not payload
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


def text_header(size: int) -> bytes:
    """The header of a whole message in one frame, as a server sends it."""
    if size < 126:
        return _SHORT_HEADERS[size]
    if size < 65_536:
        return _PACK_16(_WHOLE_TEXT, 126, size)
    return _PACK_64(_WHOLE_TEXT, 127, size)


_SHORT_HEADERS = [bytes((_WHOLE_TEXT, size)) for size in range(126)]


def text_frame(message: bytes) -> bytes:
    """A whole message in one frame, as a server sends it."""
    size = len(message)
    return (_SHORT_HEADERS[size] if size < 126 else text_header(size)) + message


def masked_frame(opcode: int, payload: bytes, mask: bytes, *, final: bool = True) -> bytes:
    """A frame as a client sends it."""
    return _masked_header(opcode, len(payload), mask, final=final) + apply_mask(payload, mask)


def masked_pieces(opcode: int, head: bytes, data: bytes, mask: bytes) -> tuple[bytes, bytes]:
    """A frame with the payload `head + data`, which are not joined."""
    header = _masked_header(opcode, len(head) + len(data), mask, final=True)
    turn = len(head) % 4
    return header + apply_mask(head, mask), apply_mask(data, mask[turn:] + mask[:turn])


def _masked_header(opcode: int, size: int, mask: bytes, *, final: bool) -> bytes:
    first = opcode | _FIN if final else opcode
    if size < 126:
        return _PACK_MASKED(first, size | _MASKED, mask)
    if size < 65_536:
        return _PACK_MASKED_16(first, _MEDIUM, size, mask)
    return _PACK_MASKED_64(first, 0xFF, size, mask)


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
