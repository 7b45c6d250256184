"""The open streams of a link: delivery of their messages, and resets."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from exec_server.errors import RelayError
from exec_server.relay.frames import Frame, Kind, decode, encode, usual_data

log = logging.getLogger(__name__)

# The limit of the reference for one link. A further stream gets a reset.
MAX_STREAMS = 128
# Without detail on purpose: the relay, and not only the peer, can read it.
RESET_REASON = "noise_relay_protocol_error"
# The reason of a registry of ours for a stream whose token is revoked with its commands. Other
# executors take it for an ordinary reset.
REVOKED_REASON = "token_revoked"


class ReceivingChannel(Protocol):
    """Frames to messages, encrypted or not."""

    stream_id: str
    prefix: bytes  # of the frames of this stream

    def receive(self, frame: Frame) -> list[bytes]: ...

    def receive_record(self, seq: int, record: bytes) -> list[bytes]:
        """The same for a frame that is no segment."""
        ...


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
        self._by_prefix: dict[bytes, tuple[ReceivingChannel, StreamReceiver]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, stream_id: str) -> bool:
        return stream_id in self._streams

    @property
    def is_full(self) -> bool:
        return len(self._streams) >= MAX_STREAMS

    def add(self, channel: ReceivingChannel, receiver: StreamReceiver) -> None:
        entry = (channel, receiver)
        self._streams[channel.stream_id] = self._by_prefix[channel.prefix] = entry

    def frame_received(self, data: bytes) -> Frame | None:
        """Deliver a frame to its stream; the decoded frame if the multiplexer has to handle it.

        A reset has ended its stream then; data have none.
        """
        if self._deliver_usual(data):
            return None
        try:
            frame = decode(data)
        except RelayError as error:
            log.debug("dropped a relay frame: %s", error)
            return None
        if frame.kind is Kind.RESET:
            self.drop(frame.stream_id)
        return None if frame.kind is Kind.DATA and self.deliver(frame) else frame

    def _deliver_usual(self, data: bytes) -> bool:
        """Fast path: pass an encoded data frame to its stream; False if it has to be decoded."""
        end = 4 + data[3] if len(data) > 3 else 0
        entry = self._by_prefix.get(data[:end])
        found = None if entry is None else usual_data(data, end)
        if entry is None or found is None:
            return False
        channel, receiver = entry
        try:
            receiver.messages_received(channel.receive_record(*found))
        except Exception as error:
            self._fail(channel.stream_id, receiver, error)
        return True

    def deliver(self, frame: Frame) -> bool:
        """Pass a data frame to its stream; returns False if there is no such stream."""
        entry = self._streams.get(frame.stream_id)
        if entry is None:
            return False
        channel, receiver = entry
        try:
            receiver.messages_received(channel.receive(frame))
        except Exception as error:
            self._fail(frame.stream_id, receiver, error)
        return True

    def _fail(self, stream_id: str, receiver: StreamReceiver, error: Exception) -> None:
        """End one stream, whatever its error: the other streams of the link go on."""
        if isinstance(error, RelayError):
            log.info("relay stream %s ends: %s", stream_id, error)
        else:
            log.error("relay stream %s failed unexpectedly", stream_id, exc_info=error)
        self.end(stream_id)
        _tell_lost(receiver)

    def drop(self, stream_id: str) -> None:
        """Remove a stream that the peer has reset."""
        receiver = self._remove(stream_id)
        if receiver is not None:
            _tell_lost(receiver)

    def end(self, stream_id: str) -> None:
        """Remove a stream and send its peer a reset."""
        if self._remove(stream_id) is not None:
            self.send_reset(stream_id)

    def _remove(self, stream_id: str) -> StreamReceiver | None:
        """Forget a stream; returns its receiver, if there is such a stream."""
        entry = self._streams.pop(stream_id, None)
        if entry is None:
            return None
        channel, receiver = entry
        del self._by_prefix[channel.prefix]
        return receiver

    def send_reset(self, stream_id: str) -> None:
        """Send a reset: there is no such stream."""
        self._send_frame(encode(Frame(stream_id, Kind.RESET, reason=RESET_REASON)))

    def link_lost(self) -> None:
        """Tell all streams that the link is lost."""
        streams, self._streams = self._streams, {}
        self._by_prefix.clear()
        for _, receiver in streams.values():
            _tell_lost(receiver)


def _tell_lost(receiver: StreamReceiver) -> None:
    try:
        receiver.stream_lost()
    except Exception:  # an edge: the other streams are told too
        log.exception("the end of a relay stream failed unexpectedly")
