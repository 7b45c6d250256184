"""RawClient: JSON-RPC over a plain WebSocket, which stalls, cuts and lies as scenarios ask.

The client library hides lost connections and reads as fast as it can; scenarios that are about
these need a client without manners.
"""

import asyncio
import base64
import itertools
import json
import socket
import struct
from typing import Any, Self

from bench.client import frame, message

from soak.world import Violation, World

Message = dict[str, Any]

# Bytes that wait in this process while a client does not read; the rest waits in the sockets.
_UNREAD_BYTES = 65_536
_LARGEST_FRAME = 80 * 1024 * 1024
_CLOSE, _PING, _PONG = 8, 9, 10


class Refused(Exception):
    """The server answered a request with an error."""

    def __init__(self, error: Message) -> None:
        super().__init__(f"{error['code']}: {error['message']}")
        self.code: int = error["code"]
        self.message: str = error["message"]


class RawClient:
    """One connection; notifications are kept in the order of their arrival."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count(1)
        self.session_id = ""
        self.notifications: list[Message] = []

    @classmethod
    async def open(cls, world: World, resume: str | None = None) -> Self:
        """Connect and initialize, perhaps with a session that another connection has left."""
        client = await cls.connect(world)
        try:
            params = {"clientName": "soak", "resumeSessionId": resume}
            client.session_id = (await client.call("initialize", params))["sessionId"]
            client.send({"method": "initialized", "params": {}})
        except BaseException:
            client.abort()
            raise
        return client

    @classmethod
    async def connect(cls, world: World) -> Self:
        """Upgrade a connection without initializing it."""
        reader, writer = await asyncio.open_connection(world.host, world.port, limit=_UNREAD_BYTES)
        world.tally["connections"] += 1
        client = cls(reader, writer)
        client.send_bytes(
            f"GET / HTTP/1.1\r\nHost: {world.host}:{world.port}\r\nUpgrade: websocket\r\n"
            "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
        )
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 101"):
            client.abort()
            raise Violation(f"upgrade refused: {head[:100]!r}")
        return client

    def send_bytes(self, data: bytes) -> None:
        """Send anything."""
        self._writer.write(data)

    def send(self, content: Message) -> None:
        """Send one message."""
        self.send_bytes(message(content))

    def request(self, method: str, params: Message) -> int:
        """Send a request and return its id."""
        number = next(self._ids)
        self.send({"id": number, "method": method, "params": params})
        return number

    async def call(self, method: str, params: Message) -> Any:
        """Send a request and wait for its result; raises Refused."""
        return await self.answer(self.request(method, params))

    async def answer(self, number: int) -> Any:
        """Wait for the result of a request; raises Refused."""
        while True:
            found = await self.receive()
            if "method" in found:
                self.notifications.append(found)
            elif found.get("id") == number:
                if "error" in found:
                    raise Refused(found["error"])
                return found["result"]

    async def notification(self, method: str, **members: Any) -> Message:
        """The params of the next notification of this kind with these members."""
        while True:
            for index, found in enumerate(self.notifications):
                params: Message = found["params"]
                if found["method"] == method and members.items() <= params.items():
                    del self.notifications[index]
                    return params
            found = await self.receive()
            if "method" in found:
                self.notifications.append(found)

    async def receive(self) -> Message:
        """The next message; pings are answered on the way."""
        parts = []
        while True:
            first, second = await self._reader.readexactly(2)
            size = second & 0x7F
            if size >= 126:
                size = int.from_bytes(await self._reader.readexactly(2 if size == 126 else 8))
            if size > _LARGEST_FRAME:
                raise Violation(f"a frame of {size} bytes")
            payload = await self._reader.readexactly(size)
            opcode = first & 15
            if opcode == _PING:
                self.send_bytes(frame(payload, _PONG))
            elif opcode == _CLOSE:
                raise ConnectionResetError(f"closed by the server: {payload!r}")
            elif opcode < _CLOSE:
                parts.append(payload)
                if first & 0x80:
                    found: Message = json.loads(b"".join(parts))
                    return found

    def abort(self) -> None:
        """Reset the connection without a close frame, as a killed client's kernel does."""
        opened: socket.socket | None = self._writer.get_extra_info("socket")
        if opened is not None and opened.fileno() >= 0:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def close(self) -> None:
        """Leave politely."""
        self.send_bytes(frame(b"\x03\xe8", _CLOSE))
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            pass  # the server was faster


def start_params(process_id: str, argv: list[str], cwd: str, **more: Any) -> Message:
    """The params of process/start, with the whole environment of the server."""
    policy = {
        "inherit": "all",
        "ignoreDefaultExcludes": True,
        "exclude": [],
        "set": {},
        "includeOnly": [],
    }
    params = {
        "processId": process_id,
        "argv": argv,
        "cwd": cwd,
        "env": {},
        "envPolicy": policy,
        "tty": False,
    }
    return params | more


def decoded(text: str) -> bytes:
    """The bytes of a base64 member."""
    return base64.b64decode(text, validate=True)
