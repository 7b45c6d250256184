"""A WebSocket client with as little overhead as possible, so that the server is measured.

Blocking sockets, requests encoded beforehand (with the legal mask key zero, the masked payload
is the payload), one receive buffer, no JSON decoding: messages are told apart by their first bytes.
"""

import itertools
import json
import os
import socket
import struct
import time
from typing import Any

# Small enough to stay in a core's cache, large enough that a fast stream needs few system calls.
# A frame that does not fit is read through the buffer and dropped, so this bounds all memory.
RECEIVE_BYTES = 256 * 1024

# How long one receive or send may wait before the server counts as hanging.
SOCKET_SECONDS = 10.0

# Enough of a message to identify it; longer than any prefix passed to `wait_for`.
_PREFIX_BYTES = 200

_ERROR = b'{"error"'
_WHOLE_TEXT = 0x81
_CLOSE, _PING = 8, 9


class BenchError(Exception):
    """A server answered with an error, ended or could not be started."""


class HangError(BenchError):
    """A server did not answer in time."""


def frame(payload: bytes, opcode: int = 1) -> bytes:
    """Encodes one whole client frame."""
    length = len(payload)
    if length < 126:
        head = struct.pack("!BB", 0x80 | opcode, 0x80 | length)
    elif length < 65536:
        head = struct.pack("!BBH", 0x80 | opcode, 0xFE, length)
    else:
        head = struct.pack("!BBQ", 0x80 | opcode, 0xFF, length)
    return head + bytes(4) + payload


def message(content: dict[str, Any]) -> bytes:
    """Encodes one JSON message as a frame."""
    return frame(json.dumps(content, separators=(",", ":")).encode())


class Connection:
    """One initialized connection; the caller closes it."""

    def __init__(self, host: str, port: int, capacity: int = RECEIVE_BYTES) -> None:
        self._capacity = capacity
        self._buffer = bytearray(capacity)
        self._view = memoryview(self._buffer)
        self._position = self._end = 0
        self._matched = False
        self._length = 0
        self._ids = itertools.count(1)
        self.received = 0
        self.deadline = time.monotonic() + SOCKET_SECONDS
        self.socket = socket.create_connection((host, port), SOCKET_SECONDS)
        # A Python timeout polls before each receive; the kernel's own costs nothing.
        self.socket.settimeout(None)
        limit = struct.pack("ll", int(SOCKET_SECONDS), 0)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self._upgrade(host, port)
            self._initialize()
        except BaseException:
            self.socket.close()
            raise

    def _upgrade(self, host: str, port: int) -> None:
        self.socket.sendall(
            f"GET / HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\n"
            "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
        )
        while (end := self._buffer.find(b"\r\n\r\n", 0, self._end)) < 0:
            self._refill()
        if not self._buffer.startswith(b"HTTP/1.1 101"):
            raise BenchError(f"upgrade refused: {bytes(self._buffer[:end])!r}")
        self._position = end + 4

    def _initialize(self) -> None:
        self.call("initialize", {"clientName": "bench"})
        self.socket.sendall(message({"method": "initialized", "params": {}}))

    def version(self) -> str:
        """Asks the server for its version."""
        length = self.call("environment/info", {})
        # The answer still lies in the buffer, just before the position.
        answer = bytes(self._buffer[self._position - length : self._position])
        return answer.partition(b'"executorVersion":"')[2].partition(b'"')[0].decode() or "?"

    def close(self) -> None:
        """Sends a close frame and closes the socket."""
        try:
            self.socket.sendall(frame(b"\x03\xe8", _CLOSE))
        except OSError:
            pass  # The server has closed the connection already.
        self.socket.close()

    def prepare(self, method: str, params: dict[str, Any]) -> tuple[bytes, bytes]:
        """Encodes a request and returns it with the first bytes of its answer."""
        number = next(self._ids)
        request = message({"id": number, "method": method, "params": params})
        return request, b'{"id":%d,' % number

    def exchange(self, request: bytes, prefix: bytes) -> int:
        """Sends an encoded request and returns the length of the message that answers it."""
        self.socket.sendall(request)
        return self.wait_for(prefix)

    def call(self, method: str, params: dict[str, Any]) -> int:
        """Makes one request that is not measured."""
        return self.exchange(*self.prepare(method, params))

    def send(self, data: bytes) -> None:
        """Sends encoded frames; raises HangError if the server accepts none in time."""
        try:
            self.socket.sendall(data)
        except BlockingIOError:
            raise HangError(f"accepts no data for {SOCKET_SECONDS:.0f} s") from None

    def wait_for(self, prefix: bytes) -> int:
        """Reads messages until one starts with the prefix, and returns its length.

        An error answer of the server, whatever its id, is raised.
        """
        wanted = (prefix, _ERROR)
        buffer = self._buffer
        while True:
            position, end = self._position, self._end
            # The usual case: whole text messages below 64 KiB, complete in the buffer.
            while end - position > 4:
                length = buffer[position + 1]
                if length < 126:
                    body = position + 2
                elif length == 126:
                    body = position + 4
                    length = buffer[position + 2] << 8 | buffer[position + 3]
                else:
                    break
                following = body + length
                if following > end or buffer[position] != _WHOLE_TEXT:
                    break
                position = following
                if buffer.startswith(wanted, body):
                    self._position = position
                    self._check(body, following)
                    return length
            self._position = position
            if self._take_unusual(wanted):
                return self._length

    def _take_unusual(self, wanted: tuple[bytes, bytes]) -> bool:
        """Handles a frame that is large, fragmented, incomplete or a control frame.

        Returns whether the frame ended a message with one of the prefixes.
        """
        header = self._header()
        if header is None:
            self._refill()
            return False
        first, body, length = header
        available = self._end - body
        fits = length <= self._capacity - 16
        if available < length and (fits or available < _PREFIX_BYTES):
            self._refill()
            return False
        opcode = first & 15
        if opcode >= _CLOSE:
            self._control(opcode, bytes(self._buffer[body : body + length]))
        elif opcode:
            self._matched = self._buffer.startswith(wanted, body)
            self._length = length
            if self._matched:
                self._check(body, min(body + length, self._end))
        else:
            self._length += length
        self._drop(body, length)
        return bool(opcode < _CLOSE and first & 0x80 and self._matched)

    def _header(self) -> tuple[int, int, int] | None:
        """Reads the frame header at the position: first byte, start of the body, its length."""
        buffer, position, available = self._buffer, self._position, self._end - self._position
        if available < 2:
            return None
        length = buffer[position + 1]
        size = {126: 4, 127: 10}.get(length, 2)
        if available < size:
            return None
        if size > 2:
            length = int.from_bytes(buffer[position + 2 : position + size], "big")
        return buffer[position], position + size, length

    def _check(self, start: int, end: int) -> None:
        if self._buffer.startswith(_ERROR, start):
            raise BenchError(bytes(self._buffer[start : min(end, start + 500)]).decode())

    def _control(self, opcode: int, payload: bytes) -> None:
        if opcode == _PING:
            self.socket.sendall(frame(payload, 10))
        elif opcode == _CLOSE:
            raise BenchError(f"server closed the connection: {payload!r}")

    def _drop(self, body: int, length: int) -> None:
        """Moves past a frame, reading the rest of it if it is longer than the buffer."""
        missing = body + length - self._end
        if missing <= 0:
            self._position = body + length
            return
        while missing > 0:
            # With MSG_TRUNC the kernel throws the bytes away without copying them.
            space = self._view[: min(missing, self._capacity)]
            missing -= self._receive(space, socket.MSG_TRUNC)
        self._position = self._end = 0

    def _refill(self) -> None:
        left = self._end - self._position
        if self._position and left:
            self._view[:left] = self._view[self._position : self._end]
        self._position = 0
        self._end = left + self._receive(self._view[left:])

    def _receive(self, space: memoryview, flags: int = 0) -> int:
        if time.monotonic() > self.deadline:
            raise HangError("takes longer than the time limit")
        try:
            count = self.socket.recv_into(space, 0, flags)
        except BlockingIOError:
            raise HangError(f"silent for {SOCKET_SECONDS:.0f} s") from None
        if not count:
            raise BenchError("server closed the connection")
        self.received += count
        return count


def uri(path: str) -> str:
    """Writes a native path as the file: URI that every server understands."""
    return "file://" + os.path.abspath(path)
