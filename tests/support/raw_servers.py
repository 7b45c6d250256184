"""Raw and hostile servers on loopback for outgoing connections; they can break every rule."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import hashlib
import ipaddress
import json
import os
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from exec_server.net.websocket.frames import Event, FrameReader, Opcode
from tests.support.raw_links import DEFAULT_TIMEOUT, b64, frame_bytes, scaled


class Peer:
    """The server's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._frames = FrameReader()

    async def read_head(self) -> list[str]:
        """The lines of a request head."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        return head.decode("latin-1").split("\r\n")[:-2]

    async def upgrade(self, following: bytes = b"") -> list[str]:
        """Answer an upgrade as it should be, with bytes right behind the answer."""
        lines = await self.read_head()
        self.writer.write(upgrade_answer(lines) + following)
        return lines

    def send(self, opcode: int, payload: bytes = b"", *, fin: bool = True) -> None:
        self.writer.write(frame_bytes(opcode, payload, fin=fin, mask=False))

    async def receive(self) -> Event | None:
        """The next message or control frame of the client; None at the end."""
        while (event := self._frames.next_event()) is None:
            data = await self.reader.read(65_536)
            if not data:
                return None
            self._frames.feed(data)
        return event

    async def answer_close(self) -> Event | None:
        """Read on until the client closes, answer that, and return its close frame."""
        while (event := await self.receive()) is not None:
            if event.opcode is Opcode.CLOSE:
                self.send(Opcode.CLOSE, event.payload[:2])
                return event
        return None

    def reset(self) -> None:
        """End the connection so that the client gets an error."""
        self.writer.transport.abort()


def upgrade_answer(request: list[str], **replaced: str) -> bytes:
    """The 101 answer to a request head; an empty text leaves a header out, a new name adds one."""
    key = next(line.split(": ")[1] for line in request if line.startswith("Sec-WebSocket-Key"))
    digest = hashlib.sha1(key.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
    headers = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec_websocket_accept": b64(digest),
    } | replaced
    lines = ["HTTP/1.1 101 Switching Protocols"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items() if value]
    return "\r\n".join([*lines, "", ""]).encode()


@contextlib.asynccontextmanager
async def serving(
    handler: Callable[[Peer], Awaitable[object]], *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """A server's port. Handlers must end by themselves, and their exceptions are raised here."""
    failures: list[Exception] = []
    running: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            await handler(Peer(reader, writer))
        except Exception as error:
            failures.append(error)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
        if running:
            _, hung = await asyncio.wait(running, timeout=scaled(DEFAULT_TIMEOUT))
            assert not hung, "a handler does not end"
    finally:
        server.close()
        for task in running:
            task.cancel()
    if failures:
        raise failures[0]


def open_sockets() -> int:
    """How many sockets this process has; an event loop opens other descriptors as it likes."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists this directory
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count


def make_certificate(directory: Path, *names: str) -> tuple[str, ssl.SSLContext]:
    """A throw-away root that is its own server: its file, and a context to serve with."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "throw-away")])
    now = datetime.datetime.now(datetime.UTC)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([_name(name) for name in names]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .add_extension(identifier, False)
        .sign(key, hashes.SHA256())
    )
    roots, private = directory / "roots.pem", directory / "key.pem"
    roots.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(roots, private)
    return str(roots), context


def _name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


# A server on loopback that completes the handshake and then answers as the test decides.
# It runs in a thread, so that clients may be subprocesses, blocking calls or tasks of another loop.


SESSION: Final = "11111111-2222-4333-8444-555555555555"
ENVIRONMENT: Final[dict[str, Any]] = {
    "shell": {"name": "sh", "path": "/bin/sh"},
    "cwd": "file:///home",
    "capabilities": {
        "processCloseStdin": True,
        "processReadLoss": True,
        "processSignals": True,
        "fileWriteStreaming": True,
    },
}

Message = dict[str, Any]
# A result, a Refusal, or a Reply with any messages.
Answer = Any


class Refusal:
    """An error instead of a result."""

    def __init__(self, message: str, code: int = -32603) -> None:
        self.error = {"code": code, "message": message}


class Reply:
    """Messages to send as they are instead of an answer; bytes need not be JSON."""

    def __init__(self, *messages: object) -> None:
        self.messages = messages


class Frame:
    """A frame to send as it is, perhaps a part of a message or a control frame."""

    def __init__(self, opcode: Opcode, payload: bytes = b"", *, fin: bool = True) -> None:
        self.opcode, self.payload, self.fin = opcode, payload, fin


class Flood:
    """Messages without end, as fast as the client reads them; the connection then ends."""

    def __init__(self, first: object, make: Callable[[int], object], limit: int) -> None:
        self.first, self.make, self.limit = first, make, limit


def notice(method: str, **params: object) -> Message:
    return {"method": method, "params": params}


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def command_output(stdout: bytes, code: int = 0, stderr: bytes = b"") -> Callable[[Message], Reply]:
    """An answer to process/start: the command prints this and exits."""

    def answer(request: Message) -> Reply:
        of = request["params"]["processId"]
        messages: list[Message] = [
            {"id": request["id"], "result": {"processId": of, "sandboxType": "none"}}
        ]
        seq = 0
        for stream, data in (("stdout", stdout), ("stderr", stderr)):
            for at in range(0, len(data), 65_536):
                seq += 1
                chunk = encoded(data[at : at + 65_536])
                said = notice("process/output", processId=of, seq=seq, stream=stream, chunk=chunk)
                messages.append(said)
        messages.append(
            notice("process/exited", processId=of, seq=seq + 1, exitCode=code, sandboxDenied=False)
        )
        messages.append(notice("process/closed", processId=of, seq=seq + 2))
        return Reply(*messages)

    return answer


class HostileServer:
    """`answers` has a value, or a function of the request, for each method."""

    def __init__(self, url: str, answers: dict[str, Answer]) -> None:
        self.url = url
        self.answers: dict[str, Answer] = {
            "initialize": {"sessionId": SESSION, "environmentInfo": ENVIRONMENT},
            "environment/status": {"status": "ready"},
            "process/terminate": {"running": False},
            "fs/close": {},
        } | answers
        self.requests: list[Message] = []

    async def serve(self, peer: Peer) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await peer.upgrade()
            while (event := await peer.receive()) is not None:
                if event.opcode is Opcode.CLOSE:
                    peer.send(Opcode.CLOSE, event.payload[:2])
                    return
                if event.opcode in (Opcode.TEXT, Opcode.BINARY):
                    async for said in self._replies(json.loads(event.payload)):
                        if isinstance(said, Frame):
                            peer.send(said.opcode, said.payload, fin=said.fin)
                        else:
                            text = said if isinstance(said, bytes) else json.dumps(said).encode()
                            peer.send(Opcode.TEXT, text)
                        await peer.writer.drain()

    async def _replies(self, message: Message) -> AsyncIterator[object]:
        if "id" not in message or "method" not in message:
            return
        self.requests.append(message)
        answer = self.answers.get(message["method"], Refusal("it is not supported", -32601))
        if callable(answer):
            answer = answer(message)
        if isinstance(answer, Flood):
            yield answer.first
            for number in range(answer.limit):
                yield answer.make(number)
            raise ConnectionError
        if isinstance(answer, Reply):
            for said in answer.messages:
                yield said
        elif isinstance(answer, Refusal):
            yield {"id": message["id"], "error": answer.error}
        else:
            yield {"id": message["id"], "result": answer}


@contextlib.contextmanager
def hostile_server(**answers: Answer) -> Iterator[HostileServer]:
    """A server with these answers; in names of methods `_` stands for the slash."""
    server = HostileServer("", {name.replace("_", "/"): each for name, each in answers.items()})
    listening = threading.Event()
    stop: list[Callable[[], object]] = []

    async def main() -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(ended.set))
        async with serving(server.serve) as port:
            server.url = f"ws://127.0.0.1:{port}"
            listening.set()
            await ended.wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),), name="hostile server")
    thread.start()
    try:
        assert listening.wait(scaled(DEFAULT_TIMEOUT))
        yield server
    finally:
        stop[0]()
        thread.join()
