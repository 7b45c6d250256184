"""One relay stream after its handshake: messages to frames, frames to messages."""

from __future__ import annotations

from collections.abc import Iterator

from exec_server.errors import RelayError
from exec_server.relay.frames import Frame, data_frame, stream_prefix
from exec_server.relay.noise import Ciphers
from exec_server.relay.records import (
    MESSAGE_BYTES,
    Assembler,
    Cutter,
    ReorderWindow,
    cut,
    framed,
    prefix,
)

_LAST_SEQ = 0xFFFF_FFFF


class Channel:
    """An encrypted stream. Whatever raises RelayError ends it."""

    message_bytes = MESSAGE_BYTES

    def __init__(self, stream_id: str, ciphers: Ciphers) -> None:
        self.stream_id = stream_id
        self._sending, self._receiving = ciphers
        self._prefix = stream_prefix(stream_id)
        self._seq = 0
        self._window = ReorderWindow()
        self._assembler = Assembler()

    def receive(self, frame: Frame) -> list[bytes]:
        """The messages that a data frame completes."""
        if frame.is_segment:
            return []  # as the reference: dropped, the stream goes on waiting for this number
        messages: list[bytes] = []
        for record in self._window.push(frame.seq, frame.payload):
            messages += self._assembler.feed(self._receiving.open(record))
        return messages

    @property
    def announced(self) -> int:
        """How large the message under way will be."""
        return self._assembler.announced

    def pieces(self, message: bytes) -> Iterator[bytes | memoryview]:
        """What has to be sealed for a message, one after the other."""
        return cut(framed(message))

    def cutter(self, size: int) -> Cutter:
        """Makes what has to be sealed for a message of `size` bytes that comes in parts."""
        return Cutter(size, start=prefix(size))

    def seal(self, piece: bytes | memoryview) -> bytes:
        """The next frame of the stream: at most a record of plaintext, encrypted."""
        seq = self._seq
        if seq > _LAST_SEQ:
            raise RelayError("stream is exhausted")
        self._seq = seq + 1
        return data_frame(self._prefix, seq, self._sending.seal(piece))
