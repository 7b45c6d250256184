"""Links to a server: websocket frames, HTTP replies and stdio lines on blocking sockets.

Everything here shows the bytes as they were: opcodes, fragments, close codes, header lines,
and can send what breaks the rules. `wire.Client` puts JSON-RPC on top.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import select
import socket
import ssl
import struct
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_SCALE = float(os.environ.get("EXEC_SERVER_TEST_TIMEOUT_SCALE", "1"))
# Long enough for a busy machine, short enough that a hung test is seen within pytest's limit.
DEFAULT_TIMEOUT = 10.0

TEXT, BINARY, CLOSE, PING, PONG, CONTINUATION = 0x1, 0x2, 0x8, 0x9, 0xA, 0x0


def scaled(seconds: float) -> float:
    """A time limit for this machine: EXEC_SERVER_TEST_TIMEOUT_SCALE stretches them all."""
    return seconds * TIMEOUT_SCALE


def b64(data: bytes | str) -> str:
    """Standard base64 of bytes, or of a text in UTF-8."""
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


class HandshakeRefused(Exception):
    """The upgrade was answered with something else than 101."""

    def __init__(self, reply: HttpReply) -> None:
        super().__init__(f"{reply.status}: {reply.body!r}")
        self.reply = reply
        self.status = reply.status


class Disconnected(Exception):
    """The server ended the connection; `close_code` is None when it sent no close frame."""

    def __init__(self, close_code: int | None = None, reason: str = "") -> None:
        super().__init__(f"close code {close_code} {reason!r}")
        self.close_code = close_code
        self.reason = reason


class NothingArrived(AssertionError):
    """The expected message did not arrive in time."""


@dataclass(frozen=True)
class Frame:
    """One websocket frame as it was on the wire."""

    opcode: int
    payload: bytes
    fin: bool = True
    rsv: int = 0


@dataclass(frozen=True)
class HttpReply:
    """One HTTP response; header names are lower case."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    head: bytes = b""

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name.lower()), None)


class Inbox:
    """Bytes from a descriptor, with deadlines and without ever reading too far."""

    def __init__(self, read: Callable[[], bytes], descriptor: int) -> None:
        self._read = read
        self._descriptor = descriptor
        self._buffer = bytearray()

    def _fill(self, deadline: float) -> None:
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN | select.POLLHUP)
        remaining = max(0.0, deadline - time.monotonic())
        if not poller.poll(remaining * 1000):
            raise NothingArrived("no data within the time limit")
        try:
            data = self._read()
        except (ConnectionError, OSError):
            data = b""
        if not data:
            raise Disconnected
        self._buffer += data

    def exactly(self, count: int, deadline: float) -> bytes:
        while len(self._buffer) < count:
            self._fill(deadline)
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    def peek(self, count: int, deadline: float) -> bytes:
        """The next bytes, left in place: a frame is only taken when it is complete."""
        while len(self._buffer) < count:
            self._fill(deadline)
        return bytes(self._buffer[:count])

    def until(self, mark: bytes, deadline: float) -> bytes:
        start = 0
        while (end := self._buffer.find(mark, start)) < 0:
            start = max(0, len(self._buffer) - len(mark))
            self._fill(deadline)
        return self.exactly(end + len(mark), deadline)


def _parse_head(head: bytes) -> tuple[int, list[tuple[str, str]]]:
    lines = head.decode("latin-1").split("\r\n")
    headers = []
    for line in lines[1:]:
        if line:
            name, _, value = line.partition(":")
            headers.append((name.strip().lower(), value.strip()))
    return int(lines[0].split(" ", 2)[1]), headers


def _read_reply(inbox: Inbox, deadline: float, *, head_only: bool = False) -> HttpReply:
    head = inbox.until(b"\r\n\r\n", deadline)
    status, headers = _parse_head(head)
    lengths = [int(value) for name, value in headers if name == "content-length"]
    body = b""
    if status != 101 and not head_only and lengths:
        body = inbox.exactly(lengths[0], deadline)
    return HttpReply(status, headers, body, head)


def _dial(url: str, timeout: float) -> socket.socket:
    """A connection to any kind of listener; certificates are not checked."""
    if url.startswith("unix:"):
        local = socket.socket(socket.AF_UNIX)
        local.settimeout(scaled(timeout))
        local.connect(url.removeprefix("unix:"))
        return local
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    sock = socket.create_connection((parts.hostname, parts.port), scaled(timeout))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if parts.scheme == "wss":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context.wrap_socket(sock)
    return sock


def http(url: str, request: bytes, timeout: float = DEFAULT_TIMEOUT) -> HttpReply:
    """Sends a raw HTTP request to a server's ws:// address and reads one reply."""
    with _dial(url, timeout) as sock:
        sock.sendall(request)
        inbox = Inbox(lambda: sock.recv(65536), sock.fileno())
        deadline = time.monotonic() + scaled(timeout)
        return _read_reply(inbox, deadline, head_only=request.startswith(b"HEAD "))


def upgrade_request(
    target: str = "/", headers: Sequence[tuple[str, str]] = (), *, host: str = "127.0.0.1"
) -> bytes:
    """A correct websocket upgrade, with further headers."""
    lines = [
        f"GET {target} HTTP/1.1",
        f"Host: {host}",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Key: {b64(os.urandom(16))}",
        *(f"{name}: {value}" for name, value in headers),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8")


def _masked(payload: bytes, key: bytes) -> bytes:
    # One big XOR: a loop over the bytes would take seconds for the largest messages.
    size = len(payload)
    stream = (key * (size // 4 + 1))[:size]
    mixed = int.from_bytes(payload, "little") ^ int.from_bytes(stream, "little")
    return mixed.to_bytes(size, "little")


def try_send(sock: socket.socket, data: bytes) -> bool:
    try:
        sock.sendall(data)
    except OSError:
        return False
    return True


def frame_bytes(
    opcode: int, payload: bytes, *, fin: bool = True, mask: bool = True, rsv: int = 0
) -> bytes:
    """A client frame, or with the right arguments one that breaks the rules."""
    head = bytearray([(0x80 if fin else 0) | (rsv << 4) | opcode])
    bit = 0x80 if mask else 0
    if len(payload) < 126:
        head.append(bit | len(payload))
    elif len(payload) < 65536:
        head += struct.pack("!BH", bit | 126, len(payload))
    else:
        head += struct.pack("!BQ", bit | 127, len(payload))
    if not mask:
        return bytes(head) + payload
    key = b"\x37\xfa\x21\x3d"  # always the same, so that ids of tests with frames are too
    return bytes(head) + key + _masked(payload, key)


class WebSocketLink:
    """One websocket connection; pings are answered while receiving."""

    def __init__(
        self,
        url: str,
        *,
        target: str = "/",
        headers: Sequence[tuple[str, str]] = (),
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        self.sock = _dial(url, timeout)
        self._inbox = Inbox(lambda: self.sock.recv(262144), self.sock.fileno())
        self.frames: deque[Frame] = deque(maxlen=1000)
        self.pongs: list[bytes] = []
        self.close_code: int | None = None
        self.answer_pings = True
        self.takes_binary = False  # of a binary message `receive` returns the JSON text
        request = upgrade_request(target, headers, host=urlsplit(url).netloc or "localhost")
        try:
            self.sock.sendall(request)
            self.handshake = _read_reply(self._inbox, time.monotonic() + scaled(timeout))
            if self.handshake.status != 101:
                raise HandshakeRefused(self.handshake)
            self._check_accept(request)
        except BaseException:
            self.sock.close()
            raise

    def _check_accept(self, request: bytes) -> None:
        key = request.split(b"Sec-WebSocket-Key: ", 1)[1].split(b"\r\n", 1)[0]
        digest = hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
        assert self.handshake.header("sec-websocket-accept") == b64(digest)

    def send_bytes(self, data: bytes) -> None:
        self.sock.sendall(data)

    def send_frame(self, opcode: int, payload: bytes = b"", **rules: Any) -> None:
        self.send_bytes(frame_bytes(opcode, payload, **rules))

    def send_text(self, text: str | bytes) -> None:
        self.send_frame(TEXT, text.encode() if isinstance(text, str) else text)

    def send_binary(self, data: bytes) -> None:
        self.send_frame(BINARY, data)

    def send_fragments(self, parts: Sequence[bytes], *, opcode: int = TEXT) -> None:
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            self.send_frame(opcode if index == 0 else CONTINUATION, part, fin=last)

    def ping(self, payload: bytes = b"", timeout: float = DEFAULT_TIMEOUT) -> None:
        """Sends a ping and waits for its pong; messages must not be under way."""
        self.send_frame(PING, payload)
        deadline = time.monotonic() + scaled(timeout)
        while payload not in self.pongs:
            self._take_control(self.receive_frame(deadline - time.monotonic()))
        self.pongs.remove(payload)

    def receive_frame(self, timeout: float = DEFAULT_TIMEOUT) -> Frame:
        """The next frame of any kind; `timeout` is not scaled again."""
        deadline = time.monotonic() + timeout
        first, second = self._inbox.peek(2, deadline)
        assert not second & 0x80, "the server masked a frame"
        head, length = 2, second & 0x7F
        if length == 126:
            head, length = 4, struct.unpack("!H", self._inbox.peek(4, deadline)[2:])[0]
        elif length == 127:
            head, length = 10, struct.unpack("!Q", self._inbox.peek(10, deadline)[2:])[0]
        payload = self._inbox.exactly(head + length, deadline)[head:]
        frame = Frame(first & 0x0F, payload, bool(first & 0x80), (first >> 4) & 0x7)
        self.frames.append(frame)
        return frame

    def _take_control(self, frame: Frame) -> None:
        if frame.opcode == PING and self.answer_pings:
            with contextlib.suppress(OSError):
                self.send_frame(PONG, frame.payload)
        elif frame.opcode == PONG:
            self.pongs.append(frame.payload)
        elif frame.opcode == CLOSE:
            code = struct.unpack("!H", frame.payload[:2])[0] if frame.payload else 1005
            self.close_code = code
            raise Disconnected(code, frame.payload[2:].decode())

    def receive(self, timeout: float) -> bytes:
        """The next whole message; an unfinished one is dropped when time runs out."""
        deadline = time.monotonic() + timeout
        parts: list[bytes] = []
        is_binary = False
        while True:
            frame = self.receive_frame(deadline - time.monotonic())
            if frame.opcode in (PING, PONG, CLOSE):
                self._take_control(frame)
                continue
            is_binary = is_binary or (self.takes_binary and frame.opcode == BINARY)
            first = BINARY if is_binary else TEXT
            assert frame.opcode == (CONTINUATION if parts else first), frame.opcode
            parts.append(frame.payload)
            if frame.fin:
                message = b"".join(parts)
                return message[4 : 4 + int.from_bytes(message[:4], "big")] if is_binary else message

    def close(self) -> None:
        """Ends the TCP connection without a word, as the newest client does."""
        self.sock.close()

    def close_politely(self, code: int = 1000) -> None:
        self.send_frame(CLOSE, struct.pack("!H", code))

    def abort(self) -> None:
        """Resets the TCP connection."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


class StdioLink:
    """The same over the standard streams of a server that we started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self._stdin = process.stdin
        descriptor = process.stdout.fileno()
        self._inbox = Inbox(lambda: os.read(descriptor, 262144), descriptor)

    def send_bytes(self, data: bytes) -> None:
        self._stdin.write(data)
        self._stdin.flush()

    def send_text(self, text: str | bytes) -> None:
        self.send_bytes((text.encode() if isinstance(text, str) else text) + b"\n")

    def receive(self, timeout: float) -> bytes:
        line = self._inbox.until(b"\n", time.monotonic() + timeout)
        return line[:-1]

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
