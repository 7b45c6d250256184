"""The client's end of a relay: frames that bring nothing are reported to the receiver."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from exec_server.net.relay_client import ClientRelayLink
from exec_server.net.stream import MessageStream
from exec_server.net.websocket.client import ClientSocket
from exec_server.relay.frames import Frame, Kind, encode
from exec_server.relay.records import PlainChannel

STREAM = "stream"


class _Socket:
    """A socket that takes everything."""

    def __init__(self) -> None:
        self.on_useless: Any = None

    def send(self, message: bytes, *, is_text: bool) -> None: ...

    def unsent(self) -> int:
        return 0

    def abort(self, why: str) -> None: ...


class _Receiver:
    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.useless = 0

    def message_received(self, message: bytes) -> None:
        self.messages.append(message)

    def useless_received(self) -> None:
        self.useless += 1

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def connection_lost(self) -> None: ...


def test_frames_without_content_are_useless() -> None:
    async def scenario() -> None:
        receiver = _Receiver()
        link = ClientRelayLink(cast(ClientSocket, _Socket()), STREAM)

        def make_receiver(stream: MessageStream) -> _Receiver:
            return receiver

        link.open(PlainChannel(STREAM), make_receiver)
        for frame in (Frame("another", Kind.DATA, b"x" * 99), Frame(STREAM, Kind.HEARTBEAT)):
            link.message_received(encode(frame), is_text=False)
        assert receiver.useless == 2
        message = b'{"method":"a/notification"}'
        link.message_received(encode(Frame(STREAM, Kind.DATA, message)), is_text=False)
        assert receiver.useless == 2
        assert receiver.messages == [message]
        link.socket_lost("the end")

    asyncio.run(scenario())
