"""Clients that connect through a relay: the same workloads with one more hop and encryption.

Both executors register with the same service and are reached through it by the same client, so
the cost of the relay and the client is in the figures of both.
"""

import http.client
import itertools
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from bench.client import SOCKET_SECONDS, BenchError, HangError, frame
from bench.servers import Server, stop
from exec_server.relay.frames import Frame, Kind, decode, encode
from exec_server.relay.noise import SUITE, Identity, Initiator, PublicKey, prologue
from exec_server.relay.records import RelayChannel

# Until an executor has registered and is connected.
_START_SECONDS = 20.0
_RECEIVE_BYTES = 1 << 20
_BINARY = 2
_CLOSE, _PING = 8, 9


@dataclass
class Service:
    """A registry and rendezvous in a process of its own."""

    process: subprocess.Popen[bytes]
    url: str
    token: str
    executor_token: str

    def ask(self, environment: str, action: str, body: dict[str, Any]) -> dict[str, Any]:
        """Makes one request of a harness to the registry."""
        where = urlsplit(self.url)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, SOCKET_SECONDS)
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        try:
            path = f"/cloud/environment/{environment}/{action}"
            connection.request("POST", path, json.dumps(body), headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise BenchError(f"the registry answers {answer.status}: {content[:200]!r}")
        found: dict[str, Any] = json.loads(content)
        return found


@contextmanager
def service() -> Iterator[Service]:
    """Runs a registry of ours, with limits that no workload reaches."""
    command = [sys.executable, "-m", "exec_server", "registry"]
    listen = ("--listen", "127.0.0.1:0")
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [*command, "--data", folder, *listen, "--print-json", "--log-level", "error"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise BenchError("the registry did not start")
            facts = json.loads(line)
            limits = ["--bytes-per-second", str(10**10), "--handshakes-per-second", "10000"]
            limit = [*command, "tenant", "limit", "default", "--data", folder, *limits]
            subprocess.run(limit, check=True, stdout=subprocess.DEVNULL)
            yield Service(process, facts["url"], facts["client_token"], facts["executor_token"])
        finally:
            stop(process)


@dataclass
class Executor:
    """An executor that waits for clients at a service."""

    server: Server
    process: subprocess.Popen[bytes]
    service: Service
    identity: Identity

    def connect(self, capacity: int = 0) -> "Relayed":
        """Opens an initialized connection through the relay."""
        return Relayed(self)

    def prepare(self) -> None:
        """Generates the keys that a client can generate before it connects."""
        _EPHEMERALS.extend(Identity.generate() for _ in range(64 - len(_EPHEMERALS)))


# Keys of future clients, generated beforehand so that this is not measured.
_EPHEMERALS: deque[Identity] = deque()


@contextmanager
def executor(server: Server, folder: str, relay: Service) -> Iterator[Executor]:
    """Starts a server in remote mode and waits until it can be reached."""
    listen = server.command.index("--listen")
    command = server.command[:listen] + server.command[listen + 2 :]
    with open(os.path.join(folder, f"{server.label}-remote.stderr"), "wb") as log:
        process = subprocess.Popen(
            [*command, "--remote", relay.url, "--environment-id", server.label],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            cwd=folder,
            env={**os.environ, **server.environment, "CODEX_API_KEY": relay.executor_token},
            start_new_session=True,
        )
    try:
        waiting = Executor(server, process, relay, Identity.generate())
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                waiting.connect().close()
                break
            except (BenchError, OSError):
                if time.monotonic() > deadline or process.poll() is not None:
                    raise
                time.sleep(0.02)
        yield waiting
    finally:
        stop(process)


class Relayed:
    """One initialized connection through the relay; like bench.client.Connection."""

    def __init__(self, executor: Executor) -> None:
        environment = executor.server.label
        bundle = executor.service.ask(
            environment, "connect", {"harness_public_key": _written(executor.identity.public)}
        )
        self._ids = itertools.count(1)
        self._stream_id = str(uuid.uuid4())
        self._messages: deque[bytes] = deque()
        self._buffer = bytearray()
        self.received = 0
        self.deadline = time.monotonic() + SOCKET_SECONDS
        self.socket = _dial(bundle["url"])
        try:
            self._channel = self._shake_hands(executor.identity, environment, bundle)
            self.call("initialize", {"clientName": "bench"})
            self.send(json.dumps({"method": "initialized", "params": {}}).encode())
        except BaseException:
            self.socket.close()
            raise

    def _shake_hands(self, own: Identity, environment: str, bundle: dict[str, Any]) -> RelayChannel:
        key = bundle["executor_public_key"]
        peer = PublicKey(b64decode(key["x25519_public_key"]), b64decode(key["mlkem768_public_key"]))
        context = prologue(environment, bundle["executor_registration_id"], self._stream_id)
        ephemeral = _EPHEMERALS.popleft() if _EPHEMERALS else None
        initiator = Initiator(own, peer, context, ephemeral=ephemeral)
        first = initiator.write_first(bundle["harness_key_authorization"].encode())
        self._send_frame(encode(Frame(self._stream_id, Kind.RESUME)))
        self._send_frame(encode(Frame(self._stream_id, Kind.HANDSHAKE, first)))
        answer = self._next_frame()
        if answer.kind is not Kind.HANDSHAKE:
            raise BenchError("the executor refuses the handshake")
        return RelayChannel(self._stream_id, initiator.read_second(answer.payload))

    def close(self) -> None:
        """Sends a close frame and closes the socket."""
        try:
            self.socket.sendall(frame(b"\x03\xe8", _CLOSE))
        except OSError:
            pass  # The relay has closed the connection already.
        self.socket.close()

    def prepare(self, method: str, params: dict[str, Any]) -> tuple[bytes, bytes]:
        """Encodes a request and returns it with the first bytes of its answer."""
        number = next(self._ids)
        request = {"id": number, "method": method, "params": params}
        return json.dumps(request, separators=(",", ":")).encode(), b'{"id":%d,' % number

    def exchange(self, request: bytes, prefix: bytes) -> int:
        """Sends a request and returns the length of the message that answers it."""
        self.send(request)
        return self.wait_for(prefix)

    def call(self, method: str, params: dict[str, Any]) -> int:
        """Makes one request that is not measured."""
        return self.exchange(*self.prepare(method, params))

    def send(self, message: bytes) -> None:
        """Encrypts and sends one message."""
        for piece in self._channel.records(message):
            self._send_frame(self._channel.seal(piece))

    def wait_for(self, prefix: bytes) -> int:
        """Reads messages until one starts with the prefix, and returns its length."""
        wanted = (prefix, b'{"error"')
        while True:
            while self._messages:
                message = self._messages.popleft()
                self.received += len(message)
                if message.startswith(wanted):
                    if message.startswith(b'{"error"'):
                        raise BenchError(message[:500].decode())
                    return len(message)
            answer = self._next_frame()
            if answer.kind is Kind.RESET:
                raise BenchError("the executor has reset the stream")
            self._messages.extend(self._channel.receive(answer))

    def _send_frame(self, data: bytes) -> None:
        self.socket.sendall(frame(data, _BINARY))

    def _next_frame(self) -> Frame:
        """The next relay frame; pings are answered on the way."""
        while True:
            found = self._take()
            if found is None:
                self._refill()
                continue
            opcode, payload = found
            if opcode == _BINARY:
                return decode(payload)
            if opcode == _PING:
                self.socket.sendall(frame(payload, 10))
            elif opcode == _CLOSE:
                raise BenchError(f"the relay closed the connection: {payload!r}")

    def _take(self) -> tuple[int, bytes] | None:
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        length = buffer[1]
        start = {126: 4, 127: 10}.get(length, 2)
        if start > 2:
            length = int.from_bytes(buffer[2:start], "big")
        if len(buffer) < start + length:
            return None
        found = buffer[0] & 15, bytes(memoryview(buffer)[start : start + length])
        del buffer[: start + length]
        return found

    def _refill(self) -> None:
        if time.monotonic() > self.deadline:
            raise HangError("takes longer than the time limit")
        try:
            data = self.socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            raise HangError(f"silent for {SOCKET_SECONDS:.0f} s") from None
        if not data:
            raise BenchError("the relay closed the connection")
        self._buffer += data


def _written(key: PublicKey) -> dict[str, str]:
    return {
        "suite": SUITE,
        "x25519_public_key": b64encode(key.x25519).decode(),
        "mlkem768_public_key": b64encode(key.mlkem768).decode(),
    }


def _dial(url: str) -> socket.socket:
    """Opens a WebSocket to the relay."""
    where = urlsplit(url)
    opened = socket.create_connection((where.hostname, where.port), SOCKET_SECONDS)
    try:
        opened.settimeout(None)
        limit = struct.pack("ll", int(SOCKET_SECONDS), 0)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.sendall(
            f"GET {where.path}?{where.query} HTTP/1.1\r\nHost: {where.netloc}\r\n"
            "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
        )
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            byte = opened.recv(1)  # the byte after the head belongs to the relay's first frame
            if not byte:
                break
            head += byte
        if not head.startswith(b"HTTP/1.1 101"):
            raise BenchError(f"upgrade refused: {head[:200]!r}")
    except BaseException:
        opened.close()
        raise
    return opened
