"""Dialling: URLs, proxies by environment, roots of trust, and connections on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from tests.support.raw_links import DEFAULT_TIMEOUT, scaled
from tests.support.raw_servers import Peer, make_certificate, open_sockets, serving

from exec_server.errors import CertificateRejected, ConnectFailed
from exec_server.net import dial
from exec_server.net.client_tls import client_context, normalise_pin, tls_context
from exec_server.net.dial import Proxy, open_connection, proxy_for
from exec_server.protocol.urls import Url, parse_url

_ALL = frozenset({"http", "https", "ws", "wss", "unix"})
_PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in _PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    tls_context.cache_clear()
    yield
    tls_context.cache_clear()


def _url(text: str) -> Url:
    return parse_url(text, _ALL)


# ---- proxies --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "environ", "expected"),
    [
        ("wss://relay", {}, None),
        ("wss://relay", {"HTTPS_PROXY": "http://proxy:3128"}, Proxy("proxy", 3128)),
        ("https://relay", {"https_proxy": "proxy:3128"}, Proxy("proxy", 3128)),
        ("https://relay", {"https_proxy": "HTTP://proxy/"}, Proxy("proxy", 80)),
        ("https://relay", {"HTTP_PROXY": "http://proxy:3128"}, None),
        ("ws://relay", {"HTTP_PROXY": "http://proxy:3128"}, Proxy("proxy", 3128)),
        ("http://relay", {"http_proxy": "http://proxy:3128"}, Proxy("proxy", 3128)),
        ("http://relay", {"HTTPS_PROXY": "http://proxy:3128"}, None),
        ("wss://relay", {"ALL_PROXY": "http://[::2]:1"}, Proxy("::2", 1)),
        ("wss://relay", {"ALL_PROXY": "a", "HTTPS_PROXY": "b"}, Proxy("b", 80)),
        ("wss://relay", {"HTTPS_PROXY": "  "}, None),
        ("wss://relay", {"HTTPS_PROXY": "p", "NO_PROXY": "*"}, None),
        ("wss://relay.example", {"HTTPS_PROXY": "p", "NO_PROXY": "a, Relay.Example"}, None),
        ("wss://a.relay.example", {"HTTPS_PROXY": "p", "no_proxy": "relay.example"}, None),
        ("wss://a.relay.example", {"HTTPS_PROXY": "p", "no_proxy": ".relay.example"}, None),
        ("wss://a.relay.example", {"HTTPS_PROXY": "p", "no_proxy": "*.relay.example"}, None),
        (
            "wss://notrelay.example",
            {"HTTPS_PROXY": "p", "no_proxy": "relay.example"},
            Proxy("p", 80),
        ),
        ("wss://relay:8443", {"HTTPS_PROXY": "p", "no_proxy": "relay:8443"}, None),
        ("wss://relay:8444", {"HTTPS_PROXY": "p", "no_proxy": "relay:8443"}, Proxy("p", 80)),
        ("wss://10.1.2.3", {"HTTPS_PROXY": "p", "no_proxy": "10.0.0.0/8"}, None),
        ("wss://11.1.2.3", {"HTTPS_PROXY": "p", "no_proxy": "10.0.0.0/8,::/0"}, Proxy("p", 80)),
        ("wss://[fd00::1]", {"HTTPS_PROXY": "p", "no_proxy": "[fd00::1]"}, None),
        ("wss://relay", {"HTTPS_PROXY": "p", "no_proxy": ",,.,"}, Proxy("p", 80)),
        ("ws://localhost:1", {"ALL_PROXY": "p"}, None),
        ("ws://a.localhost", {"ALL_PROXY": "p"}, None),
        ("ws://127.8.0.1", {"ALL_PROXY": "p"}, None),
        ("ws://[::1]", {"ALL_PROXY": "p"}, None),
    ],
)
def test_proxy_by_environment(url: str, environ: dict[str, str], expected: Proxy | None) -> None:
    assert proxy_for(_url(url), environ) == expected


def test_credentials_of_a_proxy_are_decoded_and_not_shown() -> None:
    proxy = proxy_for(_url("wss://relay"), {"HTTPS_PROXY": "http://us%40er:p%3Ass@proxy:1"})
    assert proxy == Proxy("proxy", 1, "Basic dXNAZXI6cDpzcw==")
    assert "dXN" not in repr(proxy)
    nameless = proxy_for(_url("wss://relay"), {"HTTPS_PROXY": "http://user@proxy"})
    assert nameless == Proxy("proxy", 80, "Basic dXNlcjo=")


@pytest.mark.parametrize(
    "value", ["socks5://user:secret@proxy", "https://user:secret@proxy", "http://u:secret@", "a b"]
)
def test_unusable_proxy_is_named_by_its_variable_alone(value: str) -> None:
    with pytest.raises(
        ConnectFailed, match=r"^https_proxy does not name a usable proxy"
    ) as refused:
        proxy_for(_url("wss://relay"), {"https_proxy": value})
    assert "secret" not in str(refused.value)


# ---- roots of trust -------------------------------------------------------------------


# ---- connections ----------------------------------------------------------------------


class _Reader(asyncio.Protocol):
    """Keeps what it gets until the end."""

    def __init__(self) -> None:
        self.data = b""
        self.lost = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.data += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(exc)


async def _greet(peer: Peer) -> None:
    peer.writer.write(b"hello " + await peer.reader.readexactly(3))


async def _exchange(url: str, tls: ssl.SSLContext | None = None) -> bytes:
    async with asyncio.timeout(scaled(DEFAULT_TIMEOUT)):
        transport, reader = await open_connection(_url(url), _Reader, tls=tls)
        transport.write(b"you")
        await reader.lost
    return reader.data


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run])
def test_plain_connection(run: Any) -> None:
    async def body() -> None:
        async with serving(_greet) as port:
            transport, reader = await open_connection(_url(f"ws://127.0.0.1:{port}"), _Reader)
            raw = transport.get_extra_info("socket")
            assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            transport.write(b"you")
            await reader.lost
            assert reader.data == b"hello you"

    run(body())


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run])
def test_tls_verifies_the_name(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots, served = make_certificate(tmp_path, "localhost")

    async def body() -> None:
        async with serving(_greet, tls=served) as port:
            before = open_sockets()
            assert await _exchange(f"wss://localhost:{port}", tls_context(roots)) == b"hello you"
            with pytest.raises(ssl.SSLCertVerificationError):
                await _exchange(f"wss://127.0.0.1:{port}", tls_context(roots))
            with pytest.raises(ssl.SSLCertVerificationError):
                await _exchange(f"wss://localhost:{port}")
            monkeypatch.setenv("SSL_CERT_FILE", roots)
            assert await _exchange(f"wss://localhost:{port}") == b"hello you"
            await _until_sockets(before)

    run(body())


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run])
def test_a_pin_replaces_the_check_of_issuer_and_name(run: Any, tmp_path: Path) -> None:
    roots, served = make_certificate(tmp_path, "localhost")
    certificate = ssl.PEM_cert_to_DER_cert(Path(roots).read_text())
    pin = "SHA256:" + hashlib.sha256(certificate).digest().hex(":").upper()

    async def greet_or_be_left(peer: Peer) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await _greet(peer)

    async def body() -> None:
        async with serving(greet_or_be_left, tls=served) as port:
            before = open_sockets()
            url = f"wss://127.0.0.1:{port}"
            assert await _exchange(url, client_context(pins=["00" * 32, pin])) == b"hello you"
            with pytest.raises(CertificateRejected, match=normalise_pin(pin)):
                await _exchange(url, client_context(pins=["00" * 32]))
            await _until_sockets(before)

    run(body())


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run])
def test_unix_socket(run: Any, tmp_path: Path) -> None:
    async def body() -> None:
        path = tmp_path / "s"

        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await _greet(Peer(reader, writer))
            writer.close()

        server = await asyncio.start_unix_server(greet, path)
        try:
            assert await _exchange(f"unix:{path}") == b"hello you"
        finally:
            server.close()
        with pytest.raises(OSError, match="No such file"):
            await _exchange(f"unix:{tmp_path}/none")

    run(body())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("run", [uvloop.run, asyncio.run])
def test_nothing_is_sent_to_a_unix_socket_of_another_user(run: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        os.seteuid(65_534)  # the credentials of a server are those of listen()
        try:
            server.listen()
        finally:
            os.seteuid(0)

        async def body() -> None:
            with pytest.raises(ConnectFailed, match=f"{path} is run by uid 65534"):
                await _exchange(f"unix:{path}")

        run(body())
        accepted, _ = server.accept()
        with accepted:
            assert accepted.recv(1) == b""


def test_systems_without_unix_sockets_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        with monkeypatch.context() as patch:
            patch.delattr(socket, "AF_UNIX")
            with pytest.raises(ConnectFailed, match="no unix sockets"):
                await _exchange("unix:/s")

    asyncio.run(body())


async def _until_sockets(count: int) -> None:
    """Wait until no more sockets are open than this: some close a turn of the loop later."""
    async with asyncio.timeout(scaled(DEFAULT_TIMEOUT)):
        while open_sockets() > count:
            await asyncio.sleep(0)


def test_silent_address_does_not_delay_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener whose queue is full drops what knocks, as a broken route does."""
    full = socket.socket()
    full.bind(("127.0.0.2", 0))
    full.listen(0)
    port = full.getsockname()[1]
    knocking = [socket.socket() for _ in range(4)]
    for knocker in knocking:
        knocker.setblocking(False)
        knocker.connect_ex(full.getsockname())
    live = socket.create_server(("127.0.0.1", port))

    async def body() -> None:
        loop = asyncio.get_running_loop()

        async def resolve(*_: object, **__: object) -> list[Any]:
            return [
                (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.2", port)),
                (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
            ]

        monkeypatch.setattr(loop, "getaddrinfo", resolve)
        before = open_sockets()
        async with asyncio.timeout(scaled(DEFAULT_TIMEOUT)):
            transport, _ = await open_connection(_url(f"ws://relay.test:{port}"), _Reader)
        assert transport.get_extra_info("peername")[0] == "127.0.0.1"
        assert open_sockets() == before + 1
        transport.abort()

    monkeypatch.setattr(dial, "ATTEMPT_DELAY_SECONDS", 0.01)
    with contextlib.ExitStack() as stack:
        for opened in (*knocking, full, live):
            stack.callback(opened.close)
        asyncio.run(body())


def test_each_family_has_its_share_of_the_attempts() -> None:
    def entry(family: int, host: str | bytes) -> Any:
        return (family, socket.SOCK_STREAM, 6, "", (host, 1))

    six = [entry(socket.AF_INET6, f"::{number}") for number in range(10)]
    four = entry(socket.AF_INET, "127.0.0.1")
    limited = [entry(socket.AF_INET6, b"::%d" % number) for number in range(8)]
    assert dial._limited(six) == limited
    assert dial._limited([*six, four]) == [*limited[:4], entry(socket.AF_INET, b"127.0.0.1")]


def test_refused_connection_is_an_os_error() -> None:
    async def body() -> None:
        with socket.socket() as reserved:
            reserved.bind(("127.0.0.1", 0))
            port = reserved.getsockname()[1]
            with pytest.raises(ConnectionRefusedError):
                await open_connection(_url(f"ws://127.0.0.1:{port}"), _Reader)

    uvloop.run(body())


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run])
def test_cancelled_handshake_leaves_no_socket(run: Any) -> None:
    async def body() -> None:
        knocked = asyncio.Event()

        async def ignore(peer: Peer) -> None:
            await peer.reader.read(1)
            knocked.set()
            await peer.reader.read()

        async with serving(ignore) as port, asyncio.TaskGroup() as group:
            before = open_sockets()
            url = _url(f"wss://127.0.0.1:{port}")
            dialling = group.create_task(open_connection(url, _Reader))
            await knocked.wait()
            dialling.cancel()
            await asyncio.wait([dialling])
            assert dialling.cancelled()
            await _until_sockets(before)

    run(body())


# ---- through a proxy ------------------------------------------------------------------


class _ConnectProxy:
    """A proxy that connects every name to one port of loopback."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.heads: list[list[str]] = []

    async def handle(self, peer: Peer) -> None:
        self.heads.append(await peer.read_head())
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        peer.writer.write(b"HTTP/1.1 200 Connection established\r\nVia: test\r\n\r\n")
        async with asyncio.TaskGroup() as group:
            group.create_task(self._copy(peer.reader, writer))
            group.create_task(self._copy(reader, peer.writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
        writer.close()


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run])
def test_tunnel_through_a_proxy(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots, served = make_certificate(tmp_path, "relay.test")

    async def body() -> None:
        async with serving(_greet, tls=served) as port:
            proxy = _ConnectProxy(port)
            async with serving(proxy.handle) as proxy_port:
                value = f"http://user:secret@127.0.0.1:{proxy_port}"
                monkeypatch.setenv("HTTPS_PROXY", value)
                said = await _exchange("wss://relay.test:8443/path", tls_context(roots))
        assert said == b"hello you"
        assert proxy.heads == [
            [
                "CONNECT relay.test:8443 HTTP/1.1",
                "Host: relay.test:8443",
                "Proxy-Authorization: Basic dXNlcjpzZWNyZXQ=",
            ]
        ]

    run(body())


def test_plain_websockets_are_tunnelled_and_plain_http_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        async with serving(_greet) as port:
            proxy = _ConnectProxy(port)
            async with serving(proxy.handle) as proxy_port:
                monkeypatch.setenv("HTTP_PROXY", f"127.0.0.1:{proxy_port}")
                assert await _exchange("ws://relay.test") == b"hello you"
            assert proxy.heads == [["CONNECT relay.test:80 HTTP/1.1", "Host: relay.test:80"]]
            monkeypatch.setenv("HTTP_PROXY", f"127.0.0.1:{port}")
            assert await _exchange("http://relay.test") == b"hello you"

    uvloop.run(body())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 407 Secret Needed\r\n\r\n", "the proxy refused to connect: 407"),
        (b"hello\r\n\r\n", "the proxy refused to connect: no HTTP status"),
        (b"HTTP/1.1 200 OK\r\n", "the proxy sent no valid response"),
        (b"HTTP/1.1 200 OK\r\n\r\n\x16\x03", "the proxy sent data after its response"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 40_000, "the proxy sent no valid response"),
    ],
)
def test_proxy_that_refuses(answer: bytes, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(peer: Peer) -> None:
        await peer.read_head()
        peer.writer.write(answer)
        peer.writer.write_eof()
        with contextlib.suppress(OSError):
            await peer.reader.read()

    async def body() -> None:
        async with serving(refuse) as port:
            before = open_sockets()
            monkeypatch.setenv("ALL_PROXY", f"127.0.0.1:{port}")
            with pytest.raises(ConnectFailed, match=f"^{reason}$") as failed:
                await _exchange("wss://relay.test")
            assert failed.value.status is None
            await _until_sockets(before)

    uvloop.run(body())
