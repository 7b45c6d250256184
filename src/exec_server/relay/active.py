"""The open streams of a link: what arrives for each, and how each ends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from exec_server.errors import RelayError
from exec_server.relay.frames import Frame, Kind, encode

log = logging.getLogger(__name__)

# As many streams as the reference serves on one link; one more is answered by a reset.
MAX_STREAMS = 128
# It carries no detail on purpose: whoever reads it may be anybody.
RESET_REASON = "noise_relay_protocol_error"


class AnyChannel(Protocol):
    """What makes messages of frames, encrypted or not."""

    stream_id: str

    def receive(self, frame: Frame) -> list[bytes]: ...


class Receiver(Protocol):
    """Who gets what arrives on one stream."""

    def messages_received(self, messages: list[bytes]) -> None:
        """Something has arrived; often no whole message yet. RelayError ends the stream."""
        ...

    def stream_lost(self) -> None:
        """The stream is gone; called exactly once, unless `ActiveStreams.end` was called for it."""
        ...


class ActiveStreams:
    """Streams by their ids; `send_frame` is how peers hear of their end."""

    def __init__(self, send_frame: Callable[[bytes], None]) -> None:
        self._send_frame = send_frame
        self._streams: dict[str, tuple[AnyChannel, Receiver]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, stream_id: str) -> bool:
        return stream_id in self._streams

    @property
    def is_full(self) -> bool:
        return len(self._streams) >= MAX_STREAMS

    def add(self, channel: AnyChannel, receiver: Receiver) -> None:
        self._streams[channel.stream_id] = (channel, receiver)

    def deliver(self, frame: Frame) -> bool:
        """Hand over what a data frame brings; False if there is no such stream."""
        entry = self._streams.get(frame.stream_id)
        if entry is None:
            return False
        channel, receiver = entry
        try:
            receiver.messages_received(channel.receive(frame))
        except RelayError as error:
            log.info("stream %s ends: %s", frame.stream_id, error)
            self.end(frame.stream_id)
            receiver.stream_lost()
        return True

    def drop(self, stream_id: str) -> None:
        """The peer has ended it."""
        entry = self._streams.pop(stream_id, None)
        if entry is not None:
            entry[1].stream_lost()

    def end(self, stream_id: str) -> None:
        """Forget a stream and tell its peer."""
        if self._streams.pop(stream_id, None) is not None:
            self.refuse(stream_id)

    def refuse(self, stream_id: str) -> None:
        """Tell a peer that there is no such stream, or no longer."""
        self._send_frame(encode(Frame(stream_id, Kind.RESET, reason=RESET_REASON)))

    def lose_all(self) -> None:
        """The link is gone, and all streams with it."""
        streams, self._streams = self._streams, {}
        for _, receiver in streams.values():
            receiver.stream_lost()
