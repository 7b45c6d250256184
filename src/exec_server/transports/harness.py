"""The client's end of a relay: one socket, one encrypted stream, a MessageStream at last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from exec_server.errors import ConnectFailed, RelayError
from exec_server.relay.channel import Channel
from exec_server.relay.frames import Frame, Kind, decode, encode
from exec_server.relay.plain import PlainChannel
from exec_server.rpc.stream import MessageReceiver, MessageStream
from exec_server.transports.client_socket import ClientSocket
from exec_server.transports.relay_socket import RelaySocket
from exec_server.transports.relay_stream import RECEIVING_BYTES, RelayStream
from exec_server.transports.room import Room

GOING_AWAY = 1001
# What a stream's end looks like to the executor; it does not read the text.
_RESET_REASON = "harness_disconnected"


class HarnessStream(RelayStream):
    """The only stream of its socket, which need not be read while the stream is not wanted."""

    def __init__(
        self,
        link: HarnessLink,
        channel: Channel | PlainChannel,
        receiver: Callable[[MessageStream], MessageReceiver],
    ) -> None:
        self._link = link
        super().__init__(link, channel, receiver, Room(RECEIVING_BYTES))

    def hold(self, *, receiving: bool) -> None:
        super().hold(receiving=receiving)
        self._link.hold(receiving=receiving)


class HarnessLink(RelaySocket):
    """The socket, its handshake, and then its one stream."""

    def __init__(self, socket: ClientSocket, stream_id: str) -> None:
        super().__init__(socket)
        self.stream_id = stream_id
        self.answer: asyncio.Future[bytes] = self._loop.create_future()
        self._channel: Channel | PlainChannel | None = None
        self._stream: RelayStream | None = None
        # Never nobody's exception: the opener may have been cancelled.
        self.answer.add_done_callback(lambda done: done.cancelled() or done.exception())

    def introduce(self, handshake: bytes | None) -> None:
        """Open the stream at the relay, and begin the handshake."""
        self.send_frame(encode(Frame(self.stream_id, Kind.RESUME)))
        if handshake is not None:
            self.send_frame(encode(Frame(self.stream_id, Kind.HANDSHAKE, handshake)))

    def open(
        self,
        channel: Channel | PlainChannel,
        receiver: Callable[[MessageStream], MessageReceiver],
    ) -> RelayStream:
        self._channel = channel
        self._stream = HarnessStream(self, channel, receiver)
        return self._stream

    # ---- from the socket --------------------------------------------------------------

    def message_received(self, message: bytes, *, is_text: bool) -> None:
        try:
            if is_text:
                raise RelayError("text message on a relay")
            frame = decode(message)
            if frame.stream_id == self.stream_id:
                self._frame_received(frame)
        except RelayError as error:
            self._fail(str(error))

    def _frame_received(self, frame: Frame) -> None:
        if frame.kind is Kind.RESET:
            raise RelayError("relay stream reset")  # never its text: anybody can have sent it
        if frame.kind is Kind.HANDSHAKE:
            if self._channel is not None or self.answer.done():
                raise RelayError("unexpected handshake")
            self.answer.set_result(frame.payload)
        elif frame.kind is Kind.DATA:
            if self._channel is None or self._stream is None:
                raise RelayError("relay received data before handshake completion")
            self._stream.messages_received(self._channel.receive(frame))

    def _fail(self, reason: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(ConnectFailed(f"relay handshake failed: {reason}"))
        self._socket.abort(reason)

    def streams_lost(self) -> None:
        if not self.answer.done():
            self.answer.set_exception(ConnectFailed("relay handshake failed: connection ended"))
        if self._stream is not None:
            self._stream.stream_lost()

    # ---- from the stream --------------------------------------------------------------

    def hold(self, *, receiving: bool) -> None:
        self.is_held = not receiving
        self.pong_received()  # whether one comes is not known while nothing is read
        self._socket.hold(receiving=receiving)

    def end_stream(self, stream_id: str) -> None:
        self.send_frame(encode(Frame(stream_id, Kind.RESET, reason=_RESET_REASON)))
        self._socket.close(GOING_AWAY, "")
