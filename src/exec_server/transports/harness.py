"""The client's end of a relay: one socket, one encrypted stream, a MessageStream at last."""

from __future__ import annotations

import asyncio
import logging
import ssl
import uuid
from collections.abc import Callable, Sequence

from exec_server.errors import ConnectFailed, RelayError
from exec_server.relay.channel import Channel
from exec_server.relay.frames import FRAME_BYTES, Frame, Kind, decode, encode
from exec_server.relay.noise import Identity, Initiator, PublicKey, prologue
from exec_server.relay.plain import PlainChannel
from exec_server.rpc.stream import MessageReceiver, MessageStream
from exec_server.transports.client_socket import ClientSocket, connect
from exec_server.transports.frames import MESSAGE_BYTES
from exec_server.transports.relay_socket import RelaySocket
from exec_server.transports.relay_stream import RECEIVING_BYTES, RelayStream
from exec_server.transports.room import Room

log = logging.getLogger(__name__)

GOING_AWAY = 1001
# What a stream's end looks like to the executor; it does not read the text.
_RESET_REASON = "harness_disconnected"


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
        self._stream = RelayStream(self, channel, receiver, Room(RECEIVING_BYTES))
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

    def end_stream(self, stream_id: str) -> None:
        self.send_frame(encode(Frame(stream_id, Kind.RESET, reason=_RESET_REASON)))
        self._socket.close(GOING_AWAY, "")


async def open_relayed(
    url: str,
    receiver: Callable[[MessageStream], MessageReceiver],
    *,
    identity: Identity,
    executor_key: PublicKey,
    environment_id: str,
    registration_id: str,
    authorization: str,
    headers: Sequence[tuple[str, str]] = (),
    tls: ssl.SSLContext | None = None,
) -> RelayStream:
    """Connect to an executor through a rendezvous; raises ConnectFailed, is cancelled safely."""
    link = await _open_link(url, headers, tls, FRAME_BYTES)
    try:
        context = prologue(environment_id, registration_id, link.stream_id)
        initiator = Initiator(identity, executor_key, context)
        link.introduce(initiator.first(authorization.encode()))
        ciphers = initiator.second(await link.answer)
    except RelayError as error:
        link.close(GOING_AWAY, "")
        raise ConnectFailed(f"relay handshake failed: {error}") from None
    except BaseException:
        link.close(GOING_AWAY, "")
        raise
    return link.open(Channel(link.stream_id, ciphers), receiver)


async def open_plain(
    url: str,
    receiver: Callable[[MessageStream], MessageReceiver],
    *,
    headers: Sequence[tuple[str, str]] = (),
    tls: ssl.SSLContext | None = None,
) -> RelayStream:
    """The same for the older form without encryption."""
    link = await _open_link(url, headers, tls, MESSAGE_BYTES)
    link.introduce(None)
    return link.open(PlainChannel(link.stream_id), receiver)


async def _open_link(
    url: str, headers: Sequence[tuple[str, str]], tls: ssl.SSLContext | None, message_bytes: int
) -> HarnessLink:
    made: list[HarnessLink] = []

    def make_link(socket: ClientSocket) -> HarnessLink:
        made.append(HarnessLink(socket, str(uuid.uuid4())))
        return made[0]

    await connect(url, make_link, headers=headers, tls=tls, message_bytes=message_bytes)
    return made[0]
