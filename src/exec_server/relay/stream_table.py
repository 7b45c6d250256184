"""The open streams of a link: delivery of their messages, and resets."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from exec_server.errors import RelayError
from exec_server.relay.frames import Frame, Kind, encode

log = logging.getLogger(__name__)

# The limit of the reference for one link. A further stream gets a reset.
MAX_STREAMS = 128
# Without detail on purpose: the relay, and not only the peer, can read it.
RESET_REASON = "noise_relay_protocol_error"


class ReceivingChannel(Protocol):
    """Frames to messages, encrypted or not."""

    stream_id: str

    def receive(self, frame: Frame) -> list[bytes]: ...


class StreamReceiver(Protocol):
    """The receiver of one stream's messages."""

    def messages_received(self, messages: list[bytes]) -> None:
        """A frame has arrived, with its complete messages, if any. RelayError ends the stream."""
        ...

    def stream_lost(self) -> None:
        """The stream has ended; called once, but not after `StreamTable.end` for this stream."""
        ...


class StreamTable:
    """Streams by their ids; `send_frame` sends the resets."""

    def __init__(self, send_frame: Callable[[bytes], None]) -> None:
        self._send_frame = send_frame
        self._streams: dict[str, tuple[ReceivingChannel, StreamReceiver]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, stream_id: str) -> bool:
        return stream_id in self._streams

    @property
    def is_full(self) -> bool:
        return len(self._streams) >= MAX_STREAMS

    def add(self, channel: ReceivingChannel, receiver: StreamReceiver) -> None:
        self._streams[channel.stream_id] = (channel, receiver)

    def deliver(self, frame: Frame) -> bool:
        """Pass a data frame to its stream; returns False if there is no such stream."""
        entry = self._streams.get(frame.stream_id)
        if entry is None:
            return False
        channel, receiver = entry
        try:
            receiver.messages_received(channel.receive(frame))
        except RelayError as error:
            log.info("relay stream %s ends: %s", frame.stream_id, error)
            self.end(frame.stream_id)
            receiver.stream_lost()
        return True

    def drop(self, stream_id: str) -> None:
        """Remove a stream that the peer has reset."""
        entry = self._streams.pop(stream_id, None)
        if entry is not None:
            entry[1].stream_lost()

    def end(self, stream_id: str) -> None:
        """Remove a stream and send its peer a reset."""
        if self._streams.pop(stream_id, None) is not None:
            self.send_reset(stream_id)

    def send_reset(self, stream_id: str) -> None:
        """Send a reset: there is no such stream."""
        self._send_frame(encode(Frame(stream_id, Kind.RESET, reason=RESET_REASON)))

    def link_lost(self) -> None:
        """Tell all streams that the link is lost."""
        streams, self._streams = self._streams, {}
        for _, receiver in streams.values():
            receiver.stream_lost()
