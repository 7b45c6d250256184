"""The client's end of a relay: one socket, its handshake, one encrypted stream."""

from __future__ import annotations

import asyncio

from exec_server.errors import ConnectFailed, HandshakeReset, RelayError
from exec_server.net.inbox import ByteBudget
from exec_server.net.relay_stream import RECEIVING_BYTES, RelaySocket, RelayStream
from exec_server.net.stream import JudgingReceiver, ReceiverFactory
from exec_server.net.websocket.client import ClientSocket
from exec_server.relay.frames import Frame, Kind, decode, encode
from exec_server.relay.noise import TAG_BYTES
from exec_server.relay.records import Channel

GOING_AWAY = 1001
# The reason in the reset at a stream's end; the executor does not read it.
_RESET_REASON = "harness_disconnected"


class ClientRelayLink(RelaySocket):
    """The user of a ClientSocket, and the carrier of the only stream on it."""

    def __init__(self, socket: ClientSocket, stream_id: str) -> None:
        super().__init__(socket)
        self.stream_id = stream_id
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        # The caller may be cancelled before it asks for the exception.
        self.answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._channel: Channel | None = None
        self._stream: RelayStream | None = None

    def introduce(self, handshake: bytes | None) -> None:
        """Open the stream at the relay, and begin the handshake."""
        self.send_frame(encode(Frame(self.stream_id, Kind.RESUME)))
        if handshake is not None:
            self.send_frame(encode(Frame(self.stream_id, Kind.HANDSHAKE, handshake)))

    def open(self, channel: Channel, receiver: ReceiverFactory) -> RelayStream:
        """The stream; the handshake has made its channel."""
        self._channel = channel
        budget = ByteBudget(RECEIVING_BYTES)
        self._stream = RelayStream(self, channel, receiver, budget, self._set_reading)
        if isinstance(self._stream.receiver, JudgingReceiver):
            self._socket.on_useless = self._stream.receiver.useless_received
        return self._stream

    def message_received(self, message: bytes, *, is_text: bool) -> None:
        try:
            if is_text:
                raise RelayError("text message on a relay")
            frame = decode(message)
            if frame.stream_id != self.stream_id or not self._frame_received(frame):
                self._socket.on_useless()
        except RelayError as error:
            self._fail(str(error))

    def _frame_received(self, frame: Frame) -> bool:
        """Whether it brought something."""
        if frame.kind is Kind.RESET:
            self._fail("relay stream reset", HandshakeReset)  # its text is not authenticated
        elif frame.kind is Kind.HANDSHAKE:
            if self._channel is not None or self.answer.done():
                raise RelayError("unexpected handshake")
            self.answer.set_result(frame.payload)
        elif frame.kind is Kind.DATA:
            if self._channel is None or self._stream is None:
                raise RelayError("relay received data before handshake completion")
            self._stream.messages_received(self._channel.receive(frame))
            return len(frame.payload) > TAG_BYTES  # a shorter record is empty
        else:
            return False
        return True

    def _fail(self, reason: str, kind: type[ConnectFailed] = ConnectFailed) -> None:
        if not self.answer.done():
            self.answer.set_exception(kind(f"relay handshake failed: {reason}"))
        self._socket.abort(reason)

    def streams_lost(self) -> None:
        if not self.answer.done():
            self.answer.set_exception(ConnectFailed("relay handshake failed: connection ended"))
        if self._stream is not None:
            self._stream.stream_lost()

    def _set_reading(self, is_wanted: bool) -> None:
        if is_wanted:
            self.resume_reading()
        else:
            self.pause_reading()

    def end_stream(self, stream_id: str) -> None:
        self.send_frame(encode(Frame(stream_id, Kind.RESET, reason=_RESET_REASON)))
        self.close(GOING_AWAY, "")
