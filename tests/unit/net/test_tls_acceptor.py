"""TLS handshakes of a listener: established, failed, stalled and too many, on real sockets."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from tests.support.raw_links import DEFAULT_TIMEOUT, scaled
from tests.support.raw_servers import make_certificate

from exec_server.host.event_loop import GuardedTasks
from exec_server.net import admission, tls_acceptor
from exec_server.net.client_tls import tls_context
from exec_server.net.tls_acceptor import ServerCertificate, TlsAcceptor


class _Greeter(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport.get_extra_info("ssl_object"), ssl.SSLObject)
        transport.write(b"hello")  # type: ignore[attr-defined]
        transport.close()


class _Scene:
    """A listening socket with its acceptor."""

    def __init__(self, directory: Path, tasks: asyncio.TaskGroup) -> None:
        roots, _ = make_certificate(directory, "localhost")
        self.trusting = tls_context(roots)
        self.bound = socket.create_server(("127.0.0.1", 0))
        self.port = self.bound.getsockname()[1]
        certificate = ServerCertificate(roots, str(directory / "key.pem"))
        self.acceptor = TlsAcceptor(self.bound, certificate, _Greeter, GuardedTasks(tasks))

    async def greeting(self) -> bytes:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=self.trusting, server_hostname="localhost"
        )
        data = await reader.read()
        writer.close()
        return data

    async def plain(self, data: bytes = b"") -> asyncio.StreamReader:
        """The reader of a connection that begins no handshake; it ends with the loop."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        self.writers.append(writer)
        return reader

    writers: list[asyncio.StreamWriter]


@asynccontextmanager
async def _accepting(directory: Path) -> AsyncIterator[_Scene]:
    async with asyncio.timeout(scaled(DEFAULT_TIMEOUT)), asyncio.TaskGroup() as tasks:
        scene = _Scene(directory, tasks)
        scene.writers = []
        scene.acceptor.open()
        try:
            yield scene
        finally:
            if scene.bound.fileno() >= 0:
                scene.acceptor.close()
            for writer in scene.writers:
                writer.close()


def _run(directory: Path, body: Callable[[_Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        async with _accepting(directory) as scene:
            await body(scene)

    uvloop.run(main())


async def _ended(reader: asyncio.StreamReader) -> bool:
    try:
        await reader.read()
    except ConnectionError:
        pass
    return True


async def _until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_established_connections_get_their_protocol(tmp_path: Path) -> None:
    async def body(scene: _Scene) -> None:
        assert await asyncio.wait_for(scene.greeting(), scaled(DEFAULT_TIMEOUT)) == b"hello"
        await _until(lambda: not scene.acceptor._handshakes)

    _run(tmp_path, body)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\0\5garbage", b"\0" * 9])
def test_other_protocols_are_cut_off(
    tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def body(scene: _Scene) -> None:
        assert await _ended(await scene.plain(data))
        assert await scene.greeting() == b"hello"

    _run(tmp_path, body)
    assert "TLS handshake failed: " in caplog.text


def test_a_stalled_handshake_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(tls_acceptor, "HANDSHAKE_SECONDS", 0.01)

    async def body(scene: _Scene) -> None:
        assert await _ended(await scene.plain())

    _run(tmp_path, body)
    assert "taking longer than" in caplog.text


def test_stalled_handshakes_do_not_keep_others_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_HANDSHAKES", 2)

    async def body(scene: _Scene) -> None:
        readers = [await scene.plain() for _ in range(4)]
        assert await _ended(readers[0])
        assert await _ended(readers[1])
        assert len(scene.acceptor._handshakes) == 2
        assert await scene.greeting() == b"hello"
        assert await _ended(readers[2])
        assert not readers[3].at_eof()

    _run(tmp_path, body)


def test_accepting_pauses_while_no_descriptor_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls_acceptor, "ACCEPT_RETRY_SECONDS", 0.01)

    class _Exhausted:
        """The listening socket of a process without free descriptors, once."""

        def __init__(self, real: socket.socket) -> None:
            self.real = real
            self.failures = [OSError(errno.EMFILE, "Too many open files")]

        def accept(self) -> tuple[socket.socket, Any]:
            if self.failures:
                raise self.failures.pop()
            return self.real.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

    async def body(scene: _Scene) -> None:
        scene.acceptor._socket = _Exhausted(scene.bound)  # type: ignore[assignment]
        assert await scene.greeting() == b"hello"

    _run(tmp_path, body)
    assert "cannot accept connections: Too many open files" in caplog.text


def test_closing_aborts_handshakes_and_a_pending_retry(tmp_path: Path) -> None:
    async def body(scene: _Scene) -> None:
        reader = await scene.plain()
        await _until(lambda: scene.acceptor._handshakes)
        scene.acceptor._retry = asyncio.get_running_loop().call_later(0.01, pytest.fail)
        scene.acceptor.close()
        assert await _ended(reader)
        await _until(lambda: not scene.acceptor._handshakes)

    _run(tmp_path, body)


def test_a_defect_in_one_connection_does_not_end_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(scene: _Scene) -> None:
        def fail() -> asyncio.Protocol:
            scene.acceptor._make_protocol = _Greeter
            raise RuntimeError("a defect")

        scene.acceptor._make_protocol = fail
        assert await _ended(await scene.plain())
        assert await scene.greeting() == b"hello"

    _run(tmp_path, body)
    assert "a defect" in caplog.text
