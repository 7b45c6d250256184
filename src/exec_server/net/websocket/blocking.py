"""A WebSocket client without an event loop, for commands that must start fast.

It shares the frame codec and the handshake with `client`, and knows neither TLS nor proxies.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence

from exec_server.errors import ConnectFailed, ConnectionLost, ProtocolError
from exec_server.net.http1 import HEAD_BYTES
from exec_server.net.unix_peer import check_server_user
from exec_server.net.websocket.frames import (
    FrameReader,
    Opcode,
    close_answer,
    close_payload,
    masked_frame,
)
from exec_server.net.websocket.upgrade import check_answer, new_key, upgrade_request

# Connecting, the answer to the upgrade, and each write. A caller that gets no answer in this time
# takes the client with an event loop, which has patience.
SECONDS = 1.0
RECEIVE_BYTES = 262_144

_NORMAL = 1000


class BlockingSocket:
    """One WebSocket; every method but `receive` waits for SECONDS at most."""

    def __init__(self, raw: socket.socket) -> None:
        self._raw = raw
        self._frames = FrameReader(from_client=False)
        self._failure: ConnectionLost | None = None  # raised when earlier messages are delivered
        self._control_frames = 0

    @classmethod
    def open_unix(cls, path: str, headers: Sequence[tuple[str, str]]) -> BlockingSocket:
        """Connect to a unix socket of this user or of root; raises ConnectFailed or OSError."""
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            raw.settimeout(SECONDS)
            raw.connect(path)
            check_server_user(raw, path)
        except BaseException:
            raw.close()
            raise
        return cls._upgraded(raw, "localhost", headers)

    @classmethod
    def open_tcp(cls, host: str, port: int, headers: Sequence[tuple[str, str]]) -> BlockingSocket:
        """Connect to the first address that accepts; raises ConnectFailed or OSError."""
        # As bytes: for a text Python would import its codec for international names.
        found = socket.getaddrinfo(host.encode("ascii"), port, type=socket.SOCK_STREAM)
        failure: OSError = OSError(f"{host} has no address")
        for family, kind, protocol, _, address in found:
            raw = socket.socket(family, kind, protocol)
            try:
                raw.settimeout(SECONDS)
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                raw.connect(address)
            except OSError as error:
                failure = error
                raw.close()
            else:
                return cls._upgraded(raw, f"{host}:{port}", headers)
        raise failure

    @classmethod
    def _upgraded(
        cls, raw: socket.socket, authority: str, headers: Sequence[tuple[str, str]]
    ) -> BlockingSocket:
        try:
            key = new_key()
            raw.sendall(upgrade_request("/", authority, key, headers))
            received = b""
            deadline = time.monotonic() + SECONDS
            while b"\r\n\r\n" not in received and len(received) <= HEAD_BYTES:
                raw.settimeout(_remaining(deadline))
                data = raw.recv(RECEIVE_BYTES)
                if not data:
                    raise ConnectFailed("connection ended")
                received += data
            head, _, rest = received.partition(b"\r\n\r\n")
            check_answer(head, key)
            raw.settimeout(SECONDS)
        except BaseException:
            raw.close()
            raise
        opened = cls(raw)
        opened._frames.feed(rest)
        return opened

    def fileno(self) -> int:
        return self._raw.fileno()

    def send(self, message: bytes) -> None:
        """Send a text message; raises ConnectionLost."""
        self._send(Opcode.TEXT, message)

    def ping(self) -> None:
        """Ask for a sign of life; raises ConnectionLost."""
        self._send(Opcode.PING, b"")

    def _send(self, opcode: Opcode, payload: bytes) -> None:
        try:
            self._raw.sendall(masked_frame(opcode, payload, os.urandom(4)))
        except OSError as error:
            raise ConnectionLost(f"cannot send: {error}") from None

    def receive(self) -> list[bytes]:
        """Wait for bytes and return the messages that they complete, perhaps none.

        Raises ConnectionLost after the last message.
        """
        messages = self._take_messages()  # of bytes that came with the answer to the upgrade
        if messages:
            return messages
        if self._failure is not None:
            raise self._failure
        try:
            data = self._raw.recv(RECEIVE_BYTES)
        except OSError as error:
            raise ConnectionLost(f"cannot receive: {error}") from None
        if not data:
            raise ConnectionLost("connection ended without a close frame")
        self._frames.feed(data)
        return self._take_messages()

    def take_useless(self) -> int:
        """How many frames since the last call were no part of a message, or an empty one."""
        count = self._control_frames + self._frames.empty_fragments
        self._control_frames = self._frames.empty_fragments = 0
        return count

    def receive_first(self) -> list[bytes]:
        """Wait for the first messages, for SECONDS at most; raises ConnectionLost.

        Parts of a message and control frames do not prolong the wait.
        """
        deadline = time.monotonic() + SECONDS
        try:
            while not (messages := self.receive()):
                self._raw.settimeout(_remaining(deadline))
        except TimeoutError as error:
            raise ConnectionLost(f"cannot receive: {error}") from None
        self._raw.settimeout(SECONDS)
        return messages

    def _take_messages(self) -> list[bytes]:
        messages: list[bytes] = []
        try:
            while self._failure is None and (event := self._frames.next_event()) is not None:
                if event.opcode is Opcode.TEXT or event.opcode is Opcode.BINARY:
                    messages.append(event.payload)
                elif event.opcode is Opcode.PONG:
                    self._control_frames += 1
                elif event.opcode is Opcode.PING:
                    self._control_frames += 1
                    self._send(Opcode.PONG, event.payload)
                elif event.opcode is Opcode.CLOSE:
                    self._failure = ConnectionLost("closed by the peer")
                    self._send(Opcode.CLOSE, close_answer(event.payload))
        except ProtocolError as error:
            self._failure = ConnectionLost(f"protocol violation: {error}")
        except ConnectionLost as error:
            self._failure = error
        return messages

    def close(self) -> None:
        """Send a close frame, and close the socket without waiting for the peer's."""
        try:
            self._send(Opcode.CLOSE, close_payload(_NORMAL, ""))
        except ConnectionLost:
            pass  # the peer has closed it first
        self._raw.close()


def _remaining(deadline: float) -> float:
    """Seconds until the deadline; raises TimeoutError after it."""
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("timed out")
    return remaining
