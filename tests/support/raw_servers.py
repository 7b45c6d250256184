"""Raw servers on loopback for outgoing connections; they can break every rule."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import ipaddress
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

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
